"""Training loops on one GPU that differ in how gradients are reduced.

With one rank, Sirtaki reduces nothing. To measure its cost on one GPU, `Optimizer` and `Attached` create the reducers
of a job with several ranks: hooks, packing on a side stream, an all-reduce per unit on several communicators, and
gradients that are views of the flat buffer.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from bench.gpu.models import GpuModel
from bench.gpu.place import Place
from bench.lib.contenders import LEARNING_RATE
from sirtaki.comm.collectives.engine import GLOBAL
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.engine.reducing.gradient_hooks import ReducerOptions
from sirtaki.engine.reducing.sharing import OptimizerGradients

WARM_STEPS = 12
"""Number of steps before the measured ones.

Sirtaki learns the order of gradients in the first two, DDP rebuilds its buckets after the first.
"""


class OneRank:
    """A training loop without synchronisation."""

    def __init__(self, place: Place, made: GpuModel) -> None:
        """Create the optimizer. `made` is (model, batch)."""
        self.place = place
        self.model, self.batch = made
        self.forward: nn.Module = self.model
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)

    def step(self) -> None:
        """Run one training step. Does not wait for the GPU."""
        self.forward(self.batch).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.place.next_iteration()

    def warm_up(self) -> None:
        """Run the steps that are not measured."""
        for _ in range(WARM_STEPS):
            self.step()

    def close(self) -> None:
        """Free buffers and communicators."""
        self.place.device.synchronise()


class GpuDdp(OneRank):
    """PyTorch's DistributedDataParallel. Call `open_group` first."""

    def __init__(self, place: Place, made: GpuModel) -> None:
        """Wrap the model. Collective."""
        super().__init__(place, made)
        self.forward = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)


class AloneOptimizer(OneRank):
    """`hvd.DistributedOptimizer` in a job with one rank, which reduces nothing."""

    def __init__(self, place: Place, made: GpuModel) -> None:
        """Wrap the optimizer. Collective."""
        import sirtaki.torch as hvd

        super().__init__(place, made)
        hvd.init()
        self.optimizer = hvd.DistributedOptimizer(self.optimizer, named_parameters=self.model.named_parameters())


class Optimizer(OneRank):
    """`hvd.DistributedOptimizer` with the reducers of a job with several ranks."""

    def __init__(self, place: Place, made: GpuModel, *, postscale: float = 1.0) -> None:
        """Wrap the optimizer. Collective.

        Args:
            place: the GPU.
            made: the model and its batch.
            postscale: factor on the sums. Unless it is 1, NCCL launches a kernel even with one rank.
        """
        import sirtaki.torch as hvd
        from sirtaki.engine import job

        super().__init__(place, made)
        hvd.init()
        named = list(self.model.named_parameters())
        self.optimizer = hvd.DistributedOptimizer(self.optimizer, named_parameters=named)
        current = job.current()
        if current.size == 1:
            options = ReducerOptions(reduction=Reduction(postscale=postscale))
            members = current.rank_sets[GLOBAL]
            gradients = OptimizerGradients(current, members, named, passes=1, options=options)
            self.optimizer._gradients = gradients  # type: ignore[attr-defined]  # a DistributedOptimizer's

    def describe(self) -> str:
        """Return the current setting in words."""
        gradients = self.optimizer._gradients  # type: ignore[attr-defined]  # a DistributedOptimizer's
        return str(gradients.reducers[0].tuning.knobs.describe())

    def close(self) -> None:
        """Free buffers and communicators. Collective."""
        super().close()
        self.optimizer.close()  # type: ignore[attr-defined]  # a DistributedOptimizer's
        del self.optimizer
        gc.collect()


class GpuAttached(GpuDdp):
    """DistributedDataParallel with `sirtaki.torch.ddp.attach`.

    Attributes:
        freed_bytes: memory of DDP's buckets, which attaching has freed.
    """

    freed_bytes = 0

    def __init__(self, place: Place, made: GpuModel) -> None:
        """Wrap the model and attach. Collective."""
        import sirtaki.torch as hvd
        import sirtaki.torch.ddp as ddp
        from sirtaki.engine import job

        super().__init__(place, made)
        hvd.init()
        model, current = self.forward, job.current()
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        ddp.attach(model)
        if current.size == 1:  # Attach as `attach()` does with several ranks.
            options = ReducerOptions(reduction=Reduction(), unused_as_none=True)
            named = list(self.model.named_parameters())
            self._gradients = ddp.DdpGradients(current, current.rank_sets[GLOBAL], named, passes=1, options=options)
            before = place.allocated_bytes()
            ddp.install(model, self._gradients)
            self.freed_bytes = before - place.allocated_bytes()

    def close(self) -> None:
        """Free buffers and communicators. Collective."""
        super().close()
        self._gradients.close("at the end of a measurement")


Contender = Callable[[Place, GpuModel], OneRank]


def open_group(place: Place, rank: int, size: int) -> None:
    """Open PyTorch's default process group over NCCL. Collective."""
    if not dist.is_initialized():
        port = os.environ["BENCH_GPU_GROUP_PORT"]
        dist.init_process_group(place.backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
