"""Horovod's old place of all operations holds those that are there now."""

import sirtaki.torch as hvd
from sirtaki.torch import mpi_ops


def test_every_name_is_the_one_of_the_package() -> None:
    for name, value in vars(mpi_ops).items():
        if not name.startswith("_"):
            assert value is getattr(hvd, name)
    assert mpi_ops._basics.rank is hvd.rank


def test_no_operation_on_tensors_is_left_out() -> None:
    kinds = ("all", "grouped_", "broadcast", "reducescatter", "sparse_")
    operations = {name for name, value in vars(hvd).items() if name.startswith(kinds) and callable(value)}
    on_objects = {name for name in operations if "object" in name or name.startswith(("broadcast_p", "broadcast_opt"))}
    on_tensors = operations - on_objects - {"sparse_gradients"}  # which tells how they travel
    assert on_tensors <= set(vars(mpi_ops))
    assert len(on_tensors) > 15
