"""Store the fastest settings of jobs in a database: records, graphs of models, search for similar jobs.

Imports no torch.

Records contain tuner classes (`Knobs`, `ShardKnobs`, `SparsePath`), so this package depends on `sirtaki.autotune`.
"""

# Reject `import registry` without `sirtaki.`: both imports together would load each module twice, with two copies of
# each class.
if __name__ != "sirtaki.registry":
    raise ImportError(
        "write `import sirtaki.registry`, not `import registry`: both load the same code, which must be loaded only "
        "once"
    )
