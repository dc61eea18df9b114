"""The GPU of one rank, as the parts of `bench.gpu` use it. A dry run uses `fakes.dry_gpu.DryPlace` instead.

All calls that need CUDA are in this class, so that parts need no branches for a dry run.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.device import Device
from sirtaki.comm.nccl_streams.transport import Opener, find_nccl
from sirtaki.comm.router import Router
from sirtaki.errors import CommError

NCCL_GROUP = getattr(dist, "ProcessGroupNCCL", None)
"""PyTorch's original class, because a dry run replaces it. None in builds without NCCL."""

TIMEOUT_S = 20.0
"""Timeout of NCCL's operations in seconds."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel launch in a profile.

    Attributes:
        name: name of the kernel.
        stream: number of the CUDA stream.
        grid: number of thread blocks in the first dimension; for an NCCL kernel, the number of channels (CTAs).
        begin_s, end_s: times in seconds on the GPU's clock.
    """

    name: str
    stream: int
    grid: int
    begin_s: float
    end_s: float


class Place:
    """GPU 0 of this process.

    Attributes:
        dry: true in a dry run, which has no GPU and whose figures mean nothing.
        device: the GPU as the synchroniser uses it.
        backend: backend of PyTorch's process group, for DDP.
        logs: existing folder for files that libraries write.
    """

    dry = False
    backend = "nccl"
    device: Device

    def __init__(self, logs: Path) -> None:
        """Initialise CUDA."""
        from sirtaki.comm.device import cuda_device

        self.logs = logs
        torch.cuda.set_device(0)
        self.device = cuda_device(0)

    @property
    def torch_device(self) -> torch.device:
        """Return the device of models and tensors."""
        return self.device.torch_device

    def facts(self) -> dict[str, Any]:  # Any, because the values have the types of JSON.
        """Describe the GPU and the software on it."""
        properties = torch.cuda.get_device_properties(0)
        query = ["nvidia-smi", "--query-gpu=driver_version,compute_mode", "--format=csv,noheader"]
        fields = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False).stdout.split(",")
        return {
            "gpu": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": fields[0].strip(),
            "compute_mode": fields[-1].strip(),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]  # torch's
        }

    # ── transport of units ───────────────────────────────────────────────────────────────────────────────────────

    def opener(self, control: ControlPlane) -> Opener:
        """Return the opener of NCCL communicators for these ranks. Collective.

        Raises:
            CommError: NCCL cannot connect these ranks. The log has the reason.
        """
        found = find_nccl(control, self.device, forced=True, timeout_s=TIMEOUT_S)
        if found is None:
            raise CommError("NCCL cannot connect the GPUs of these ranks; see the log")
        return found

    def router(self, control: ControlPlane, opener: Opener | None) -> Router:
        """Return a router over NCCL, or through host memory if `opener` is None. Collective."""
        return Router(control, timeout_s=TIMEOUT_S, device=self.device, nccl=opener)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def sleep(self, seconds: float) -> None:
        """Keep the current stream busy for about `seconds`. Non-blocking."""
        torch.cuda._sleep(int(seconds * 1.5e9))  # Cycles of an SM, whose clock is between 1 and 2 GHz.

    def seconds(self, work: Callable[[], object], times: int) -> float:
        """Return seconds per call on the GPU's clock, averaged over `times` consecutive calls."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        torch.cuda.synchronize()
        begin.record()
        for _ in range(times):
            work()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / times

    def next_iteration(self) -> None:
        """Mark the end of a training step. Only a dry run needs it."""

    def verify(self) -> None:
        """Fail if a dry run has found a problem since the last call, such as two accesses to a tensor in no order."""

    @contextmanager
    def synchronisations(self) -> Iterator[list[str]]:
        """Collect the calls in the body that make the host wait for the GPU."""
        found: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found += [f"{w.filename}:{w.lineno}: {w.message}" for w in caught if "called a synchronizing" in str(w.message)]

    @contextmanager
    def kernels(self) -> Iterator[list[Kernel]]:
        """Collect the kernels that the body launches, by PyTorch's profiler."""
        found: list[Kernel] = []
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            yield found
            torch.cuda.synchronize()
        handle, name = tempfile.mkstemp(suffix=".json")
        os.close(handle)
        try:
            profile.export_chrome_trace(name)
            events = json.loads(Path(name).read_text(encoding="utf-8"))["traceEvents"]
        finally:
            os.unlink(name)
        for event in events:
            if event.get("cat") == "kernel":
                begin_s, args = event["ts"] / 1e6, event["args"]
                end_s = begin_s + event["dur"] / 1e6
                found.append(Kernel(event["name"], int(args["stream"]), int(args["grid"][0]), begin_s, end_s))

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────

    def used_bytes(self) -> int:
        """Return the bytes of GPU memory that all processes use, including NCCL's allocations."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def allocated_bytes(self) -> int:
        """Return the bytes of PyTorch's allocator that tensors occupy now."""
        return torch.cuda.memory_allocated()

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Return the largest number of bytes of PyTorch's allocator that tensors occupy while `work` runs."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor in host memory is page-locked."""
        return tensor.is_pinned()

    # ── CUDA graphs ──────────────────────────────────────────────────────────────────────────────────────────────

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """Capture `work` as a CUDA graph and return its replay. Meanwhile CUDA forbids some calls in all threads."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # Run once before the capture: the first use of cuBLAS cannot be captured.
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
            time.sleep(0.3)  # Wait, so that Sirtaki's watchdog and threads run during the capture.
        return graph.replay

    def graphed(self, module: nn.Module, sample: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Capture the forward and the backward pass of `module`, each as a CUDA graph."""
        found: Callable[[torch.Tensor], torch.Tensor] = torch.cuda.make_graphed_callables(module, (sample,))
        return found

    def compiled(self, module: nn.Module, sample: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Compile `module` to CUDA graphs, like `torch.compile(mode="reduce-overhead")`, but without Triton."""
        found: Callable[[torch.Tensor], torch.Tensor] = torch.compile(module, backend="cudagraphs")
        return found


def open_place(logs: Path, *, dry: bool) -> Place:
    """Return the GPU, or in a dry run its replacement."""
    if not dry:
        return Place(logs)
    from fakes.dry_gpu import DryPlace

    fake: Place = DryPlace(logs)
    return fake
