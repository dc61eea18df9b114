"""Stores settings that jobs found fastest: records, graphs of models, databases. Imports no torch.

Records hold the classes that run (`Knobs`, `ShardKnobs`, `SparsePath`), so this package is above `sirtaki.autotune`.
"""

if __name__ != "sirtaki.registry":  # every module would be there twice, with classes that differ
    raise ImportError("import sirtaki.registry, not registry: the folder at the checkout's root is the same code")
