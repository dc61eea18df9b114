"""Communication between ranks: small messages (control plane), transports, all-reduces of gradients by a given plan.

Nothing here chooses or tunes a plan.
"""

if __name__ != "sirtaki.comm":  # else each module would exist twice, with different classes
    raise ImportError("cannot import the module comm: import sirtaki.comm instead, which is the same code")
