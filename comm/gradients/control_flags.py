"""What ranks tell each other along with the gradients: elements at the end of a flat buffer that are reduced, too.

Any rank that sets a flag is heard by all of them in the same iteration, without a message. On a device with streams
flags are read an iteration later, so that it is not waited for.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sirtaki.comm.device import Device, Event, copy_

from .pace import Pace


class Said(NamedTuple):
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
    def edits_differ(self) -> bool:
        """Ranks that have done the same to their gradients would have different ones."""
        return self.replaced and self.complete

    @property
    def pace(self) -> Pace:
        """What all ranks find; as usual where they differ, or where nothing was said."""
        if self.not_slower == self.not_faster:
            return Pace.USUAL
        return Pace.SLOWER if self.not_faster else Pace.FASTER


FLAG_COUNT = len(Said._fields)


class ControlFlags:
    """The flags of one flat buffer.

    Attributes:
        pace: what this rank finds of reductions, which it says along with all else.
    """

    def __init__(self, device: Device, elements: torch.Tensor) -> None:
        """Args: `elements` are those of the flat buffer that hold the flags, `(FLAG_COUNT,)`."""
        self._device, self._elements = device, elements
        # All that a rank may say, where the flags are, and what was reduced, on the host.
        choices = torch.cartesian_prod(*[torch.arange(2, device=elements.device)] * FLAG_COUNT).to(elements.dtype)
        self._choices = {tuple(map(bool, choice.tolist())): choice for choice in choices}
        self._reduced = torch.zeros(FLAG_COUNT, dtype=elements.dtype)
        device.pin(self._reduced)
        self._read: Event | None = None
        self.pace = Pace.USUAL

    def write(self, said: Said) -> None:
        """Sets this rank's flags, before the elements are reduced; those of its pace are added."""
        choice = self._choices[(*said[:-2], self.pace is not Pace.SLOWER, self.pace is not Pace.FASTER)]
        self._device.launch(self._elements.copy_, choice)

    def now(self) -> Said:
        """What is said in this iteration, once that is reduced; not on a device with streams."""
        return Said(*[element > 0.0 for element in self._elements.tolist()])

    def read_back(self) -> None:
        """Takes the reduced elements to the host."""
        self._device.launch(copy_, self._reduced, self._elements)
        self._read = self._device.record_event()

    def forget(self) -> None:
        """What was read last does not matter any more."""
        self._read = None

    def before(self) -> Said:
        """What was said when the flags were last read; waits for the copy if it must."""
        if self._read is None:
            return Said()
        self._device.wait_for(self._read)
        return Said(*[element > 0.0 for element in self._reduced.tolist()])


class UsageFlags:
    """One element a parameter, which tells whether any rank has its gradient (`SIRTAKI_UNUSED=none`)."""

    def __init__(self, device: Device, elements: torch.Tensor) -> None:
        """Args: `elements` of the flat buffer, `(n_params,)`; empty where nobody asks."""
        self._device, self._elements = device, elements

    @property
    def wanted(self) -> bool:
        """Somebody asks."""
        return bool(self._elements.numel())

    def write(self, present: Sequence[int]) -> None:
        """Sets the flags of the parameters whose gradients this rank has."""
        flags = torch.zeros(self._elements.numel(), dtype=self._elements.dtype)
        flags[list(present)] = 1
        self._device.launch(self._elements.copy_, flags)

    def used(self) -> list[bool]:
        """Once they are reduced: whether any rank has the gradient, `(n_params,)`. Waits for the device."""
        return [bool(flag) for flag in (self._elements > 0).tolist()]
