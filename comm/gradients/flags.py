"""Control flags: messages between ranks, all-reduced with the gradients at the end of the first flat buffer."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch

from ..device import Device, Event, copy_


class Drift(Enum):
    """Trend of the communication time, as reported by one rank or agreed by all."""

    USUAL = "usual"
    """No clear change, or the ranks report different trends."""
    SLOWER = "slower"
    """Communication has taken clearly longer for several iterations."""
    FASTER = "faster"
    """Communication has taken clearly less time for several iterations."""


class RankFlags(NamedTuple):
    """Control flags (messages between ranks) that one rank sends, or their OR over all ranks.

    Attributes:
        reprofile: the rank requests a new profile of the order in which gradients become ready.
        written: user code wrote to a gradient before it was reduced.
        replaced: user code replaced `.grad` before it was reduced. The reduced gradient takes its place.
        complete: all gradients were ready at the end of the backward pass, which has waited for the reduction.
        not_slower: the communication time has not become clearly longer. The flag is negated, because ranks only learn
            whether any rank has set it. If no rank has set it, all ranks report a longer time.
        not_faster: the communication time has not become clearly shorter. If no rank has set this flag, all ranks
            report a shorter time.
    """

    reprofile: bool = False
    written: bool = False
    replaced: bool = False
    complete: bool = False
    not_slower: bool = False
    not_faster: bool = False

    @property
    def drift(self) -> Drift:
        """Trend that all ranks have reported; USUAL if they have reported different trends."""
        if self.not_slower == self.not_faster:
            return Drift.USUAL
        return Drift.SLOWER if self.not_faster else Drift.FASTER


FLAG_COUNT = len(RankFlags._fields)


class FlagTraffic:
    """Writes this rank's control flags into a flat buffer, and reads the reduced flags of all ranks from it.

    Attributes:
        drift: lasting change of the communication time that this rank reports: none, slower or faster.
    """

    def __init__(self, device: Device, elements: torch.Tensor) -> None:
        """Prepare to write and read control flags in `elements` of the flat buffer, `(FLAG_COUNT,)`."""
        self._device, self._elements = device, elements
        # Store all combinations of control flags on the device, so that `write` copies nothing from the host.
        choices = torch.cartesian_prod(*[torch.arange(2, device="cpu")] * FLAG_COUNT)
        there = choices.to(device=device.torch_device, dtype=elements.dtype)
        self._choices = {tuple(map(bool, choice)): row for choice, row in zip(choices.tolist(), there, strict=True)}
        self._reduced = device.pinned(FLAG_COUNT, elements.dtype)
        self._read: Event | None = None
        self.drift = Drift.USUAL

    def write(self, flags: RankFlags) -> None:
        """Write this rank's flags to the flat buffer, to be reduced there with the gradients.

        Also write whether this rank's communication has lastingly become slower or faster (`drift`).
        """
        choice = self._choices[(*flags[:-2], self.drift is not Drift.SLOWER, self.drift is not Drift.FASTER)]
        self._device.launch(self._elements.copy_, choice)

    def read(self) -> RankFlags:
        """Return the control flags of all ranks in this iteration; on a GPU, those of the previous iteration.

        On a GPU, this call does not wait for the flags of this iteration. It launches a copy of them to the host, which
        the call in the next iteration returns. Call once per iteration, after the reduction.
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
        """Discard control flags that a GPU is copying to the host, so that the next `read` does not return them."""
        self._read = None
