"""A sampler that knows what of an epoch has been processed, and deals out the rest after a reset."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import Sampler

from sirtaki.engine import job


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
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    @property
    def processed_num(self) -> int:
        """How many indices of this epoch have been processed, as far as this rank knows."""
        return len(self.processed_indices)

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch: nothing of it has been processed."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """This rank has processed the batch of that number."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """These indices have been processed."""
        self.processed_indices.update(indices)

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
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def __iter__(self) -> Iterator[int]:
        """This rank's indices."""
        return iter(self.indices)

    def __len__(self) -> int:
        """How many this rank has."""
        return len(self.indices)
