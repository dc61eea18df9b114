"""Gradients that PyTorch's DistributedDataParallel puts into its buckets, reduced as those of an optimizer are.

DDP's reducer calls `reduce` for one bucket after the other, in one order on all ranks, as soon as a bucket is full and
those before it have been. The gradients in it count as having come at that moment, so units leave while the backward
pass goes on. With the last bucket the iteration ends: all buckets then hold what was reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sirtaki.errors import GradientError

from .gradient_reducer import GradientReducer
from .reducer_options import ReducerOptions
from .same_model import Named

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

    from sirtaki.comm.collectives.rank_sets import RankSet

    from .job import Job

SPARSE = (
    "a sparse gradient in one of DDP's buckets, which sirtaki.torch.ddp does not reduce: make the embedding with "
    "sparse=False, or train with hvd.DistributedOptimizer and without DDP"
)


class DdpBuckets:
    """Keeps the gradients of one DDP model equal on some of the ranks."""

    def __init__(self, job: Job, members: RankSet, named: Sequence[Named], *, options: ReducerOptions) -> None:
        """Collective.

        Args:
            job: of this process.
            members: the ranks that take part, with their control plane.
            named: the parameters that DDP reduces, with their names, the same on all ranks.
            options: how to reduce.

        Raises:
            MismatchError: on all ranks, if their models differ.
        """
        # Tensors of our own with a `.grad` of their own: that of the parameters is DDP's.
        self._stand_ins = [param.detach().requires_grad_() for _, param in named]
        self._number = {id(param): number for number, (_, param) in enumerate(named)}
        self._reducer = GradientReducer(
            job,
            members,
            [(name, own) for (name, _), own in zip(named, self._stand_ins, strict=True)],
            passes=1,
            options=options,
        )
        self._buckets: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        self._gradients: list[torch.Tensor] = []
        self._owners: list[torch.Tensor] = []

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Collective: takes one bucket. With the last one of an iteration it blocks until all of them are reduced.

        Returns:
            Done when the bucket's tensor holds the reduced gradients.

        Raises:
            GradientError: a gradient is sparse.
            CommError: a reduction failed, or the job did.
        """
        tensor = bucket.buffer()
        if tensor.is_sparse:
            raise GradientError(SPARSE)
        if bucket.index() == 0:  # what is left of a pass that raised does not count
            self._forget()
        devices: list[int | str | torch.device] | None = [tensor.device] if tensor.is_cuda else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self._buckets.append((future, tensor))
        for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            number = self._number[id(param)]
            own = self._stand_ins[number]
            own.grad = gradient
            self._gradients.append(gradient)
            self._owners.append(own)
            self._reducer.arrive(number)
        if bucket.is_last():
            self._finish()
        return future

    def _finish(self) -> None:
        self._reducer.finish()
        reduced = [own.grad for own in self._owners if own.grad is not None]
        torch._foreach_copy_(self._gradients, reduced)
        done = self._buckets
        self._forget()
        for future, tensor in done:
            future.set_result(tensor)

    def _forget(self) -> None:
        for own in self._owners:
            own.grad = None
        self._buckets, self._gradients, self._owners = [], [], []

    def close(self) -> None:
        """Not collective: nothing is reduced any more. Idempotent."""
        self._reducer.close("by detach()")
