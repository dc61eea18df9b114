"""Which plan hides most behind the next forward pass: a few are run, and whole iterations are compared.

What the tuner has chosen is best where the next forward pass waits for all gradients. Where it waits for its first
layers only, smaller units let these overtake more, and fewer streams bring each of them sooner; how far that pays
depends on what a unit costs. Nothing overlaps the first wait, for the last gradients that come, so that these travel in
smaller units than the others. So the search begins with the tuner's choice without and with updates put off, takes
what a replayed iteration expects to be fastest, halves and doubles what was best as long as that gains, and repeats the
best and the first in the end. Where nobody knows what units cost, it begins with smaller units and fewer streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from sirtaki.autotune.knobs import Cut, Knobs, KnobSpace, format_bytes
from sirtaki.comm.layout import GradientLayout

MOST_TRIED = 8
"""Settings with updates put off, the tuner's own included."""

UNITS = 16
"""In about so many units gradients are sent by the first setting that is not the tuner's, where nothing is expected."""

COUNTS = (4, 6, 8, 12, 16, 24)
"""In about so many units gradients are sent by settings that are compared by what is expected of them."""

MOST_EXPECTED = 4
"""Settings that are tried because of that."""

NEAR, NOT_FAR = 1.02, 1.1
"""Of the shortest expected iteration: what more units, and what fewer streams, may cost."""

ENOUGH = 0.99
"""Of an iteration without: what is not faster than that is not worth what it takes."""


@dataclass(frozen=True, slots=True)
class OverlapChoice:
    """What one iteration runs.

    Attributes:
        knobs: by which units are cut.
        puts_off: its end is put off into the next forward pass.
    """

    knobs: Knobs
    puts_off: bool


class OverlapTrials:
    """Of one tuned setting; each choice in `now` is run for some iterations, and `note` takes what these took.

    Attributes:
        first: the tuner's choice, with nothing put off.
        now: what is to run; at the end, what is best.
        over: nothing more is to be tried.
    """

    def __init__(self, tuned: Knobs, space: KnobSpace, layouts: Sequence[GradientLayout]) -> None:
        """Args: what the tuner has chosen, what may be chosen, and the flat buffers."""
        self._space, self._first_layout = space, layouts[0]
        self._total_bytes = sum(layout.total_bytes for layout in layouts)
        self.now = self.first = OverlapChoice(tuned, puts_off=False)
        self.over = False
        self._expected: list[Knobs] | None = None
        self._taken_s: dict[OverlapChoice, list[float]] = {self.first: []}
        self._repeated: list[OverlapChoice] | None = None

    @property
    def informed(self) -> bool:
        """It has been told what to expect."""
        return self._expected is not None

    def promising(self, expected_s: Callable[[Knobs], float]) -> list[Knobs]:
        """What is expected to be fast: one setting for each number of streams, fewest first, since what is expected
        knows little of what units and streams cost besides their links.
        """
        best: list[tuple[float, Knobs]] = []
        for streams in self._space.streams:
            sizes = [self._total_bytes // count for count in COUNTS]
            together = [choice.knobs for size in sizes for choice in self._allowed(size, streams)]
            expected = [(expected_s(knobs), knobs) for knobs in dict.fromkeys(together)]
            best += [each for each in expected if each[0] <= NEAR * min(seconds for seconds, _ in expected)][:1]
        return [knobs for seconds, knobs in best if seconds <= NOT_FAR * min(seconds for seconds, _ in best)]

    def expect(self, promising: Sequence[Knobs]) -> None:
        """Once, before anything is put off: of these the first ones are tried."""
        self._expected = list(promising[:MOST_EXPECTED])

    def note(self, iteration_s: float) -> None:
        """Iterations of `now` took so long, on average."""
        self._taken_s[self.now].append(iteration_s)
        chosen = self._next()
        self.over = chosen is None
        self.now = chosen or self._best()
        self._taken_s.setdefault(self.now, [])

    def seconds(self, choice: OverlapChoice) -> float:
        """What iterations of a choice that was tried took."""
        return fmean(self._taken_s[choice])

    def _next(self) -> OverlapChoice | None:
        if self._repeated is None:
            new = next((each for each in self._promising() if each not in self._taken_s), None)
            if new is not None and len(self._taken_s) <= MOST_TRIED:
                return new
            self._repeated = [self.first, self._fastest()]
        return self._repeated.pop(0) if self._repeated else None

    def _fastest(self) -> OverlapChoice:
        """Of those that put off."""
        return min((each for each in self._taken_s if each.puts_off), key=self.seconds)

    def _best(self) -> OverlapChoice:
        fastest = self._fastest()
        return fastest if self.seconds(fastest) <= ENOUGH * self.seconds(self.first) else self.first

    def _promising(self) -> Iterator[OverlapChoice]:
        """What is to be tried, in this order; some of it may have been."""
        tuned = self.first.knobs
        yield OverlapChoice(tuned, puts_off=True)
        if self._expected:
            yield from (OverlapChoice(knobs, puts_off=True) for knobs in self._expected)
        else:
            yield from self._unexpected()
        best = self._fastest().knobs
        yield from self._allowed(best.unit_bytes // 2, best.streams)
        yield from self._allowed(best.unit_bytes, best.streams // 2)
        yield from self._allowed(best.unit_bytes * 2, best.streams)
        yield from self._allowed(best.unit_bytes, best.streams * 2)

    def _unexpected(self) -> Iterator[OverlapChoice]:
        tuned = self.first.knobs
        smaller = min(self._total_bytes // UNITS, tuned.unit_bytes // 2)
        few = max(1, tuned.streams // 2)
        for streams in dict.fromkeys((tuned.streams, few)):
            yield from self._allowed(smaller, streams)

    def _allowed(self, unit_bytes: int, streams: int) -> Iterator[OverlapChoice]:
        """One setting; none if the user has fixed another, or it takes more streams than the tuner's choice and two."""
        low, high = self._space.unit_bytes
        tuned = self.first.knobs
        if 1 <= streams <= max(2, tuned.streams):
            knobs = replace(tuned, unit_bytes=min(max(unit_bytes, low), high), streams=streams, cuts=None)
            if knobs in self._space:
                yield OverlapChoice(knobs if low == high else tapered(knobs, self._first_layout), puts_off=True)

    def describe(self) -> str:
        """What was found, for the log."""
        fastest = self._fastest()
        times = (
            f"{self.seconds(self.first) * 1e3:.4g} ms an iteration without it, {self.seconds(fastest) * 1e3:.4g} with"
        )
        if not self.now.puts_off:
            return f"overlap_forward: {times} at best, so that it is not used"
        planned = fastest.knobs == self.first.knobs and fastest.knobs.cuts is not None
        cuts = "planned units" if planned else f"{format_bytes(fastest.knobs.unit_bytes)} units"
        plural = "" if fastest.knobs.streams == 1 else "s"
        return f"overlap_forward: {times} and {cuts} on {fastest.knobs.streams} stream{plural}"


def tapered(knobs: Knobs, layout: GradientLayout) -> Knobs:
    """About equal units, but for the last two, which are a half and a quarter as large."""
    unit = knobs.unit_bytes // layout.itemsize_bytes
    half, quarter = unit // 2, unit // 4
    equal = layout.numel - half - quarter
    if quarter < 1 or equal < unit:
        return knobs
    count = round(equal / unit)
    stops = [*(equal * number // count for number in range(1, count + 1)), equal + half, layout.numel]
    return replace(
        knobs, cuts=tuple(Cut(stop=stop, stream=number % knobs.streams) for number, stop in enumerate(stops))
    )
