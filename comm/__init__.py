"""Communication between ranks: small messages (control plane), transports, all-reduces of gradients by a given plan.

Nothing here chooses or tunes a plan.
"""

if __name__ != "sirtaki.comm":  # else each module would exist twice, with different classes
    raise ImportError(
        "import sirtaki.comm instead of comm: the folder comm in Sirtaki's checkout is the same code, which must not "
        "be loaded twice"
    )
