"""The parts of `bench.gpu`, in the order of `bench.gpu.runner.PARTS`."""
