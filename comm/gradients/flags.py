"""Flags of the ranks that travel along with the gradients, in the last elements of the first flat buffer."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch

from ..device import Device, Event, copy_


class Drift(Enum):
    """What a rank says, or what all ranks say."""

    USUAL = "usual"
    """As then; or the ranks do not agree."""
    SLOWER = "slower"
    """Clearly longer, for a while now."""
    FASTER = "faster"
    """Clearly less long, for a while now."""


class RankFlags(NamedTuple):
    """What at least one rank says.

    Attributes:
        reprofile: the order of the gradients should be profiled again.
        written: a gradient was written before it was reduced.
        replaced: `.grad` was replaced before it was reduced; it gives way to what is reduced.
        complete: all gradients came in the backward pass, so it ended with their reduction; what is done to them
            afterwards holds.
        not_slower: reductions do not take clearly longer than they did. Said in the negative: if nobody says so, all
            ranks find them slower.
        not_faster: nor do they take clearly less long.
    """

    reprofile: bool = False
    written: bool = False
    replaced: bool = False
    complete: bool = False
    not_slower: bool = False
    not_faster: bool = False

    @property
    def drift(self) -> Drift:
        """What all ranks find; as usual where they differ, or where nothing was said."""
        if self.not_slower == self.not_faster:
            return Drift.USUAL
        return Drift.SLOWER if self.not_faster else Drift.FASTER


FLAG_COUNT = len(RankFlags._fields)


class FlagTraffic:
    """The flags of one flat buffer.

    Attributes:
        drift: trend of the communication time, as this rank reports it with the other flags.
    """

    def __init__(self, device: Device, elements: torch.Tensor) -> None:
        """Args: `elements` are those of the flat buffer that hold the flags, `(FLAG_COUNT,)`."""
        self._device, self._elements = device, elements
        # All that a rank may say, where the flags are, and what was reduced, on the host.
        choices = torch.cartesian_prod(*[torch.arange(2, device="cpu")] * FLAG_COUNT)
        there = choices.to(device=device.torch_device, dtype=elements.dtype)
        self._choices = {tuple(map(bool, choice)): row for choice, row in zip(choices.tolist(), there, strict=True)}
        self._reduced = device.pinned(FLAG_COUNT, elements.dtype)
        self._read: Event | None = None
        self.drift = Drift.USUAL

    def write(self, said: RankFlags) -> None:
        """Sets this rank's flags, before the elements are reduced; those of its pace are added."""
        choice = self._choices[(*said[:-2], self.drift is not Drift.SLOWER, self.drift is not Drift.FASTER)]
        self._device.launch(self._elements.copy_, choice)

    def read(self) -> RankFlags:
        """What was said in this iteration, which is reduced; on a device with streams, what was in the one before.

        There the host would have to wait; this iteration's flags are on their way to it afterwards. Once an iteration.
        """
        if not self._device.streams:
            return RankFlags(*map(bool, self._elements.tolist()))
        before = RankFlags()
        if self._read is not None:
            self._device.wait_for(self._read)
            before = RankFlags(*map(bool, self._reduced.tolist()))
        self._device.launch(copy_, self._reduced, self._elements)
        self._read = self._device.record_event()
        return before

    def forget(self) -> None:
        """What is on its way to the host does not matter any more."""
        self._read = None
