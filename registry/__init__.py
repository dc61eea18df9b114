"""Remembers winners. Knows graphs and stores, nothing of communication or tuning.

May import `sirtaki.errors` and `sirtaki.measures` only. Knobs and trials travel through it as JSON; the caller turns
them into its own types.
"""

if __name__ != "sirtaki.registry":  # every module would be there twice, with classes that differ
    raise ImportError("import sirtaki.registry, not registry: the folder at the checkout's root is the same code")
