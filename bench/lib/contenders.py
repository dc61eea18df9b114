"""Contenders of the step benchmarks: PyTorch DDP and Sirtaki in the same processes, each with its own copy of a model.

All contenders have equal models, optimizers and loops. Only the reduction of gradients differs. All ranks must create
the same contenders in the same order.
"""

from __future__ import annotations

import atexit
import datetime
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore

from sirtaki.comm.transports.contract import ReduceOp, ThreadWork, Worker
from sirtaki.comm.transports.mpi import mpi_all_reduce_
from sirtaki.torch_backend import register

if TYPE_CHECKING:
    from mpi4py import MPI

    from sirtaki.comm.plan import TransportKind
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sirtaki.autotune.knobs import Knobs
from sirtaki.comm.plan import GradientLayout, Route

if TYPE_CHECKING:
    from sirtaki.engine.job import Job

# ── a model over a synchroniser without a tuner, to measure single settings ──────────────────────────────────────────


class Bare:
    """A model over a synchroniser without a tuner. Measures the times of given settings.

    Attributes:
        space: all settings.
        narrowed: settings that are promising according to the probes.
        default: the untuned setting.
        probes: probes of each route.
        known: the planners' model; None if no model fits the probes.
    """

    def __init__(self, current: Job, model: nn.Module, batch: torch.Tensor, *, only: Route | None = None) -> None:
        """Train until the gradients' order is learned, then probe the links as in the warm-up. Collective.

        Args:
            current: the job.
            model: the network.
            batch: its input.
            only: the only route to use; None = all available routes.
        """
        from sirtaki.comm.gradients.buffers import Reduction
        from sirtaki.comm.gradients.pipeline import GradientPipeline
        from sirtaki.comm.router import Router
        from sirtaki.engine.tuning.plans import default_knobs, knob_space, measure

        self._control = current.control
        self._model, self._batch = model, batch
        self._params = list(model.parameters())
        self._router = Router(self._control, timeout_s=current.settings.transport_timeout_s)
        total_bytes = sum(param.numel() * param.itemsize for param in self._params)
        space = knob_space(self._router, current.settings, total_bytes)
        if only is not None:
            space = replace(space, routes=(only,))
        self.default = default_knobs(space, total_bytes=total_bytes, one_node=self._control.one_node)
        self._sync = GradientPipeline(
            self._params,
            [str(number) for number in range(len(self._params))],
            control=self._control,
            router=self._router,
            reduction=Reduction(postscale=1 / self._control.size),
            default_plan=self.default.to_plan,
        )
        for index, param in enumerate(self._params):
            ready = partial(self._sync.ready, index)
            param.register_post_accumulate_grad_hook(lambda param, ready=ready: ready(param.grad, param.grad._version))  # type: ignore[no-untyped-call]
        report = self._step()
        while not report.profiled:
            report = self._step()
        found = measure(self._control, self._router, space, default=self.default, span_s=report.span_s)
        self.space, self.narrowed, self.probes = found.space, found.promising, found.links
        ready_s = [*self._sync.in_layout_order(report.ready_s), report.backward_s]
        self.known = found.model(self.layout, ready_s, report.backward_s, between_s=math.nan)

    @property
    def layout(self) -> GradientLayout:
        """Return the layout of the only flat buffer, including control flags."""
        return self._sync.layouts[0]

    def _step(self) -> Any:
        self._model(self._batch).sum().backward()
        report = self._sync.finish()
        for param in self._params:
            param.grad = None
        return report

    def measure(self, knobs: Knobs) -> tuple[float, float]:
        """Run two steps with this setting. Return span and time of the second one in seconds. Collective.

        The span is the shortest over the ranks, the time is the longest.
        """
        self._sync.use([knobs.to_plan(self.layout)])
        self._step()
        begin_s = time.perf_counter()
        span_s = self._step().span_s
        step_s = time.perf_counter() - begin_s
        return float(self._control.minimum(np.array([span_s]))[0]), float(self._control.maximum(np.array([step_s]))[0])

    def close(self) -> None:
        """Close the synchroniser and its transports. Collective."""
        self._sync.close()
        self._router.close()


# ── The benchmark ────────────────────────────────────────────────────────────────────────────────────────────────────

ModelMaker = Callable[[], tuple[nn.Module, torch.Tensor]]
LEARNING_RATE = 1e-9  # So small a learning rate that the weights hardly change.


class Contender:
    """A training loop without synchronisation. Subclasses reduce the gradients, and keep the loop."""

    def __init__(self, make_model: ModelMaker) -> None:
        self.model, self.batch = make_model()
        self.forward: nn.Module = self.model
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self.steps = self.warmup_steps = 0
        self.sync: Any = None  # The object that is tuned; None = nothing is tuned.

    def step(self) -> None:
        """Run one training step: forward, backward with synchronisation, update, zeroing. Collective."""
        self.forward(self.batch).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def warm_up(self, limit: int = 1000) -> None:
        """Run steps until the tuner has finished, at most `limit`. Collective."""
        while self.warmup_steps < limit and self.sync is not None and self.sync.tuning:
            self.step()
            self.warmup_steps += 1

    def describe(self) -> str:
        """Return the current setting in words."""
        return "no synchronisation"

    def check_average(self, mean: float) -> None:
        """Check that all gradients of the emulated model were averages, from its weights, which start at zero.

        Raises:
            RuntimeError: a gradient was not the average.
        """
        expected = -LEARNING_RATE * self.steps * mean
        for index, weight in enumerate(self.model.parameters()):
            low, high = float(weight.detach().min()), float(weight.detach().max())
            if not max(abs(low - expected), abs(high - expected)) <= 1e-3 * abs(expected):
                raise RuntimeError(
                    f"{type(self).__name__}: gradients were not averages: weight {index} is in [{low}, {high}] after "
                    f"{self.steps} steps, expected {expected}"
                )


@contextmanager
def environment(name: str, value: str | None) -> Iterator[None]:
    """Set an environment variable in the body of the context. None = unset it."""
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


class Ddp(Contender):
    """PyTorch's DistributedDataParallel, with gradients as views of its buckets."""

    def __init__(
        self,
        make_model: ModelMaker,
        *,
        bucket_mb: float = 25.0,
        interfaces: str | None = None,
        backend: str = "gloo",
    ) -> None:
        """Wrap the model. Collective. Call `join_gloo` first.

        Args:
            make_model: the model and its input.
            bucket_mb: bucket size; DDP's default is 25.
            interfaces: value of `GLOO_SOCKET_IFNAME` when the group is created; None = unset.
            backend: backend of DDP's process group.
        """
        super().__init__(make_model)
        register()
        with environment("GLOO_SOCKET_IFNAME", interfaces):
            group = dist.new_group(backend=backend)
        self.forward = nn.parallel.DistributedDataParallel(
            self.model, process_group=group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
        )
        self._backend = backend
        self._description = f"{backend}, {bucket_mb:g} MB buckets" + (
            f", GLOO_SOCKET_IFNAME={interfaces}" if interfaces else ""
        )

    def warm_up(self, limit: int = 1000) -> None:
        """Run steps until the tuner has finished.

        Over the backend "sirtaki", the model is attached automatically in the first steps.
        """
        if self.sync is None and self._backend == "sirtaki":
            self.step()
            self.step()
            self._find_tuner()
        super().warm_up(limit)

    def _find_tuner(self) -> None:
        from sirtaki.engine import job
        from sirtaki.engine.reducing.sharing import reducers_of

        self.sync = next((reducer.tuning for reducer in reversed(reducers_of(job.current()))), None)

    def describe(self) -> str:
        """Return the current setting in words."""
        return self._description + (f"; {self.sync.knobs.describe()}" if self.sync is not None else "")


class OverMpi(Contender):
    """Horovod's method for large gradients: a thread all-reduces each gradient in place, in the order of readiness."""

    def __init__(self, make_model: ModelMaker, comm: MPI.Comm) -> None:
        """Wrap the model. Collective. Gradients must become ready in the same order on all ranks."""
        super().__init__(make_model)
        self._comm, self._thread = comm.Dup(), Worker("mpi")
        self._works: list[ThreadWork] = []
        for param in self.model.parameters():
            param.register_post_accumulate_grad_hook(self._reduce)
        self.optimizer.register_step_pre_hook(self._wait)

    def _reduce(self, param: torch.Tensor) -> None:
        work, gradient = ThreadWork(), param.grad
        assert gradient is not None
        self._works.append(work)
        scale = 1.0 / self._comm.size
        average = partial(mpi_all_reduce_, gradient, comm=self._comm, op=ReduceOp.SUM, scale=scale)
        self._thread.put(partial(work.run, average, "MPI"))

    def _wait(self, *_: object) -> None:
        while self._works:
            self._works.pop(0).wait(60.0)

    def describe(self) -> str:
        """Return the current setting in words."""
        return "one thread over MPI, one all-reduce per gradient"


class Attached(Ddp):
    """DDP with `sirtaki.torch.ddp.attach(model)`."""

    def __init__(self, make_model: ModelMaker, *, bucket_mb: float = 25.0) -> None:
        """Wrap the model and attach.

        Collective. Call `hvd.init()` and `join_gloo` first. The first steps are the warm-up.
        """
        super().__init__(make_model, bucket_mb=bucket_mb)
        import sirtaki.torch.ddp

        assert isinstance(self.forward, nn.parallel.DistributedDataParallel)
        sirtaki.torch.ddp.attach(self.forward)
        self._find_tuner()


class Sirtaki(Contender):
    """A training loop with `sirtaki.torch.DistributedOptimizer`."""

    def __init__(
        self,
        make_model: ModelMaker,
        *,
        tune: bool,
        overlap_forward: bool = False,
        compression: Any = None,
        **fixed: TransportKind | int | tuple[str, ...],
    ) -> None:
        """Wrap the optimizer. Collective. Call `hvd.init()` first. With `tune`, the first steps are the warm-up.

        Args:
            make_model: the model and its input.
            tune: whether the tuner runs.
            overlap_forward: argument of DistributedOptimizer.
            compression: argument of DistributedOptimizer; None = none.
            fixed: further settings, such as fixed knobs.
        """
        import sirtaki.torch as hvd
        from sirtaki.engine import job

        super().__init__(make_model)
        # Settings hold for a process, but this process has both tuned and untuned optimizers.
        current = job.current()
        settings = current.settings
        current.settings = replace(settings, tune=tune, **fixed)  # type: ignore[arg-type]  # knobs
        try:
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer,
                named_parameters=self.model.named_parameters(),
                compression=compression or hvd.Compression.none,
                overlap_forward=overlap_forward,
            )
        finally:
            current.settings = settings
        gradients = self.optimizer._gradients  # type: ignore[attr-defined]  # None with one rank
        self.sync = None if gradients is None else gradients.reducers[0].tuning

    def finish(self) -> None:
        """Wait for deferred updates of the last step."""
        self.optimizer.finish()  # type: ignore[attr-defined]  # a DistributedOptimizer's

    def record(self, folder: str | Path, *, iterations: int, operators: bool = True) -> None:
        """Run steps until `sirtaki.profiler.profile` has finished its recording. Collective."""
        from sirtaki.analysis.recorder import Stage
        from sirtaki.profiler import profile

        with profile(folder, iterations=iterations, operators=operators) as recorder:
            while recorder.stage is not Stage.ENDED:
                self.step()

    def describe(self) -> str:
        """Return the current setting in words."""
        if self.sync is None:
            return "one rank"
        overlap = self.sync.overlap
        deferred = "" if overlap is None else ", deferred" if overlap.ready else ", not deferred"
        return f"{self.sync.knobs.describe()}{deferred}"


def join_gloo(comm: MPI.Comm, *, address: str = "127.0.0.1") -> None:
    """Open PyTorch's default process group over Gloo for the ranks of `comm`. Rank 0 is at `address`. Collective.

    The group is destroyed only at exit, after garbage collection. A DDP reducer that outlives the group would destroy
    it while holding the GIL, and wait for the group's threads, one of which may wait for the GIL to free tensors of a
    backward pass. This deadlock occurred in one of six runs that ended right after a step (PyTorch 2.13).
    """
    timeout = datetime.timedelta(seconds=300)
    store = None
    if comm.rank == 0:
        store = TCPStore("0.0.0.0", 0, comm.size, is_master=True, timeout=timeout, wait_for_workers=False)
    port = comm.bcast(store.port if store else None)
    if store is None:
        store = TCPStore(address, port, comm.size, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size, timeout=timeout)
    atexit.register(_leave_gloo)


def _leave_gloo() -> None:
    gc.collect()
    dist.destroy_process_group()
