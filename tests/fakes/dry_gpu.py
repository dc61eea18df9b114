"""What plays the GPU in a dry run of `bench.gpu`: streams are threads that are late, NCCL is Gloo.

The product's code is the same as on a GPU down to two seams: `Device`, which `DryDevice` plays, and PyTorch's
`ProcessGroupNCCL`, which `DryNccl` plays. `DryNccl` has only the attributes that PyTorch's class has, by the table of
`tests/formats/nccl_attributes.json`, so that a call that no release has fails here, too.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fakes.streams import FakeDevice, FakeEvent, FakeStream
from torch._C._distributed_c10d import PrefixStore

from bench.gpu.place import Kernel, Place
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.nccl_streams.transport import NcclVersions
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.router import Router
from sirtaki.engine.settings import Settings

TABLE = Path(__file__).parents[1] / "formats" / "nccl_attributes.json"
RELEASE = "2.11.0"
"""Release of PyTorch whose attributes the dry run allows."""

MEMORY_BYTES = 80 << 30
COMMUNICATOR_BYTES = 30 << 20


def attributes(of: str) -> frozenset[str]:
    """Return what a class of PyTorch's has in `RELEASE`."""
    return frozenset(json.loads(TABLE.read_text())["releases"][RELEASE][of])


class DryDevice(FakeDevice):
    """A device whose streams are threads; it orders packing after every stream that writes gradients."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.noticed: dict[FakeStream, FakeEvent] = {}
        self.synchronised: list[str] = []
        self.kernels: list[Kernel] = []

    def notice_stream(self) -> None:
        self.noticed[self.current] = self.record_event()

    @contextmanager
    def beside(self) -> Iterator[None]:
        written, self.noticed = list(self.noticed.values()), {}
        with super().beside():
            for event in written:
                self.order_after(event)
            yield

    def synchronise(self) -> None:
        self.synchronised.append("synchronise")
        super().synchronise()

    def sleep(self, seconds: float) -> None:
        self.current.put(lambda: time.sleep(seconds))


class DryWork:
    """Plays the work of a collective: the current stream waits for it."""

    def __init__(self, device: DryDevice, event: FakeEvent) -> None:
        self._device, self._event = device, event

    def wait(self) -> None:
        self._device.order_after(self._event)

    def is_completed(self) -> bool:
        return self._event.reached.is_set()


class Options:
    """Plays `ProcessGroupNCCL.Options`."""

    _fields = attributes("ProcessGroupNCCL.Options")

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = Config()

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self._fields:
            raise AttributeError(f"PyTorch {RELEASE} has no ProcessGroupNCCL.Options.{name}")
        super().__setattr__(name, value)


class Config:
    """Plays `ProcessGroupNCCL.NCCLConfig`."""

    _fields = attributes("ProcessGroupNCCL.NCCLConfig")

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self._fields:
            raise AttributeError(f"PyTorch {RELEASE} has no NCCLConfig.{name}")
        super().__setattr__(name, value)


def _operation(how: Any) -> tuple[str, float]:
    """Return the name and the factor of an operation, or of options with one."""
    operation = getattr(how, "reduceOp", how)
    if type(operation) is not dist.ReduceOp:  # one of its constants
        operation = dist.ReduceOp(operation)
    name, factor = operation.__getstate__()
    return re.split(r"[.:>]", str(name))[1], 1.0 if factor is None else float(factor)


class DryNccl:
    """Plays `ProcessGroupNCCL`: operations gather over Gloo and reduce here, late, on a stream of a `DryDevice`.

    As PyTorch from 2.8 on: with `asyncOp = False` on the current stream, without a Work; else on a stream of its own.
    """

    Options = Options
    NCCLConfig = Config
    device: DryDevice
    log: Callable[[str], object]
    open_groups = 0

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._rank, self._size, self._options = rank, size, options
        self._gloo = dist.ProcessGroupGloo(PrefixStore("dry", store), rank, size, options._timeout)  # type: ignore[attr-defined]
        self._stream = self.device.make_stream()
        self._algorithm = os.environ.get("NCCL_ALGO", "Ring")
        self._protocol = os.environ.get("NCCL_PROTO", "Simple")
        DryNccl.open_groups += 1

    def __getattribute__(self, name: str) -> Any:
        if name[0] != "_" and name not in ("device", "log") and name not in attributes_of_group:
            raise AttributeError(f"PyTorch {RELEASE} has no ProcessGroupNCCL.{name}")
        return super().__getattribute__(name)

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        mine = tensor.detach().contiguous().view(-1).view(torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self._size)]
        if mine.numel():
            self._gloo.allgather([parts], [mine.clone()]).wait()
        return [part.view(tensor.dtype).view(tensor.shape) for part in parts]

    def _reduced(self, tensor: torch.Tensor, name: str, factor: float) -> torch.Tensor:
        wide = torch.float64 if tensor.is_floating_point() else torch.int64
        parts = torch.stack([part.to(wide) for part in self._gather(tensor)])
        if name in ("SUM", "AVG", "PREMUL_SUM"):
            return parts.sum(0) * factor if name != "AVG" else parts.sum(0) / self._size
        return {"MIN": lambda: parts.amin(0), "MAX": lambda: parts.amax(0), "PRODUCT": lambda: parts.prod(0)}[name]()

    def _start(self, what: str, options: Any, tensor: torch.Tensor, function: Callable[[], object]) -> Any:
        device, current = self.device, getattr(options, "asyncOp", True) is False
        stream = device.current if current else self._stream
        ctas = getattr(self._options.config, "max_ctas", 2)
        kind = str(tensor.dtype).removeprefix("torch.").replace("float", "f")
        tree = "TREE" if self._algorithm.upper() == "TREE" else "RING"
        name = f"ncclDevKernel_{what}_Sum_{kind}_{tree}_LL(ncclDevKernelArgsStorage<4096ul>)"
        if self._rank == 0:
            self.log(
                f"NCCL INFO {what}: {tensor.numel() * tensor.element_size()} Bytes -> Algo {self._algorithm.upper()} "
                f"proto {self._protocol.upper()} channel{{Lo..Hi}}={{0..{ctas - 1}}}"
            )

        def run() -> None:
            begin_s = time.perf_counter()
            try:
                function()
            except RuntimeError as err:  # another rank is gone: NCCL's kernel would wait for it for ever
                print(f"played NCCL: {err}", flush=True)
                threading.Event().wait()
            device.kernels.append(Kernel(name, device.all_streams.index(stream), ctas, begin_s, time.perf_counter()))

        packed = device.record_event()
        with device.on(stream):
            device.order_after(packed)
            device.current.put(run)
            return None if current else DryWork(device, device.record_event())

    def allreduce(self, tensors: Sequence[torch.Tensor], how: Any = dist.ReduceOp.SUM) -> Any:
        tensor, operation = tensors[0].detach(), _operation(how)
        return self._start("AllReduce", how, tensor, lambda: tensor.copy_(self._reduced(tensor, *operation)))

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, how: Any) -> Any:
        share, whole, operation = output.detach(), tensor.detach(), _operation(how)

        def run() -> None:
            share.copy_(self._reduced(whole, *operation).view(self._size, -1)[self._rank])

        return self._start("ReduceScatter", how, whole, run)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, how: Any = None) -> Any:
        whole, share = output.detach(), tensor.detach()
        return self._start("AllGather", how, whole, lambda: whole.copy_(torch.cat(self._gather(share))))

    def get_error(self) -> Any:
        return SimpleNamespace(name="SUCCESS")

    def shutdown(self) -> None:
        DryNccl.open_groups -= 1

    abort = shutdown


attributes_of_group = attributes("ProcessGroupNCCL")


class DryPlace(Place):
    """See `Place`. Tensors are the host's; gradients are reduced on the streams of a `DryDevice`."""

    dry = True
    backend = "gloo"
    device: Any  # plays a Device

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.device = DryDevice(seed=1000 * int(os.environ.get("RANK", "0")))
        DryNccl.device, DryNccl.log = self.device, staticmethod(self._log)
        dist.ProcessGroupNCCL = DryNccl  # type: ignore[misc,attr-defined]
        dist.is_nccl_available = lambda: True
        torch.cuda.device = lambda place: contextlib.nullcontext()  # type: ignore[misc,assignment]
        torch.cuda.get_device_properties = lambda place: SimpleNamespace(uuid="played")  # type: ignore[assignment]
        torch.cuda.mem_get_info = lambda place=None: (MEMORY_BYTES - self.used_bytes(), MEMORY_BYTES)
        NcclVersions.here = classmethod(  # type: ignore[method-assign,assignment]
            lambda cls: cls(nccl=(2, 28, 9), cuda_runtime=(13, 0), cuda_driver=(13, 0), launch_order="1")
        )
        from sirtaki.engine import stream_trial
        from sirtaki.engine.tuning import plans, warmup

        plans.MATRIX, plans.UNIT_BYTES = 64, (1 << 14, 1 << 16)  # there is no GPU to fill
        warmup.open_router = stream_trial.open_router = self._open_router

    def _open_router(self, control: ControlPlane, settings: Settings, params: object) -> Router:
        staged = settings.transport is TransportKind.STAGED
        return self.router(control, None if staged else self.opener(control))

    def _log(self, line: str) -> None:
        if (path := os.environ.get("NCCL_DEBUG_FILE")) is not None:
            with Path(path.replace("%p", str(os.getpid()))).open("a") as log:
                log.write(line + "\n")

    def facts(self) -> dict[str, Any]:
        return {"gpu": "none (dry run)", "streams": "threads", "nccl": f"played, as in PyTorch {RELEASE}"}

    def sleep(self, seconds: float) -> None:
        self.device.sleep(seconds)

    def seconds(self, work: Callable[[], object], times: int) -> float:
        self.device.synchronise()
        begin_s = time.perf_counter()
        for _ in range(times):
            work()
        self.device.synchronise()
        return (time.perf_counter() - begin_s) / times

    def before_update(self) -> None:
        self.device.synchronise()

    @contextmanager
    def synchronisations(self) -> Iterator[list[str]]:
        """Only the product's calls count: this class waits for threads where a GPU's streams would be ordered."""
        found: list[str] = []
        before_update, self.before_update = self.before_update, lambda: FakeDevice.synchronise(self.device)  # type: ignore[method-assign]
        self.device.synchronised.clear()
        try:
            yield found
        finally:
            self.before_update = before_update  # type: ignore[method-assign]
        found += self.device.synchronised

    @contextmanager
    def kernels(self) -> Iterator[list[Kernel]]:
        self.device.synchronise()
        self.device.kernels.clear()
        found: list[Kernel] = []
        yield found
        self.device.synchronise()
        found += self.device.kernels

    def used_bytes(self) -> int:
        return DryNccl.open_groups * COMMUNICATOR_BYTES

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Only what is there at the end, as nobody counts the host's tensors."""
        work()
        return self.allocated_bytes()

    def allocated_bytes(self) -> int:
        gc.collect()
        storages = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for each in gc.get_objects()
            if type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout is torch.strided
        }
        return sum(storages.values())

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return bool(self.device.pinned)

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        work()
        return work
