"""Control flags that are reduced together with the gradients, in the last elements of the first flat buffer."""

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
    """Flags of one rank, or of all ranks. A flag of all ranks is set if any rank has set it.

    Attributes:
        reprofile: the rank requests a new profile of the order.
        written: user code wrote to a gradient before it was reduced.
        replaced: user code replaced `.grad` before it was reduced. The reduced gradient takes its place.
        complete: all gradients were ready at the end of the backward pass, which has waited for the reduction.
        not_slower: the communication time has not become clearly longer. Negated, because the sum over ranks shows
            whether any rank has set a flag: if no rank has set this one, all ranks report a longer time.
        not_faster: the communication time has not become clearly shorter. Negated for the same reason.
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
    """The flags of each iteration in a flat buffer.

    Attributes:
        drift: trend of the communication time that this rank reports.
    """

    def __init__(self, device: Device, elements: torch.Tensor) -> None:
        """Args: `elements`: elements of the flags in the flat buffer, `(FLAG_COUNT,)`."""
        self._device, self._elements = device, elements
        # All combinations of flags are on the device, so that `write` copies nothing from the host.
        choices = torch.cartesian_prod(*[torch.arange(2, device="cpu")] * FLAG_COUNT)
        there = choices.to(device=device.torch_device, dtype=elements.dtype)
        self._choices = {tuple(map(bool, choice)): row for choice, row in zip(choices.tolist(), there, strict=True)}
        self._reduced = device.pinned(FLAG_COUNT, elements.dtype)
        self._read: Event | None = None
        self.drift = Drift.USUAL

    def write(self, flags: RankFlags) -> None:
        """Write this rank's flags and trend to the flat buffer. Call before the elements are reduced."""
        choice = self._choices[(*flags[:-2], self.drift is not Drift.SLOWER, self.drift is not Drift.FASTER)]
        self._device.launch(self._elements.copy_, choice)

    def read(self) -> RankFlags:
        """Return the flags of all ranks of this iteration; on a device with streams, of the iteration before.

        On such a device the host does not wait for the flags of this iteration. A copy to the host is launched instead,
        and read in the next iteration. Call once an iteration, after the reduction.
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
        """Discard the flags that are being copied to the host."""
        self._read = None
