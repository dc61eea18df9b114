"""Which setting suits a job that trains with sharded parameters: what can be set, and how the fastest is found.

A setting is kept only if it has beaten the default side by side: the two run in turns, so that what happens to the
network or the machine meanwhile happens to both, and what counts is how the steps of one turn compare.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from sirtaki.measures import Gain

STREAMS = (1, 2, 3, 4, 6, 8, 12, 16)

MOST_SCATTERING = 2
"""The second one leaves while the network is still busy with the first; there is nothing for a third one to fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardKnobs:
    """One setting.

    Attributes:
        streams: connections to each other rank that a gather or scatter is cut over.
        ahead: so many modules ahead their parameters are gathered in the forward pass.
        behind: the same in the backward pass.
        kept: so many modules, the last ones, keep their gathered parameters until the backward pass.
        scattering: so many modules' gradients may be scattered at the same time.
        gathers: by which compressor shards are packed that are gathered; empty = they travel as they are.
        scatters: the same of gradients that are scattered.
    """

    streams: int
    ahead: int = 1
    behind: int = 1
    kept: int = 0
    scattering: int = 1
    gathers: str = ""
    scatters: str = ""

    def describe(self) -> str:
        """In a few words, for logs."""
        kept = f", {self.kept} kept" if self.kept else ""
        plural = "" if self.streams == 1 else "s"
        packed = ", ".join(
            f"{what} packed by {name}"
            for what, name in (("parameters", self.gathers), ("gradients", self.scatters))
            if name
        )
        packed = packed and f", {packed}"
        if self.scattering > 1:
            kept += f", {self.scattering} scatters at a time"
        return f"{self.streams} stream{plural}, gathers {self.ahead} ahead and {self.behind} behind{kept}{packed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpace:
    """What may be set.

    Attributes:
        modules: how many are sharded.
        streams: that can be used, ascending.
        whole_bytes: of the gathered parameters of each module, in the order in which they are used.
        memory_bytes: that may be used above what the default takes.
        lossy: compressors that the user allows.
    """

    modules: int
    streams: tuple[int, ...]
    whole_bytes: tuple[int, ...]
    memory_bytes: int = 0
    lossy: tuple[str, ...] = ()

    def __contains__(self, knobs: ShardKnobs) -> bool:
        return (
            knobs.streams in self.streams
            and 0 <= knobs.ahead < max(2, self.modules)
            and 1 <= knobs.behind < max(2, self.modules)
            and 0 <= knobs.kept <= self.modules
            and 1 <= knobs.scattering <= MOST_SCATTERING
            and {knobs.gathers, knobs.scatters} <= {"", *self.lossy}
            and self.extra_bytes(knobs) <= self.memory_bytes
        )

    def extra_bytes(self, knobs: ShardKnobs) -> int:
        """Memory at the peak above that of the default, at most; without packed shards on their way.

        In the backward pass a module has parameters, gradients, the tensor that is scattered, and what is gathered for
        the next one: four times its size; the forward pass stays below that with two gathered ahead. Each further
        scatter has a tensor of its own.
        """
        largest = max(self.whole_bytes, default=0)
        forward, backward = max(0, knobs.ahead - 2), knobs.behind - 1 + knobs.scattering - 1
        # The last module is used again at once: it would have been gathered for that.
        kept = sum(self.whole_bytes[len(self.whole_bytes) - knobs.kept : len(self.whole_bytes) - 1])
        return max(forward, backward) * largest + kept

    def around(self, knobs: ShardKnobs) -> Iterator[ShardKnobs]:
        """Settings that differ in one thing, what usually matters most first."""
        place = self.streams.index(knobs.streams)
        most = next((n for n in range(self.modules, 1, -1) if replace(knobs, kept=n) in self), 1)
        beside = (*self.streams[place + 1 : place + 2], *self.streams[max(0, place - 1) : place])
        candidates = [
            *(replace(knobs, gathers=name, scatters=name) for name in self.lossy),
            *(replace(knobs, kept=kept) for kept in (most, 1, 0)),
            *(replace(knobs, scattering=number) for number in range(MOST_SCATTERING, 0, -1)),
            *(replace(knobs, scatters=name) for name in ("", *self.lossy)),
            *(replace(knobs, gathers=name) for name in ("", *self.lossy)),
            *(replace(knobs, streams=streams) for streams in beside),
            *(replace(knobs, ahead=knobs.ahead + step) for step in (1, -1)),
            *(replace(knobs, behind=knobs.behind + step) for step in (1, -1)),
        ]
        return (one for one in candidates if one != knobs and one in self)


LEAST_PAIRS, MOST_PAIRS = 3, 8
CLEAR = 2.0
"""Standard errors by which a setting must be faster to be kept, or slower to be dropped."""

WORTHWHILE = 0.01
"""The share of a step that it must gain."""

LIKELY_NOISE = 0.01
"""Of the ratio of two steps, until there are more of them."""

DOUBTFUL = 0.1
"""The share of a step that a setting may gain for all that is known, from which on nothing found means little."""

MEASURED = 2
"""Steps of one turn, after one that does not count."""


class ShardSession:
    """Spends a budget of steps on finding the fastest setting; on one rank, which tells the others.

    Attributes:
        space: what may be set.
        knobs: to run now; in the end those to keep.
        done: the search is over.
        why: it ended as it did, in words.
        doubt: the default stays, but steps scatter so much that another search may find something faster.
        proved: how much faster than the default the kept setting is; None = the default stays.
        default_s: what a step has taken with the default in the latest turn; not a number = none has run yet.
        seen: how many times as fast as the default the fastest one looks until now; not proved.
        used: steps until now.
        at_most: steps that the search may take, a last proof included that begins within the budget.
        tried: how many settings have run, the default among them.
    """

    def __init__(self, space: ShardSpace, default: ShardKnobs, *, budget: int, first: ShardKnobs | None = None) -> None:
        """Args:
        space: what may be set.
        default: what runs untuned, and stays if nothing beats it.
        budget: steps in all.
        first: what an earlier job has found: tried before all others, and nothing else if it wins, or is the default.
        """
        self.space, self._default, self._left, self._first = space, default, budget, first
        self.knobs, self.done, self.tried = default, budget < 1, 1
        self.proved: Gain | None = None
        self.seen, self.used, self.at_most = 1.0, 0, budget + 2 * LEAST_PAIRS * (MEASURED + 1)
        self.default_s, self.why, self._missed = math.nan, "", 0.0
        self._script = self._search()
        if not self.done:
            self.knobs = next(self._script)

    def record(self, span_s: float) -> None:
        """Takes how long a step with `knobs` took on the slowest rank, and sets what is to run next.

        Args:
            span_s: seconds; infinite if it could not be run.
        """
        self._left -= 1
        self.used += 1
        try:
            self.knobs = self._script.send(span_s)
        except StopIteration as end:
            self.knobs, self.done = end.value, True

    @property
    def doubt(self) -> bool:
        """See above."""
        return self.proved is None and self._missed > DOUBTFUL

    def _search(self) -> Generator[ShardKnobs, float, ShardKnobs]:
        best, refused = self._default, {self._default}
        if self._first == best:
            self.why = "an earlier job has found nothing faster"
            yield best
            return best
        self.why = "beat the default in paired turns"
        if self._first is not None and self._first in self.space:
            self.tried += 1
            self.proved = yield from self._duel(self._first, best)
            if self.proved is not None:
                return self._first
        while self._left > 2 * LEAST_PAIRS * (MEASURED + 1):
            rival = next((one for one in self.space.around(best) if one not in refused), None)
            if rival is None:
                break
            refused.add(rival)
            self.tried += 1
            if (won := (yield from self._duel(rival, best))) is not None:
                best = rival
                self.seen *= won.times
        if best != self._default:
            self.proved = yield from self._duel(best, self._default)  # the sum of small steps is proven once more
        if self.proved is None:
            self.why = "nothing was proved to beat the default in paired turns"
            if self.doubt:
                self.why += ": steps scatter, others seem to use the host or the network"
            return self._default
        return best

    def _duel(self, rival: ShardKnobs, best: ShardKnobs) -> Generator[ShardKnobs, float, Gain | None]:
        """By how much the rival is faster; None if that is not clear."""
        leads: list[float] = []
        for number in range(MOST_PAIRS):
            turns = (rival, best) if number % 2 else (best, rival)
            spans_s = {}
            for knobs in turns:
                spans_s[knobs] = yield from self._turn(knobs)
            if not all(map(math.isfinite, spans_s.values())):
                return None
            leads.append(math.log(spans_s[best] / spans_s[rival]))
            lead, error = statistics.median(leads), _error(leads)
            if number + 1 < LEAST_PAIRS and lead > -CLEAR * error:
                continue
            if lead < -CLEAR * error or lead > max(CLEAR * error, WORTHWHILE):
                break
            if lead + CLEAR * error < WORTHWHILE or self._left < 2 * (MEASURED + 1):
                break
        lead, half = statistics.median(leads), CLEAR * _error(leads)
        if len(leads) < LEAST_PAIRS or lead <= max(half, WORTHWHILE):
            self._missed = max(self._missed, lead + half)
            return None
        return Gain(times=math.exp(lead), low=math.exp(lead - half), high=math.exp(lead + half))

    def _turn(self, knobs: ShardKnobs) -> Generator[ShardKnobs, float, float]:
        yield knobs  # the first one after a change does not count
        spans_s = []
        for _ in range(MEASURED):
            spans_s.append((yield knobs))  # noqa: PERF401 - no comprehension can yield
        span_s = statistics.fmean(spans_s)
        if knobs == self._default:
            self.default_s = span_s
        return span_s


def _error(leads: Sequence[float]) -> float:
    """Standard error of their mean, of which some is taken for granted while there are few."""
    spread = statistics.stdev(leads) if len(leads) > 1 else LIKELY_NOISE
    return math.hypot(spread, LIKELY_NOISE) / math.sqrt(len(leads))
