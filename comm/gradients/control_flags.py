"""What ranks ask of each other along with the gradients: elements at the end of a flat buffer that are reduced, too.

A rank may ask for a new order of the gradients, and says whether it has data of its own. Any rank that asks is heard
by all of them in the same iteration, without a message.
"""

import torch

from sirtaki.comm.device import Device, Event, copy_

FLAG_COUNT = 2
REPROFILE, HAS_DATA = range(FLAG_COUNT)


class ControlFlags:
    """The votes of one flat buffer."""

    def __init__(self, device: Device, elements: torch.Tensor) -> None:
        """Args: `elements` are those of the flat buffer that votes are, `(FLAG_COUNT,)`."""
        self._device, self._elements = device, elements
        # What a rank may say, `[relearn][alive]`, where the votes are, and what was counted, on the host.
        self._choices = torch.tensor(
            [[[relearn, alive] for alive in (0, 1)] for relearn in (0, 1)], device=elements.device
        ).to(elements.dtype)
        self._count = torch.zeros(FLAG_COUNT, dtype=elements.dtype)
        device.pin(self._count)
        self._counted: Event | None = None

    def write(self, *, relearn: bool, alive: bool) -> None:
        """Votes, before the elements are reduced."""
        self._device.launch(self._elements.copy_, self._choices[int(relearn)][int(alive)])

    def read_back(self) -> None:
        """Takes the reduced elements to the host."""
        self._device.launch(copy_, self._count, self._elements)
        self._counted = self._device.record_event()

    def forget(self) -> None:
        """What was counted last does not matter any more."""
        self._counted = None

    def is_set(self, vote: int) -> bool:
        """Whether, when they were last counted, any rank had voted so; waits for the count if it must."""
        if self._counted is None:
            return False
        self._device.wait_for(self._counted)
        return float(self._count[vote]) > 0.0
