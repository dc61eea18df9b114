"""Moves gradients. Knows plans, nothing of tuning; may import `sirtaki.errors` and nothing else of Sirtaki."""

if __name__ != "sirtaki.comm":  # every module would be there twice, with classes that differ
    raise ImportError("import sirtaki.comm, not comm: the folder at the checkout's root is the same code")
