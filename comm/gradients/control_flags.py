"""What ranks tell each other along with the gradients: elements at the end of a flat buffer that are reduced, too.

A rank may ask for the order of the gradients to be profiled again, and says that one was written before it was reduced.
Any rank that sets a flag is heard by all of them in the same iteration, without a message. On a device with streams
flags are read an iteration later, so that it is not waited for.
"""

from collections.abc import Sequence

import torch

from sirtaki.comm.device import Device, Event, copy_

FLAG_COUNT = 2
REPROFILE, WRITTEN = range(FLAG_COUNT)


class ControlFlags:
    """The flags of one flat buffer."""

    def __init__(self, device: Device, elements: torch.Tensor) -> None:
        """Args: `elements` are those of the flat buffer that hold the flags, `(FLAG_COUNT,)`."""
        self._device, self._elements = device, elements
        # All that a rank may say, where the flags are, and what was reduced, on the host.
        choices = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]], device=elements.device)
        self._choices = choices.to(elements.dtype).unbind()
        self._reduced = torch.zeros(FLAG_COUNT, dtype=elements.dtype)
        device.pin(self._reduced)
        self._read: Event | None = None

    def write(self, *, reprofile: bool, written: bool = False) -> None:
        """Sets this rank's flags, before the elements are reduced."""
        self._device.launch(self._elements.copy_, self._choices[reprofile + 2 * written])

    def is_set_now(self, flag: int) -> bool:
        """Whether any rank has set it in this iteration, once that is reduced; not on a device with streams."""
        return bool(self._elements.tolist()[flag] > 0.0)

    def read_back(self) -> None:
        """Takes the reduced elements to the host."""
        self._device.launch(copy_, self._reduced, self._elements)
        self._read = self._device.record_event()

    def forget(self) -> None:
        """What was read last does not matter any more."""
        self._read = None

    def is_set(self, flag: int) -> bool:
        """Whether any rank had set it when the flags were last read; waits for the copy if it must."""
        if self._read is None:
            return False
        self._device.wait_for(self._read)
        return bool(self._reduced.tolist()[flag] > 0.0)


class UsageFlags:
    """One element a parameter, which tells whether any rank has computed its gradient (`SIRTAKI_UNUSED=none`)."""

    def __init__(self, device: Device, elements: torch.Tensor) -> None:
        """Args: `elements` of the flat buffer, `(n_params,)`; empty where nobody asks."""
        self._device, self._elements = device, elements

    @property
    def wanted(self) -> bool:
        """Somebody asks."""
        return bool(self._elements.numel())

    def write(self, computed: Sequence[int]) -> None:
        """Sets the flags of the parameters whose gradients this rank has computed."""
        flags = torch.zeros(self._elements.numel(), dtype=self._elements.dtype)
        flags[list(computed)] = 1
        self._device.launch(self._elements.copy_, flags)

    def used(self) -> list[bool]:
        """Once they are reduced: whether any rank has computed the gradient, `(n_params,)`. Waits for the device."""
        return [bool(flag) for flag in (self._elements > 0).tolist()]
