"""A sampler that knows what of an epoch has been processed, and deals out the rest after a reset."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

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
        self.remaining_indices = [index for index in range(len(self.dataset)) if index not in self.processed_indices]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        order = self.remaining_indices.copy()
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        while order and len(order) < self.total_size:
            order += order[: self.total_size - len(order)]
        self.indices = order[self.rank :: self.num_replicas]

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

    def hear(self, said: Iterable[tuple[int, list[int]]]) -> None:
        """What all ranks have processed, this one among them, since they were last told."""
        for epoch, indices in said:
            if epoch == self.epoch:
                self.record_indices(indices)
        self._told = len(self._in_order)

    def __iter__(self) -> Iterator[int]:
        """This rank's indices."""
        return iter(self.indices)

    def __len__(self) -> int:
        """How many this rank has."""
        return len(self.indices)
