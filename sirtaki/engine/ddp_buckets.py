"""Gradients that PyTorch's DistributedDataParallel puts into its buckets, reduced as those of an optimizer are.

DDP's reducer calls `reduce` for one bucket after the other, in one order on all ranks, as soon as a bucket is full and
those before it have been. The gradients in it count as having come at that moment, so units leave while the backward
pass goes on. With the last bucket the iteration ends: all buckets then hold what was reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.dlpack import from_dlpack

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
        self._buckets: list[_Bucket] = []

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Collective: takes one bucket. With the last one of an iteration it blocks until all of them are reduced.

        Returns:
            Done when the bucket's tensor holds the reduced gradients.

        Raises:
            GradientError: a gradient is sparse.
            CommError: a reduction failed, or the job did.
        """
        if bucket.buffer().is_sparse:
            raise GradientError(SPARSE)
        if bucket.index() == 0:  # what is left of a pass that raised does not count
            self._forget()
        numbers = [self._number[id(param)] for param in bucket.parameters()]
        found = _Bucket(bucket, [self._stand_ins[number] for number in numbers])
        self._buckets.append(found)
        for number in numbers:
            self._reducer.arrive(number)
        if bucket.is_last():
            self._finish()
        return found.future

    def _finish(self) -> None:
        self._reducer.finish()
        for bucket in self._buckets:
            bucket.future.set_result(bucket.reduced())
        self._forget()

    def _forget(self) -> None:
        for bucket in self._buckets:
            for own in bucket.owners:
                own.grad = None
        self._buckets = []


class _Bucket:
    """One bucket in one iteration.

    Attributes:
        owners: of its gradients, in its order.
        future: done when they are reduced.
    """

    def __init__(self, bucket: GradBucket, owners: list[torch.Tensor]) -> None:
        self._tensor, self._gradients, self.owners = bucket.buffer(), bucket.gradients(), owners
        devices: list[int | str | torch.device] = [self._tensor.device]
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=devices if self._tensor.is_cuda else None
        )
        for own, gradient in zip(owners, self._gradients, strict=True):
            own.grad = gradient

    def reduced(self) -> torch.Tensor:
        """After the reduction, what DDP takes for the bucket, `(numel,)`: the flat buffer itself if its gradients lie
        there one behind the other, as they do once their order is known; else its own tensor, to which they are copied.
        """
        places = [own.grad for own in self.owners if own.grad is not None]
        if _one_behind_the_other(places):
            piece = places[0].as_strided((self._tensor.numel(),), (1,))
            return from_dlpack(piece)  # a storage that begins there: DDP counts from the storage's beginning
        torch._foreach_copy_(self._gradients, places)
        return self._tensor


def _one_behind_the_other(tensors: list[torch.Tensor]) -> bool:
    address = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != address:
            return False
        address += tensor.nbytes
    return True
