"""A sampler that records which samples of an epoch were processed, and redistributes the rest after a reset."""

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
    """Progress of an epoch at one moment, for commits.

    Attributes:
        epoch: number of the epoch.
        processed: indices in the order in which they were recorded. The sampler appends to this list.
        length: number of entries of `processed` that belong to this position.
        shared: number of entries that were sent to the other ranks.
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
"""Number of an epoch, and indices of its samples."""


class SamplerUpdate(NamedTuple):
    """Indices that one rank has processed and not sent to the other ranks.

    Attributes:
        committed: indices in its newest commit.
        later: indices recorded since.
    """

    committed: Indices
    later: Indices


class _Deal(NamedTuple):
    """A distribution of the unprocessed samples of an epoch over ranks."""

    remaining: list[int]
    own: list[int]


class ElasticSampler(Sampler[int]):
    """Sampler that distributes the indices of a data set over all ranks, and after a reset the rest of the epoch.

    Call `record_batch` after each batch, and `set_epoch` before each epoch. Batches are counted in the order of the
    newest iteration over the sampler, also after `restore()`, `sync()` or `load_state_dict()`, because a running loop
    continues in that order. If no iteration of this epoch has begun since ranks were added or removed, batches are
    counted in the order that the next iteration will have.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """Distribute the first epoch.

        Args:
            dataset: data to sample. Only its length is used.
            shuffle: use another order in each epoch, equal on all ranks.
            seed: seed of this order.
        """
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.rank, self.num_replicas = 0, 0
        self._dealt: _Deal | None = None
        self._iterated: list[int] | None = None  # order of the newest iteration
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
        """Number of indices of this epoch that have been processed, as far as this rank knows."""
        return len(self.processed_indices)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch without processed samples."""
        self._begin(epoch, [])
        self.restart()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that this rank has processed batch `batch_idx` of its newest iteration."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that these indices have been processed."""
        self._deal()  # distribute before recording
        new = [index for index in indices if index not in self.processed_indices]
        self._in_order += new
        self.processed_indices.update(new)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the indices of this rank's batch `batch_idx`."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def reset(self) -> None:
        """Distribute the samples that are not processed. Some are repeated, so that all ranks get the same number."""
        control = job.current().control
        if (control.rank, control.size) != (self.rank, self.num_replicas):
            self._iterated = None
        self.rank, self.num_replicas = control.rank, control.size
        self._dealt = None  # computed on demand, because a change of ranks resets several times

    def restart(self) -> None:
        """Reset, and count batches in the new order even before an iteration has begun, because training is called
        again.
        """
        self.reset()
        self._iterated = None

    def _deal(self) -> _Deal:
        if self._dealt is None:
            left = np.ones(len(self.dataset), dtype=np.bool_)
            left[self._in_order] = False
            order = remaining = np.flatnonzero(left)
            if self.shuffle:
                # RandomState is the NumPy generator with stable results across versions.
                order = np.random.RandomState((self.seed + self.epoch) % 2**32).permutation(remaining)
            own = np.arange(self.rank, self.num_replicas * math.ceil(len(order) / self.num_replicas), self.num_replicas)
            self._dealt = _Deal(remaining.tolist(), order[own % max(1, len(order))].tolist())
        return self._dealt

    @property
    def indices(self) -> list[int]:
        """Return this rank's indices, in the order in which batches are counted."""
        return self._deal().own if self._iterated is None else self._iterated

    @property
    def remaining_indices(self) -> list[int]:
        """Return the indices of all ranks that were not processed at the last reset."""
        return self._deal().remaining

    @property
    def num_samples(self) -> int:
        """Return the number of indices of the next iteration on this rank."""
        return len(self._deal().own)

    @property
    def total_size(self) -> int:
        """Return the number of indices of the next iteration on all ranks, including repeated ones."""
        return self.num_samples * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and its processed indices."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state of this class, or of Horovod's sampler, which has the number of processed samples.

        Raises:
            ConfigError: the state has neither format, or belongs to a larger data set.
        """
        if "epoch" not in state_dict or not {"processed_indices", "processed_num"} & state_dict.keys():
            raise ConfigError(
                f"a sampler's state must have `epoch` and `processed_indices` (or Horovod's `processed_num`), but "
                f"it has {sorted(map(str, state_dict))}"
            )
        epoch, n_samples = int(state_dict["epoch"]), len(self.dataset)
        if "processed_indices" in state_dict:
            processed = sorted(state_dict["processed_indices"])
        else:
            order = list(range(n_samples))
            if self.shuffle:
                random.Random(self.seed + epoch).shuffle(order)  # Horovod's order of an epoch
            processed = order[: state_dict["processed_num"]]
        if processed and not 0 <= min(processed) <= max(processed) < n_samples:
            raise ConfigError(f"the state has index {max(processed)}, but the data set has {n_samples} samples")
        self._begin(epoch, processed)
        self.reset()

    # ── for commits ──────────────────────────────────────────────────────────────────────────────────────────────

    def mark(self) -> EpochPosition:
        """Return the progress, in constant time."""
        return EpochPosition(self.epoch, self._in_order, len(self._in_order), self._shared)

    def rewind(self, mark: EpochPosition) -> None:
        """Go back to a position."""
        self._begin(mark.epoch, mark.processed[: mark.length])
        self._shared = mark.shared
        self.reset()

    def unsent(self, mark: EpochPosition) -> SamplerUpdate:
        """Return the indices that this rank has not sent yet. `mark`: position in this rank's newest commit."""
        known = mark.length if mark.processed is self._in_order else 0
        return SamplerUpdate(
            committed=(mark.epoch, mark.processed[mark.shared : mark.length]),
            later=(self.epoch, self._in_order[max(self._shared, known) :]),
        )

    def merge(self, mark: EpochPosition, updates: Iterable[SamplerUpdate]) -> EpochPosition:
        """Record the samples that all ranks have processed.

        Args:
            mark: position in this rank's newest commit.
            updates: results of `unsent()` of all ranks.

        Returns:
            The position to commit, with the samples that all ranks have committed and none that were recorded later.
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
        """Iterate over this rank's indices, and count batches in this order from now on."""
        self._iterated = self._deal().own
        return iter(self._iterated)

    def __len__(self) -> int:
        """Return the number of indices of the next iteration on this rank."""
        return self.num_samples


def _of_epoch(epoch: int, pairs: Iterable[Indices]) -> list[int]:
    return [index for of_epoch, indices in pairs if of_epoch == epoch for index in indices]
