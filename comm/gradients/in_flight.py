"""The last two iterations of a synchroniser, which a device with streams may still be busy with.

The watchdog's thread asks here whether the device waits for other ranks, and since when.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sirtaki.comm.device import Device, Event
from sirtaki.comm.transports.contract import Work

from .schedule import ScheduledUnit


@dataclass(frozen=True, slots=True)
class IterationEvents:
    """When the parts of one iteration end on the device."""

    iteration: int
    first_ready: Event
    backward_ended: Event
    reduced: Event


@dataclass(slots=True)
class InFlight:
    """What was started and may not be done.

    Attributes:
        units: of the last iteration, with their works.
    """

    device: Device
    units: list[tuple[ScheduledUnit, Work]] = field(default_factory=list)
    _iterations: list[IterationEvents] = field(default_factory=list)
    _stalled: tuple[int, float] | None = None

    def add(self, events: IterationEvents) -> IterationEvents:
        """An iteration more; the last but one is forgotten. Returns the one before it; itself, if there is none."""
        self._iterations = [*self._iterations[-1:], events]
        return self._iterations[0]

    @property
    def busy(self) -> bool:
        """The device is not done with these iterations. Any thread may ask."""
        return not all(self.device.is_reached(events.reduced) for events in self._iterations)

    def stalled(self) -> tuple[int, float] | None:
        """The iteration of which the backward pass is over on the device but not the reduction, and since when.

        Any thread may ask. The time is `time.monotonic()`, and that of the first call that found it so.
        """
        late = [events for events in self._iterations if not self.device.is_reached(events.reduced)]
        if not late or not self.device.is_reached(late[0].backward_ended):
            self._stalled = None
        elif self._stalled is None or self._stalled[0] != late[0].iteration:
            self._stalled = late[0].iteration, time.monotonic()
        return self._stalled

    def unreduced_unit(self) -> str:
        """The first unit of the last iteration that is not reduced, in words; empty if there is none."""
        for number, (unit, work) in enumerate(self.units):
            if not work.is_done():
                what = unit.group.layout.describe(unit.start, unit.stop)
                return f"unit {number + 1} of {len(self.units)} ({what}) on stream {unit.stream}"
        return ""
