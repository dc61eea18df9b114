"""Horovod's old place of all operations holds those that are there now."""

import sirtaki.torch as hvd
from sirtaki.torch import mpi_ops


def test_every_name_is_the_one_of_the_package() -> None:
    for name in mpi_ops.__all__:
        assert hasattr(mpi_ops, name)
        if name != "_basics" and hasattr(hvd, name):
            assert getattr(mpi_ops, name) is getattr(hvd, name)


def test_no_operation_on_tensors_is_left_out() -> None:
    kinds = ("all", "grouped_", "broadcast", "reducescatter", "sparse_")
    operations = {name for name, value in vars(hvd).items() if name.startswith(kinds) and callable(value)}
    on_objects = {name for name in operations if "object" in name or name.startswith(("broadcast_p", "broadcast_opt"))}
    on_tensors = operations - on_objects - {"sparse_gradients"}  # which tells how they travel
    assert on_tensors <= set(mpi_ops.__all__)
    assert len(on_tensors) > 15
