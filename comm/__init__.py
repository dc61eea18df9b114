"""Communication between ranks: small messages (control plane), transports, all-reduces of gradients by a given plan.

Nothing here chooses or tunes a plan.
"""

if __name__ != "sirtaki.comm":  # else each module would exist twice, with different classes
    raise ImportError(
        "write `import sirtaki.comm`, not `import comm`: both load the same code, which must be loaded only once"
    )
