"""A sampler that knows what of an epoch has been processed, and deals out the rest after a reset."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Sampler

from sirtaki.engine import job


@dataclass(frozen=True, slots=True)
class Mark:
    """How far an epoch had come: the first `length` of `processed`, which grows at its end only."""

    epoch: int
    processed: list[int]
    length: int

    def __deepcopy__(self, memo: object) -> Mark:
        return self


class _Deal(NamedTuple):
    """What was dealt out: what was not processed then, and this rank's part of it."""

    remaining: list[int]
    own: list[int]


class ElasticSampler(Sampler[int]):
    """Indices of a data set, dealt out to the ranks in turn; `record_batch` after each batch is what it remembers."""

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """Deals out the first epoch.

        Args:
            dataset: what is sampled; only its length matters.
            shuffle: deal in another order in each epoch, the same on all ranks.
            seed: of that order.
        """
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self._dealt: _Deal | None = None
        self._begin(0, [])
        self.reset()

    def _begin(self, epoch: int, processed: Iterable[int]) -> None:
        self.epoch = epoch
        self._in_order = list(processed)
        self.processed_indices = set(self._in_order)
        self._told = len(self._in_order)

    @property
    def processed_num(self) -> int:
        """How many indices of this epoch have been processed, as far as this rank knows."""
        return len(self.processed_indices)

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch: nothing of it has been processed."""
        self._begin(epoch, [])
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """This rank has processed the batch of that number."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """These indices have been processed."""
        self._deal()  # as they were before
        new = [index for index in indices if index not in self.processed_indices]
        self._in_order += new
        self.processed_indices.update(new)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The indices of this rank's batch of that number."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def reset(self) -> None:
        """Deals out what is not processed, as evenly as possible: some indices come twice to make ends meet."""
        control = job.current().control
        self.rank, self.num_replicas = control.rank, control.size
        self._dealt = None  # until somebody asks: there are several resets in a row where ranks come and go

    def _deal(self) -> _Deal:
        if self._dealt is None:
            left = np.ones(len(self.dataset), dtype=np.bool_)
            left[self._in_order] = False
            order = remaining = np.flatnonzero(left)
            if self.shuffle:
                # Of NumPy's generators the one whose numbers are the same in all versions.
                order = np.random.RandomState((self.seed + self.epoch) % 2**32).permutation(remaining)
            own = np.arange(self.rank, self.num_replicas * math.ceil(len(order) / self.num_replicas), self.num_replicas)
            self._dealt = _Deal(remaining.tolist(), order[own % max(1, len(order))].tolist())
        return self._dealt

    @property
    def indices(self) -> list[int]:
        """This rank's, in the order in which they are dealt out."""
        return self._deal().own

    @property
    def remaining_indices(self) -> list[int]:
        """Those of all ranks that were not processed when they were dealt out."""
        return self._deal().remaining

    @property
    def num_samples(self) -> int:
        """How many this rank has."""
        return len(self.indices)

    @property
    def total_size(self) -> int:
        """How many all ranks have together, those that come twice included."""
        return self.num_samples * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """What has been processed of which epoch."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self._begin(state_dict["epoch"], sorted(state_dict["processed_indices"]))
        self.reset()

    # ── for commits ──────────────────────────────────────────────────────────────────────────────────────────────

    def mark(self) -> Mark:
        """Where it is; takes the same time however much has been processed."""
        return Mark(self.epoch, self._in_order, len(self._in_order))

    def rewind(self, mark: Mark) -> None:
        """Goes back to there."""
        told = self._told if mark.processed is self._in_order else mark.length
        self._begin(mark.epoch, mark.processed[: mark.length])
        self._told = min(told, mark.length)
        self.reset()

    def news(self) -> tuple[int, list[int]]:
        """The epoch, and what this rank has processed of it since the other ranks were last told."""
        return self.epoch, self._in_order[self._told :]

    def hear(self, news: Iterable[tuple[int, list[int]]]) -> None:
        """What all ranks have processed, this one among them, since they were last told."""
        for epoch, indices in news:
            if epoch == self.epoch:
                self.record_indices(indices)
        self._told = len(self._in_order)

    def __iter__(self) -> Iterator[int]:
        """This rank's indices."""
        return iter(self.indices)

    def __len__(self) -> int:
        """How many this rank has."""
        return len(self.indices)
