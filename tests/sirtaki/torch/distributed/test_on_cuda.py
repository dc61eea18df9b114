"""Operations that the backend forwards to its inner group for CUDA tensors. Without a GPU the group is recorded."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, HashStore

from sirtaki.torch.distributed.process_group import SirtakiProcessGroup


class OnCuda(torch.Tensor):
    """A tensor in host memory that claims to be on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def on_cuda(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnCuda)  # type: ignore[arg-type]


class Ended(dist.Work):
    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class RecordedNccl:
    """Answers as NCCL's group: synchronous collectives return nothing, and tensors have to be contiguous."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _fill(self, name: str, tensors: Any, opts: Any) -> Ended | None:
        self.calls.append(name)
        for tensor in tensors if isinstance(tensors, list) else [tensors]:
            assert tensor.is_contiguous()
            tensor.fill_(7.0)
        return Ended() if opts.asyncOp else None

    def broadcast(self, tensors: Any, opts: Any) -> Ended | None:
        return self._fill("broadcast", tensors, opts)

    def allreduce(self, tensors: Any, opts: Any) -> Ended | None:
        return self._fill("allreduce", tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> Ended | None:
        return self._fill("reduce", tensors, opts)

    def _allgather_base(self, output: Any, tensor: Any, opts: Any) -> Ended | None:
        return self._fill("_allgather_base", output, opts)

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any) -> Ended | None:
        return self._fill("_reduce_scatter_base", output, opts)

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def abort(self) -> None:
        self.calls.append("abort")
        raise RuntimeError("the communicator is gone")


class OverRecorded(SirtakiProcessGroup):
    """The backend on a machine with a GPU."""

    def _open_cuda(self, *_: object) -> RecordedNccl:
        return RecordedNccl()


@pytest.fixture
def group() -> Iterator[OverRecorded]:
    made = OverRecorded(HashStore(), 0, 1, timedelta(seconds=20))
    yield made
    made.shutdown()


def options(of: type, *, asynchronous: bool) -> Any:
    made = of()
    if not hasattr(made, "asyncOp"):
        pytest.skip("a PyTorch whose collectives all return works")
    made.asyncOp = asynchronous
    return made


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("name", "of"),
    [("broadcast", dist.BroadcastOptions), ("allreduce", dist.AllreduceOptions), ("reduce", dist.ReduceOptions)],
)
def test_tensors_are_filled_contiguous_or_not(
    group: OverRecorded, name: str, of: type, transposed: bool, asynchronous: bool
) -> None:
    tensor = torch.zeros(3, 4)
    work = getattr(group, name)([on_cuda(tensor.t() if transposed else tensor)], options(of, asynchronous=asynchronous))
    assert (work is None) is not asynchronous
    if work is not None:
        work.wait()
    assert tensor.eq(7.0).all()
    assert group._on_cuda.calls == [name]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_several_at_once_return_one_work_or_none(group: OverRecorded, asynchronous: bool) -> None:
    whole, part = torch.zeros(4), torch.zeros(4)
    gathers = options(AllgatherOptions, asynchronous=asynchronous)
    scatters = options(dist.ReduceScatterOptions, asynchronous=asynchronous)
    works = [
        group.all_gather_single_coalesced([on_cuda(whole)], [on_cuda(torch.ones(4))], gathers),
        group.reduce_scatter_single_coalesced([on_cuda(part)], [on_cuda(torch.ones(4))], scatters),
    ]
    assert [work is not None for work in works] == [asynchronous] * 2
    assert torch.cat([whole, part]).eq(7.0).all()


def test_the_groups_end_is_that_of_nccls(group: OverRecorded) -> None:
    group.shutdown()
    assert group._on_cuda.calls == ["shutdown"]
    with pytest.raises(RuntimeError, match="the communicator is gone"):
        group.abort()
    assert group._on_cuda.calls == ["shutdown", "abort"]
