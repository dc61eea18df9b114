"""Communication between ranks: small messages (control plane), transports, all-reduces of gradients by a given plan.

Nothing here chooses or tunes a plan.
"""

if __name__ != "sirtaki.comm":
    # Reject `import comm`, because importing the package under two names would define each class twice.
    raise ImportError(
        "write `import sirtaki.comm`, not `import comm`: both load the same code, which must be loaded only once"
    )
