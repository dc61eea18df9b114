"""Store the fastest settings of jobs: records, graphs of models, databases. Imports no torch.

Records contain tuner classes (`Knobs`, `ShardKnobs`, `SparsePath`), so this package depends on `sirtaki.autotune`.
"""

if __name__ != "sirtaki.registry":  # otherwise every module would be loaded twice, with different classes
    raise ImportError(
        "write `import sirtaki.registry`, not `import registry`: both load the same code, which must be loaded only "
        "once"
    )
