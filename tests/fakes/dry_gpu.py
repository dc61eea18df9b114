"""The replacement of the GPU in a dry run of `bench.gpu`: `FakeCuda`, which checks the order of streams.

Sirtaki's code is the same as on a GPU, down to `torch.cuda` and PyTorch's `ProcessGroupNCCL`. Operations run at once,
in host memory. A check of a part fails if `FakeCuda` has found a race, a call that blocks the host, or a misuse.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fakes.cuda import RELEASES, FakeCuda

from bench.gpu.place import Kernel, Place

EXPECTED = re.compile(
    r"^allreduce_ on the host "  # DDP over Gloo reads the host memory that stands in for the GPU's
    r"|a buffer is not aligned to 16 bytes"  # the conformance suite reduces any range
    r"|^\w+ on the host reads what copy_ on stream \d+ writes: .* \(test\)$"  # `.cpu()` of a scalar waits for the GPU
    r"|^numpy on the host "  # NumPy wraps memory in an array without reading it
)
"""Findings of `FakeCuda` that are not faults of Sirtaki."""

COMMUNICATOR_BYTES = 30 << 20
MEMORY_BYTES = 80 << 30


class DryPlace(Place):
    """A `Place` on `FakeCuda`."""

    dry = True
    backend = "gloo"

    def __init__(self, logs: Path) -> None:
        self.cuda = FakeCuda()
        self.cuda.__enter__()  # stays open until the process ends
        self._log_groups()
        super().__init__(logs)
        torch.cuda.mem_get_info = lambda device=None: (MEMORY_BYTES - self._communicators(), MEMORY_BYTES)
        from sirtaki.engine.tuning import plans

        plans.MATRIX, plans.UNIT_BYTES = 64, (1 << 14, 1 << 16)  # small sizes, because there is no GPU to fill

    def _log_groups(self) -> None:
        """Record the algorithm that NCCL would use in each group, and write its log."""
        played, launch = torch.distributed.ProcessGroupNCCL, self.cuda.nccl.launch
        begin = played.__init__
        self._told: list[tuple[str, str, int]] = []
        self.launched: list[Kernel] = []

        def opened(group: Any, store: Any, rank: int, size: int, options: Any) -> None:
            algorithm, protocol = os.environ.get("NCCL_ALGO", "Ring"), os.environ.get("NCCL_PROTO", "Simple")
            self._told.append((algorithm.upper(), protocol.upper(), getattr(options.config, "max_ctas", 2)))
            begin(group, store, rank, size, options)

        def launched(group: int, what: str, reads: Any, writes: Any, stream: Any) -> None:
            algorithm, protocol, ctas = self._told[group]
            if path := os.environ.get("NCCL_DEBUG_FILE"):
                n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in writes)
                with Path(path.replace("%p", str(os.getpid()))).open("a") as log:
                    log.write(
                        f"NCCL INFO AllReduce: {n_bytes} Bytes -> Algo {algorithm} proto {protocol} "
                        f"channel{{Lo..Hi}}={{0..{ctas - 1}}}\n"
                    )
            begin_s = time.perf_counter()
            launch(group, what, reads, writes, stream)
            name = f"ncclDevKernel_AllReduce_Sum_f32_{algorithm}_LL(ncclDevKernelArgsStorage<4096ul>)"
            self.launched.append(Kernel(name, stream, ctas, begin_s, time.perf_counter()))

        def reduced(group: Any, tensor: torch.Tensor, op: Any) -> None:
            try:
                reduce(group, tensor, op)
            except RuntimeError as err:  # the other rank has exited; on a GPU, NCCL's kernel would wait
                print(f"Gloo, which plays NCCL: {err}", flush=True)
                threading.Event().wait()

        reduce = played._reduce
        played.__init__, played._reduce, self.cuda.nccl.launch = opened, reduced, launched

    def _communicators(self) -> int:
        return COMMUNICATOR_BYTES * sum(not group.ended for group in self.cuda.nccl.groups)

    def facts(self) -> dict[str, Any]:
        return {"gpu": "none (dry run)", "nccl": RELEASES[self.cuda.release]["nccl"], "release": self.cuda.release}

    def seconds(self, work: Callable[[], object], times: int) -> float:
        begin_s = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - begin_s) / times

    def next_iteration(self) -> None:
        self.cuda.next_iteration()

    def verify(self) -> None:
        found = [*self.cuda.races, *self.cuda.blocking, *self.cuda.problems]
        found = [each for each in found if not EXPECTED.search(each)]
        for each in (self.cuda.races, self.cuda.blocking, self.cuda.problems):
            each.clear()
        assert not found, "\n".join(found)

    @contextmanager
    def synchronisations(self) -> Iterator[list[str]]:
        self.cuda.steady = True
        try:
            found: list[str] = []
            yield found
            found += self.cuda.blocking
        finally:
            self.cuda.steady = False

    @contextmanager
    def kernels(self) -> Iterator[list[Kernel]]:
        self.launched.clear()
        found: list[Kernel] = []
        yield found
        found += self.launched

    def used_bytes(self) -> int:
        return self._communicators()

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Return the bytes in use after `work`, because peaks of host memory are not counted."""
        work()
        gc.collect()
        return self.allocated_bytes()

    def allocated_bytes(self) -> int:
        return self.cuda.allocated_bytes

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        self.cuda.initialized, self.cuda.capturing = True, threading.current_thread()
        try:
            work()
            time.sleep(0.3)
        finally:
            self.cuda.initialized, self.cuda.capturing = False, None
        return work

    def graphed(self, module: torch.nn.Module, sample: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return module

    compiled = graphed
