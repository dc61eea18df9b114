"""Make the collectives of a Python process group visible to PyTorch's dispatch modes and profiler.

PyTorch's own process groups call each collective as an operator, such as `c10d::allreduce_`. Dispatch modes
(`CommDebugMode`, `FlopCounterMode`, memory trackers) and the profiler record operators. PyTorch calls a process group
written in Python before the dispatcher, so that modes and profiler cannot record its collectives.

If a mode or the profiler is active on the calling thread, a collective decorated with `shown` calls PyTorch's operator
on a plain `ProcessGroup` over the same backends. The dispatch mode `_Bottom`, which is entered below all modes of the
user, intercepts the operator and calls the Python group's own method. So a rank sends the same data with and without an
active mode. Without an active mode or profiler, a collective costs two extra checks.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Work
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

P = ParamSpec("P")
G = TypeVar("G", bound="PythonProcessGroup")


class PythonProcessGroup(Protocol):
    """A process group written in Python. PyTorch calls its collectives directly, not as operators, so that dispatch
    modes and the profiler do not see them.
    """

    @property
    def plain(self) -> dist.ProcessGroup:
        """Return a `dist.ProcessGroup` over the same backends, which calls its collectives as operators."""
        ...


_active_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]

BEFORE_2_13 = {
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""Names that collectives had in earlier versions of PyTorch."""


def shown(method: Callable[Concatenate[G, P], Work | None]) -> Callable[Concatenate[G, P], Work | None]:
    """Decorate a collective of a process group written in Python, so that dispatch modes and the profiler record it."""
    name = method.__name__

    @functools.wraps(method)
    def collective(group: G, *args: P.args, **kwargs: P.kwargs) -> Work | None:
        if _active_modes() or _is_profiled():
            return _show(group, name, functools.partial(method, group, *args, **kwargs), args, kwargs)
        return method(group, *args, **kwargs)

    return cast(Callable[Concatenate[G, P], Work | None], collective)


def _show(
    group: PythonProcessGroup, name: str, call: Callable[[], Work | None], args: Sequence[Any], kwargs: dict[str, Any]
) -> Work | None:
    if getattr(_inside, "here", False):
        return call()
    bottom = _Bottom(call, functools.partial(_as_event, group.plain, name, [*args, *kwargs.values()]))
    with bottom.below_all():
        known = name if hasattr(dist.ProcessGroup, name) else BEFORE_2_13[name]
        work: Work | None = getattr(group.plain, known)(*args, **kwargs)
    return bottom.work if bottom.called else work


_inside = threading.local()
"""Thread-local flag `here`: True while this thread runs a collective that dispatch modes or the profiler record.

If that collective calls others, these are not recorded.
"""


class _Ended(Work):
    """`Work` of a collective that has ended.

    A synchronous collective returns none, but PyTorch's operator requires one.
    """

    def wait(self, timeout: object = None) -> bool:
        return True


class _Bottom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode below all dispatch modes of the user.

    It calls the method of the process group written in Python instead of PyTorch's operator.

    Attributes:
        called: whether PyTorch has called this mode. False if a mode of the user, for example for fake tensors, has
            handled the operator itself.
        work: `Work` object that the process group's method has returned.
    """

    def __init__(self, call: Callable[[], Work | None], event: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call, self._event = call, event
        self.called = False
        self.work: Work | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d" or self.called or torch._C._len_torch_dispatch_stack():
            # Run the operator itself: it is not the collective, the collective has run already, or a lower mode must
            # run first.
            return func(*args, **(kwargs or {}))
        self.called = _inside.here = True
        try:
            with self._event():
                self.work = self._call()
        finally:
            _inside.here = False
        boxed = (self.work or _Ended()).boxed()
        return boxed if len(func._schema.returns) == 1 else (args[0], boxed)

    @contextmanager
    def below_all(self) -> Iterator[None]:
        """Put this dispatch mode below the user's active dispatch modes while the `with` block runs."""
        push, pop = torch._C._push_on_torch_dispatch_stack, torch._C._pop_torch_dispatch_stack
        above = [pop(None) for _ in range(_active_of_user())]
        push(self)
        for mode in reversed(above):
            push(mode)
        try:
            yield
        finally:
            above = [pop(None) for _ in above]
            pop(None)
            for mode in reversed(above):
                push(mode)


def _active_of_user() -> int:
    """Return the number of the user's active dispatch modes, without PyTorch's own for compiling and fake tensors."""
    stack = [torch._C._get_dispatch_stack_at(place) for place in range(torch._C._len_torch_dispatch_stack())]
    return sum(getattr(mode, "_mode_key", None) is None for mode in stack)


def _as_event(plain: dist.ProcessGroup, name: str, args: Sequence[Any]) -> AbstractContextManager[object]:
    """Return a profiler event `sirtaki:…` for a collective, with the fields of NCCL's profiler event
    `record_param_comms`.

    The event must have another name than NCCL's, because for NCCL's name the profiler expects data that only PyTorch's
    C++ can set.
    """
    if not _is_profiled():
        return nullcontext()
    outputs, inputs = ([*_tensors(args[place : place + 1])] for place in (0, 1))
    inputs = inputs or outputs
    fields = {
        "Collective name": name,
        "In msg nelems": sum(tensor.numel() for tensor in inputs),
        "Out msg nelems": sum(tensor.numel() for tensor in outputs),
        "dtype": str(inputs[0].dtype).removeprefix("torch.") if inputs else "",
        "Group size": plain.size(),
        "Rank": plain.rank(),
        "Process Group Name": plain.group_name,
        "Process Group Description": plain.group_desc,
    }
    try:
        event: AbstractContextManager[object] = torch._C._profiler._RecordFunctionFast(
            f"sirtaki:{name}", inputs, fields
        )
    except TypeError:  # In this version of PyTorch, profiler events have no fields.
        event = torch.autograd.profiler.record_function(f"sirtaki:{name}")
    return event


def _tensors(found: Any) -> Iterator[torch.Tensor]:  # `found` is a tensor, a list of tensors, or a list of such lists.
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, list | tuple):
        for each in found:
            yield from _tensors(each)


RELEASES_INTERPRETER = TorchVersion(torch.__version__) >= "2.9"
"""Whether PyTorch releases the GIL while it destroys a process group (pytorch/pytorch 154976).

If not, PyTorch holds the GIL while it waits for Gloo's threads. Both then hang if one of these threads needs the GIL to
free a tensor.
"""

# Process groups that are never destroyed, because PyTorch would hold the GIL while it destroys them.
_kept: list[dist.ProcessGroup] = []


class FlightEntries:
    """Writer of entries in PyTorch's flight recorder, for collectives over Sirtaki's own connections.

    Gloo writes the entries of its own collectives, but a backend in Python cannot write entries. Therefore this class
    lets a Gloo group of one rank reduce an uninitialised tensor of the same size and dtype, which takes no time. An
    entry shows that this rank has called the collective, so that missing ranks can be found. It does not show that the
    collective has ended.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Prepare to write entries with the name and the size of the process group `group`."""
        self._name, self._ranks = group.group_name, group.size()
        self._groups: dict[str, Any] = {}  # The groups are Any, because PyTorch's stub of process groups lacks methods.

    def add(self, collective: str, numel: int, dtype: torch.dtype) -> None:
        """Write an entry for a collective that this rank has launched.

        Args:
            collective: name of the collective. The group description of the entry contains it.
            numel: number of elements of the tensor.
            dtype: dtype of the tensor.
        """
        if (alone := self._groups.get(collective)) is None:
            made: Any = dist.ProcessGroup  # Typed as Any, because the stub lacks the constructor without a store.
            alone = self._groups[collective] = made(0, 1)
            gloo = dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=60))
            alone._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            alone._set_group_name(f"{self._name}.{collective}")
            if not RELEASES_INTERPRETER:
                _kept.append(alone)
            alone._set_group_desc(f"{collective} by sirtaki between {self._ranks} ranks")
        shown = torch.empty(numel, dtype=dtype, device="cpu")
        alone._get_backend(torch.device("cpu")).allreduce([shown], dist.AllreduceOptions())
