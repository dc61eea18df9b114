"""Communication between ranks: control plane, transports, and reduction of gradients by a given plan. No tuning."""

if __name__ != "sirtaki.comm":  # else each module would exist twice, with different classes
    raise ImportError("import sirtaki.comm, not comm: the folder at the checkout's root is the same code")
