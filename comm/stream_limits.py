"""How many streams of each route can be open at once, and why not more."""

from __future__ import annotations

import numpy as np

from .control.plane import ControlPlane
from .plan import Route
from .transports.contract import Transport
from .transports.resources import descriptors_for_streams, streams_within


class StreamLimits:
    """The same on all ranks.

    Attributes:
        opened: how many streams of each route are open.
    """

    def __init__(self, control: ControlPlane) -> None:
        """Collective, before any stream is open."""
        self._size = control.size
        self._descriptors = int(control.minimum(np.array([float(descriptors_for_streams())]))[0])
        self.opened: dict[Route, int] = {}
        self._refused: dict[Route, int] = {}  # so many are not tried, since that failed before

    def refuse(self, route: Route) -> None:
        """This route is not possible."""
        self._refused[route] = 1

    def is_possible(self, route: Route) -> bool:
        """Whether a stream of it may be opened, as far as is known."""
        return self._refused.get(route, 2) > 1

    def note_failure(self, route: Route, wanted: int) -> None:
        """So many could not be opened: half of what could not be added is refused from now on."""
        have = self.opened.get(route, 0)
        self._refused[route] = have + (wanted - have) // 2 + 1

    def limit(self, route: Route, transport: Transport) -> tuple[int, str]:
        """The largest number of streams of a route, and why there are not more."""
        name = route[0].value
        fit = streams_within(self._descriptors, transport.stream_cost, most=transport.max_streams)
        refused = self._refused.get(route)
        if refused is not None and refused <= fit:
            return max(1, refused - 1), f"more streams of {name} could not be opened"
        if fit < transport.max_streams:
            return fit, (
                f"each stream of {name} takes {transport.stream_cost.descriptors} descriptors on {self._size} "
                f"ranks, and {self._descriptors} can be used (see ulimit -n)"
            )
        return fit, f"{name} has at most {fit}"
