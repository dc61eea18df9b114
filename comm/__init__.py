"""Communication between ranks: small messages (control plane), transports, all-reduces of gradients by a given plan.

Nothing here chooses or tunes a plan.
"""

if __name__ != "sirtaki.comm":  # else each module would exist twice, with different classes
    raise ImportError("import sirtaki.comm, not comm: both are the same code, in the folder comm of Sirtaki's checkout")
