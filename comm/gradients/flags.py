"""Flags of the ranks that travel along with the gradients, in the last elements of the first flat buffer."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch

from ..device import Device, Event, copy_


class Drift(Enum):
    """Trend of the communication time, as reported by one rank or agreed by all."""

    USUAL = "usual"
    """No clear change; or the ranks do not agree."""
    SLOWER = "slower"
    """Clearly longer, for several iterations."""
    FASTER = "faster"
    """Clearly shorter, for several iterations."""


class RankFlags(NamedTuple):
    """Flags of one rank, or of all ranks: then a flag is set if any rank has set it.

    Attributes:
        reprofile: the order of the gradients should be profiled again.
        written: a gradient was written before it was reduced.
        replaced: `.grad` was replaced before it was reduced, and the reduced gradient takes its place.
        complete: all gradients were ready in the backward pass, which ended with their reduction; later changes hold.
        not_slower: the communication time has not become clearly longer. Negated, because a sum over ranks shows only
            whether any rank has set a flag: if none has, all ranks find it longer.
        not_faster: the communication time has not become clearly shorter.
    """

    reprofile: bool = False
    written: bool = False
    replaced: bool = False
    complete: bool = False
    not_slower: bool = False
    not_faster: bool = False

    @property
    def drift(self) -> Drift:
        """Trend that all ranks have reported; USUAL if they differ, or have reported none."""
        if self.not_slower == self.not_faster:
            return Drift.USUAL
        return Drift.SLOWER if self.not_faster else Drift.FASTER


FLAG_COUNT = len(RankFlags._fields)


class FlagTraffic:
    """Writes and reads the flags in one flat buffer.

    Attributes:
        drift: trend of the communication time, as this rank reports it with the other flags.
    """

    def __init__(self, device: Device, elements: torch.Tensor) -> None:
        """Args: `elements`: the flags in the flat buffer, `(FLAG_COUNT,)`."""
        self._device, self._elements = device, elements
        # All combinations of flags, on the device, and the reduced flags, on the host.
        choices = torch.cartesian_prod(*[torch.arange(2, device="cpu")] * FLAG_COUNT)
        there = choices.to(device=device.torch_device, dtype=elements.dtype)
        self._choices = {tuple(map(bool, choice)): row for choice, row in zip(choices.tolist(), there, strict=True)}
        self._reduced = device.pinned(FLAG_COUNT, elements.dtype)
        self._read: Event | None = None
        self.drift = Drift.USUAL

    def write(self, said: RankFlags) -> None:
        """Set this rank's flags and its trend, before the elements are reduced."""
        choice = self._choices[(*said[:-2], self.drift is not Drift.SLOWER, self.drift is not Drift.FASTER)]
        self._device.launch(self._elements.copy_, choice)

    def read(self) -> RankFlags:
        """Return the flags of all ranks of this iteration; on a device with streams, those of the iteration before.

        There the host would have to wait for this iteration's flags, so they are only copied to it. Call once an
        iteration, after the reduction.
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
        """Ignore the flags that are being copied to the host."""
        self._read = None
