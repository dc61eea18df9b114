"""Every name of horovod.torch is there, with Horovod 0.28.1's arguments and defaults, also at its old places."""

# ruff: noqa: E501  # the table has a line a function

import inspect
from collections.abc import Sequence
from typing import Any, Union

import pytest

import sirtaki.torch as hvd
from sirtaki.errors import CommError, MismatchError, NotInitializedError, PeerLostError, StallError
from sirtaki.torch import mpi_ops
from sirtaki.torch.exceptions import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    HostsUpdatedInterrupt,
    get_version_mismatch_message,
)

CONSTANTS = {"Average": 0, "Sum": 1, "Adasum": 2, "Min": 3, "Max": 4, "Product": 5}

FUNCTIONS = """
DistributedOptimizer(optimizer, named_parameters=None, compression=Compression.none, backward_passes_per_step=1, op=0, gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=global_process_set)
add_process_set(process_set: Union[ProcessSet, Sequence[int]]) -> ProcessSet
allgather(tensor, name=None, process_set=global_process_set)
allgather_async(tensor, name=None, process_set=global_process_set)
allgather_object(obj, name=None)
allreduce(tensor, average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
allreduce_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
allreduce_async(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
allreduce_async_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
alltoall(tensor, splits=None, name=None, process_set=global_process_set)
alltoall_async(tensor, splits=None, name=None, process_set=global_process_set)
barrier(process_set=global_process_set)
broadcast(tensor, root_rank, name=None, process_set=global_process_set)
broadcast_(tensor, root_rank, name=None, process_set=global_process_set)
broadcast_async(tensor, root_rank, name=None, process_set=global_process_set)
broadcast_async_(tensor, root_rank, name=None, process_set=global_process_set)
broadcast_object(obj, root_rank=0, name=None, process_set=global_process_set)
broadcast_optimizer_state(optimizer, root_rank, model=None)
broadcast_parameters(params, root_rank)
ccl_built()
cross_rank()
cross_size()
cuda_built()
ddl_built()
gloo_built()
gloo_enabled()
grouped_allgather(tensors, name=None, process_set=global_process_set)
grouped_allgather_async(tensors, name=None, process_set=global_process_set)
grouped_allreduce(tensors, average=None, name=None, compression=Compression.none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
grouped_allreduce_(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
grouped_allreduce_async(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
grouped_allreduce_async_(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set)
grouped_reducescatter(tensors, name=None, compression=Compression.none, op=0, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0)
grouped_reducescatter_async(tensors, name=None, op=0, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0)
init(*args, **kwargs)
is_initialized()
join(device=-1) -> int
local_rank()
local_size()
mpi_built()
mpi_enabled()
mpi_threads_supported()
nccl_built()
poll(handle)
rank()
reducescatter(tensor, name=None, compression=Compression.none, op=0, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0)
reducescatter_async(tensor, name=None, op=0, process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0)
remove_process_set(process_set: ProcessSet) -> bool
rocm_built()
shutdown(*args, **kwargs)
size()
sparse_allreduce_async(tensor, name, op, process_set=global_process_set)
start_timeline(file_path, mark_cycles=False)
stop_timeline()
synchronize(handle)
""".strip().splitlines()

CLASSES = {
    "ProcessSet": ("included", "rank", "size", "ranks", "mpi_comm", "process_set_id"),
    "SyncBatchNorm": ("forward",),
    "Compression": ("none", "fp16"),
    "HorovodInternalError": (),
}

NAMES = {
    "Union": Union,
    "Sequence": Sequence,
    "ProcessSet": hvd.ProcessSet,
    "Compression": hvd.Compression,
    "global_process_set": hvd.global_process_set,
}


def parameters(function: Any) -> list[tuple[str, Any]]:
    """Names and defaults; `*args, **kwargs` stand for anything."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.default) for parameter in found if parameter.kind not in kinds]


@pytest.mark.parametrize("line", FUNCTIONS, ids=[line.split("(")[0] for line in FUNCTIONS])
def test_a_function_has_horovods_arguments_and_defaults(line: str) -> None:
    name = line.split("(")[0]
    scope: dict[str, Any] = dict(NAMES)
    exec(f"def {line}: ...", scope)
    wanted = parameters(scope[name])
    # Ours may take more, behind Horovod's.
    assert parameters(getattr(hvd, name))[: len(wanted)] == wanted


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_horovods_members(name: str) -> None:
    for member in CLASSES[name]:
        assert hasattr(getattr(hvd, name), member) or hasattr(getattr(hvd, name)([0]), member)


def test_operations_have_horovods_values() -> None:
    assert {name: getattr(hvd, name) for name in CONSTANTS} == CONSTANTS


def test_a_process_set_is_unknown_before_init() -> None:
    members = hvd.ProcessSet([0])
    assert (members.rank(), members.size(), members.included()) == (None, None, None)


def test_batch_norm_has_horovods_arguments() -> None:
    found = parameters(hvd.SyncBatchNorm)
    wanted = [("eps", 1e-5), ("momentum", 0.1), ("affine", True), ("track_running_stats", True)]
    assert found[:5] == [("num_features", inspect.Parameter.empty), *wanted]


def test_failed_communication_is_horovods_internal_error() -> None:
    assert hvd.HorovodInternalError is mpi_ops.HorovodInternalError is HorovodInternalError is CommError
    assert issubclass(HorovodInternalError, RuntimeError)
    for cls in (MismatchError, PeerLostError, StallError):
        assert issubclass(cls, HorovodInternalError)


def test_an_interrupt_has_the_flag_whether_to_synchronise() -> None:
    assert not HostsUpdatedInterrupt().skip_sync
    assert HostsUpdatedInterrupt(skip_sync=True).skip_sync
    assert not issubclass(HostsUpdatedInterrupt, HorovodInternalError)


def test_a_version_that_does_not_fit_names_both() -> None:
    error = HorovodVersionMismatchError("torch", "1.0", "2.0")
    assert isinstance(error, ImportError)
    assert (error.name, error.version, error.installed_version) == ("torch", "1.0", "2.0")
    assert str(error) == get_version_mismatch_message("torch", "1.0", "2.0")
    assert str(error) == "Framework torch installed with version 2.0 but found version 1.0."


@pytest.mark.parametrize("module", ["mpi_ops", "functions", "optimizer", "compression", "sync_batch_norm", "elastic"])
def test_modules_that_scripts_import_are_there(module: str) -> None:
    __import__(f"sirtaki.torch.{module}")


def test_every_name_of_horovods_old_place_of_all_operations_is_the_one_of_the_package() -> None:
    for name, value in vars(mpi_ops).items():
        if not name.startswith("_"):
            assert value is getattr(hvd, name)
    assert mpi_ops._basics.rank is hvd.rank


def test_no_operation_on_tensors_is_left_out_there() -> None:
    kinds = ("all", "grouped_", "broadcast", "reducescatter", "sparse_")
    operations = {name for name, value in vars(hvd).items() if name.startswith(kinds) and callable(value)}
    on_objects = {name for name in operations if "object" in name or name.startswith(("broadcast_p", "broadcast_opt"))}
    on_tensors = operations - on_objects - {"sparse_gradients"}  # which tells how they travel
    assert on_tensors <= set(vars(mpi_ops))
    assert len(on_tensors) > 15


def test_without_a_job_sparse_gradients_report_nothing() -> None:
    with pytest.raises(NotInitializedError):
        hvd.sparse_gradients()
