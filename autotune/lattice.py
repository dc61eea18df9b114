"""The finite set of knobs that the search techniques choose from, and their coordinates in the unit cube.

A finite list of settings lets a search technique recognise duplicates and find the best acquisition exactly; a
distance between settings lets a surrogate interpolate; and continuous proposals run as the nearest setting to a point.
"""

from itertools import product

import numpy as np
import numpy.typing as npt

from .knobs import Knobs, KnobSpace

FloatArray = npt.NDArray[np.float64]


class KnobLattice:
    """All knobs of a space with uniform cuts, unit sizes `steps_per_octave` to a doubling.

    Attributes:
        points: the settings, `(n_points,)`.
        coordinates: their places in the unit cube, `(n_points, n_dimensions)`: unit size (log scale), streams and
            threads (by rank in the list of permitted values) where there is a choice, then one column a route
            where there are several.
        shape: number of values on each axis: unit sizes, streams, threads, routes.
    """

    def __init__(self, space: KnobSpace, *, steps_per_octave: int = 2) -> None:
        self.space = space
        self.unit_bytes = _log_spaced(space, steps_per_octave)
        self.shape = (len(self.unit_bytes), len(space.streams), len(space.threads), len(space.routes))
        indices = tuple(product(*(range(length) for length in self.shape)))
        places = {self.at(index): self._place(index) for index in indices if self._is_offered(index)}
        self.points: tuple[Knobs, ...] = tuple(places)
        self.coordinates: FloatArray = np.array(list(places.values()))

    def __len__(self) -> int:
        return len(self.points)

    def at(self, index: tuple[int, ...]) -> Knobs:
        """The knobs at one index of each axis; as many streams as the route offers, if that is fewer."""
        unit, streams, threads, route = index
        transport, algorithm = self.space.routes[route]
        offered = self.space.streams_on((transport, algorithm))
        return Knobs(
            unit_bytes=self.unit_bytes[unit],
            streams=offered[min(streams, len(offered) - 1)],
            threads=self.space.threads[threads],
            transport=transport,
            algorithm=algorithm,
        )

    def index_of(self, knobs: Knobs) -> tuple[int, ...] | None:
        """Index of the nearest setting; None where the knobs have explicit cuts or lie outside the space."""
        if knobs.cuts is not None or knobs not in self.space:
            return None
        distances = [abs(np.log(value / knobs.unit_bytes)) for value in self.unit_bytes]
        return (
            int(np.argmin(distances)),
            self.space.streams.index(knobs.streams),
            self.space.threads.index(knobs.threads),
            self.space.routes.index(knobs.route),
        )

    def place(self, knobs: Knobs) -> FloatArray | None:
        """Coordinates of a setting, between the lattice's where its unit size is; None as in `index_of`."""
        index = self.index_of(knobs)
        if index is None:
            return None
        place = self._place(index)
        if self.shape[0] > 1:
            low, high = self.space.unit_bytes_log2
            place[0] = (np.log2(knobs.unit_bytes) - low) / (high - low)
        return np.array(place)

    def snap(self, cube: FloatArray) -> Knobs:
        """The knobs at a point of the unit cube with one column an axis (fixed axes too), `(4,)`."""
        index = (min(int(u * length), length - 1) for u, length in zip(cube, self.shape, strict=True))
        return self.at(tuple(index))

    def _is_offered(self, index: tuple[int, ...]) -> bool:
        return index[1] < len(self.space.streams_on(self.space.routes[index[3]]))

    def _place(self, index: tuple[int, ...]) -> list[float]:
        scaled = [i / (length - 1) for i, length in zip(index[:3], self.shape[:3], strict=True) if length > 1]
        routes = self.shape[3]
        return scaled + ([float(index[3] == route) for route in range(routes)] if routes > 1 else [])


def _log_spaced(space: KnobSpace, steps_per_octave: int) -> tuple[int, ...]:
    """From the smallest unit to the largest, both included, in equal steps on the log scale."""
    low, high = space.unit_bytes
    n_steps = max(1, round(np.log2(high / low) * steps_per_octave))
    values = np.geomspace(low, high, n_steps + 1)
    inner = {min(high, max(low, space.whole_unit_bytes(value))) for value in values}
    return tuple(sorted({low, high, *inner}))
