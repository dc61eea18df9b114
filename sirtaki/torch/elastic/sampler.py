"""A sampler that records which samples of an epoch were processed, for elastic jobs.

When ranks were added or removed, `reset` distributes the remaining samples over the new ranks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Sampler

from sirtaki.engine import job
from sirtaki.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EpochPosition:
    """Progress of a sampler in an epoch at the time of a commit (copy of the training state in memory).

    Attributes:
        epoch: number of the epoch.
        processed: indices of processed samples, in the order in which they were recorded. It is the sampler's own list,
            to which the sampler appends.
        length: number of entries of `processed` at the time of the commit.
        shared: number of entries of `processed` that have been sent to the other ranks.
    """

    epoch: int
    processed: list[int]
    length: int
    shared: int

    def __deepcopy__(self, memo: object) -> EpochPosition:
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the sampler had at this position."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed[: self.length])}


Indices = tuple[int, list[int]]
"""Number of an epoch, and indices of samples that were processed in this epoch."""


class SamplerUpdate(NamedTuple):
    """Indices of samples that one rank has processed, and that it has not sent to the other ranks yet.

    Attributes:
        committed: indices that the rank's newest commit (copy of the training state) contains.
        later: indices that were recorded after the rank's newest commit.
    """

    committed: Indices
    later: Indices


class _Deal(NamedTuple):
    """Distribution of the unprocessed samples of an epoch over the ranks."""

    remaining: list[int]
    own: list[int]


class ElasticSampler(Sampler[int]):
    """Sampler that distributes the indices of a data set over all ranks.

    If ranks are added or removed, it distributes the rest of the epoch over the new ranks. Call `record_batch` after
    each batch, and `set_epoch` before each epoch.

    `record_batch` gets the number of a batch. The sampler finds the batch's sample indices in the order of the newest
    iteration over the sampler. This stays so after `restore()`, `sync()` or `load_state_dict()`, because a running loop
    continues in that order. If no iteration has begun in this epoch since ranks were added or removed, the sampler uses
    the order of the next iteration.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """Create the sampler, and distribute the indices of the first epoch over the ranks.

        Args:
            dataset: data set to sample from. Only its length is used.
            shuffle: whether to shuffle the indices. The order differs between epochs, and is equal on all ranks.
            seed: seed of the shuffled order.
        """
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.rank, self.num_replicas = 0, 0
        self._dealt: _Deal | None = None
        # Indices that the newest iteration over the sampler yields on this rank.
        self._iterated: list[int] | None = None
        self._begin(0, [])
        self.reset()

    def _begin(self, epoch: int, processed: Iterable[int]) -> None:
        if epoch != self.epoch:
            self._iterated = None
        self.epoch = epoch
        self._in_order = list(processed)
        self.processed_indices = set(self._in_order)
        self._shared = len(self._in_order)

    @property
    def processed_num(self) -> int:
        """Return the number of samples of this epoch that were processed, as far as this rank knows."""
        return len(self.processed_indices)

    def set_epoch(self, epoch: int) -> None:
        """Begin the epoch number `epoch`, in which no sample is processed yet."""
        self._begin(epoch, [])
        self.restart()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that this rank has processed the samples of batch `batch_idx` of its newest iteration."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that the samples with these indices were processed. Later iterations of this epoch omit them."""
        # Distribute the samples first, because samples that are recorded as processed are not distributed.
        self._deal()
        new = [index for index in indices if index not in self.processed_indices]
        self._in_order += new
        self.processed_indices.update(new)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the indices of the samples in batch `batch_idx` of this rank's newest iteration."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def reset(self) -> None:
        """Distribute the unprocessed samples over the current ranks. Called after ranks were added or removed.

        Some samples are repeated, so that all ranks get the same number of samples.
        """
        control = job.current().control
        if (control.rank, control.size) != (self.rank, self.num_replicas):
            self._iterated = None
        self.rank, self.num_replicas = control.rank, control.size
        # Distribute the samples when they are needed, and not here: a change of ranks calls `reset` several times.
        self._dealt = None

    def restart(self) -> None:
        """Distribute the unprocessed samples over the ranks, and forget the order in which the loop has read them.

        Called before the training function is called again, whose loop over the samples begins anew, in another order.
        """
        self.reset()
        self._iterated = None

    def _deal(self) -> _Deal:
        if self._dealt is None:
            left = np.ones(len(self.dataset), dtype=np.bool_)
            left[self._in_order] = False
            order = remaining = np.flatnonzero(left)
            if self.shuffle:
                # Shuffle with RandomState, whose results are equal in all versions of NumPy.
                order = np.random.RandomState((self.seed + self.epoch) % 2**32).permutation(remaining)
            own = np.arange(self.rank, self.num_replicas * math.ceil(len(order) / self.num_replicas), self.num_replicas)
            self._dealt = _Deal(remaining.tolist(), order[own % max(1, len(order))].tolist())
        return self._dealt

    @property
    def indices(self) -> list[int]:
        """Return this rank's sample indices, in the order in which `record_batch` finds the samples of a batch."""
        return self._deal().own if self._iterated is None else self._iterated

    @property
    def remaining_indices(self) -> list[int]:
        """Return the indices of all samples that were unprocessed when the samples were last distributed."""
        return self._deal().remaining

    @property
    def num_samples(self) -> int:
        """Return the number of sample indices that the next iteration yields on this rank."""
        return len(self._deal().own)

    @property
    def total_size(self) -> int:
        """Return the number of sample indices that the next iteration yields on all ranks, with repeated ones."""
        return self.num_samples * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the epoch, and the indices of its processed samples."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state of this class or of Horovod's sampler.

        Horovod's state contains the number of processed samples instead of their indices.

        Raises:
            ConfigError: the state has another format, or belongs to a larger data set.
        """
        if "epoch" not in state_dict or not {"processed_indices", "processed_num"} & state_dict.keys():
            raise ConfigError(
                "the state of an ElasticSampler must have `epoch` and `processed_indices` (or Horovod's "
                f"`processed_num`), but the given state has the keys {sorted(map(str, state_dict))}"
            )
        epoch, n_samples = int(state_dict["epoch"]), len(self.dataset)
        if "processed_indices" in state_dict:
            processed = sorted(state_dict["processed_indices"])
        else:
            order = list(range(n_samples))
            if self.shuffle:
                # Shuffle in the same way as Horovod's sampler, from whose state this sampler continues.
                random.Random(self.seed + epoch).shuffle(order)
            processed = order[: state_dict["processed_num"]]
        if processed and not 0 <= min(processed) <= max(processed) < n_samples:
            raise ConfigError(
                f"the state of the ElasticSampler has index {max(processed)}, but the data set has {n_samples} "
                "samples; load a state of this data set"
            )
        self._begin(epoch, processed)
        self.reset()

    # ── for commits ──────────────────────────────────────────────────────────────────────────────────────────────

    def mark(self) -> EpochPosition:
        """Return the sampler's progress in the epoch, to store it in a commit (copy of the training state).

        Takes constant time.
        """
        return EpochPosition(self.epoch, self._in_order, len(self._in_order), self._shared)

    def rewind(self, mark: EpochPosition) -> None:
        """Set the sampler's progress in the epoch to `mark`, the progress at the time of a commit."""
        self._begin(mark.epoch, mark.processed[: mark.length])
        self._shared = mark.shared
        self.reset()

    def unsent(self, mark: EpochPosition) -> SamplerUpdate:
        """Return the indices of processed samples that this rank has not sent to the other ranks yet.

        Args:
            mark: progress in this rank's newest commit (copy of the training state).
        """
        known = mark.length if mark.processed is self._in_order else 0
        return SamplerUpdate(
            committed=(mark.epoch, mark.processed[mark.shared : mark.length]),
            later=(self.epoch, self._in_order[max(self._shared, known) :]),
        )

    def merge(self, mark: EpochPosition, updates: Iterable[SamplerUpdate]) -> EpochPosition:
        """Record the samples that the other ranks have processed, so that no rank processes them again.

        Args:
            mark: progress in this rank's newest commit (copy of the training state).
            updates: results of `unsent()` of all ranks.

        Returns:
            The progress to store in the commit. It contains the samples in the commits of all ranks, and no sample that
            a rank has recorded after its commit.
        """
        updates = list(updates)
        committed = _of_epoch(mark.epoch, (each.committed for each in updates))
        is_newest = mark.processed is self._in_order and mark.length == len(self._in_order)
        nothing_later = is_newest and not any(each.later[1] for each in updates)
        self.record_indices(_of_epoch(self.epoch, (pair for each in updates for pair in each)))
        before, self._shared = self._in_order, len(self._in_order)
        if nothing_later:
            return self.mark()
        if not committed:
            return mark
        known = list(dict.fromkeys([*mark.processed[: mark.length], *committed]))
        if mark.processed is before:
            self._in_order = list(dict.fromkeys([*known, *before]))
            return EpochPosition(mark.epoch, self._in_order, len(known), len(known))
        return EpochPosition(mark.epoch, known, len(known), len(known))

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's indices. From now on, `record_batch` finds the samples of a batch in this order."""
        self._iterated = self._deal().own
        return iter(self._iterated)

    def __len__(self) -> int:
        """Return the number of sample indices that the next iteration yields on this rank."""
        return self.num_samples


def _of_epoch(epoch: int, pairs: Iterable[Indices]) -> list[int]:
    return [index for of_epoch, indices in pairs if of_epoch == epoch for index in indices]
