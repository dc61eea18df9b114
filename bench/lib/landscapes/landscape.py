"""A job on which tuners are evaluated: true times of all settings, and noisy measurements."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from sirtaki.autotune.knobs import KnobLattice, Knobs, KnobSpace
from sirtaki.autotune.model.fits import LinkProbe
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.comm.plan import GradientLayout, Route
from sirtaki.engine.tuning.plans import ENOUGH, SHAPES, Measured, narrowed

# ── simulation of a backward pass and its all-reduces, event by event, under any physics ─────────────────────────────


def _nothing(_: float) -> float:
    return 0.0


def _one(_: float) -> float:
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Physics:
    """The cost of all-reduces on one route.

    Attributes:
        capacity: function of (number of concurrent all-reduces, whether computation runs) to total bytes per second.
        latency_s: seconds before the first byte is sent, by size in bytes.
        host_s: seconds that the host needs for an all-reduce, by size. The host serves one all-reduce at a time.
        quality: share of its rate at which an all-reduce progresses, by size.
        slowdown: factor on the duration of the computation, by number of all-reduces in flight.
    """

    capacity: Callable[[int, bool], float]
    latency_s: Callable[[float], float]
    host_s: Callable[[float], float] = _nothing
    quality: Callable[[float], float] = _one
    slowdown: Callable[[float], float] = _one


@dataclass(frozen=True, slots=True)
class Message:
    """One all-reduce: start time (in seconds of undisturbed computation), size and stream."""

    ready_s: float
    size_bytes: float
    stream: int


def replay(messages: Sequence[Message], *, compute_s: float, physics: Physics) -> tuple[float, float]:
    """Simulate a backward pass with its all-reduces.

    Return the end of both, and the end of the backward pass alone, in seconds.

    Args:
        messages: all-reduces in launch order. None may be ready before its predecessor.
        compute_s: duration of the undisturbed backward pass.
        physics: physics of the route.
    """
    computed_s = 0.0
    queues: dict[int, deque[Message]] = {}
    waiting: list[tuple[float, int, float, int]] = []  # (end of latency, tie-breaker, work, stream).
    moving: list[tuple[float, int, int]] = []  # (end on the clock of transmissions, tie-breaker, stream).
    busy: set[int] = set()
    now_s = clock = done_s = host_free_s = 0.0
    following, number = 0, 0

    def begin(message: Message) -> None:
        nonlocal host_free_s, number
        size = message.size_bytes
        host_free_s = max(now_s, host_free_s) + physics.host_s(size)
        number += 1
        heappush(
            waiting,
            (host_free_s + physics.latency_s(size), number, size / physics.quality(size), message.stream),
        )
        busy.add(message.stream)

    while True:
        while following < len(messages) and (messages[following].ready_s <= done_s + 1e-12 or done_s >= compute_s):
            message = messages[following]
            following += 1
            if message.stream in busy:
                queues.setdefault(message.stream, deque()).append(message)
            else:
                begin(message)
        computing = done_s < compute_s
        pace = 1.0 / physics.slowdown(len(busy)) if computing else 1.0
        share = physics.capacity(len(moving), computing) / len(moving) if moving else 0.0
        until_s = []  # Seconds until the next event of each kind.
        if computing:
            goal_s = min(messages[following].ready_s, compute_s) if following < len(messages) else compute_s
            until_s.append(max(0.0, goal_s - done_s) / pace)
        if waiting:
            until_s.append(max(0.0, waiting[0][0] - now_s))
        if moving:
            until_s.append(max(0.0, moving[0][0] - clock) / share)
        if not until_s:
            return now_s, computed_s
        step_s = min(until_s)
        now_s += step_s
        clock += step_s * share
        if computing:
            done_s += step_s * pace
            if compute_s - done_s < 1e-12:
                done_s, computed_s = compute_s, now_s
        while waiting and waiting[0][0] <= now_s + 1e-12:
            _, tie, work, stream = heappop(waiting)
            heappush(moving, (clock + work, tie, stream))
        while moving and moving[0][0] <= clock * (1 + 1e-12) + 1e-9:
            stream = heappop(moving)[2]
            busy.discard(stream)
            if queues.get(stream):
                begin(queues[stream].popleft())


def round_s(size_bytes: float, streams: int, rounds: int, physics: Physics) -> float:
    """Return seconds of a number of equal messages in sequence on each stream, without computation."""
    messages = [Message(0.0, size_bytes, stream) for _ in range(rounds) for stream in range(streams)]
    return replay(messages, compute_s=0.0, physics=physics)[0]


# ── The benchmark ────────────────────────────────────────────────────────────────────────────────────────────────────

Luck = Callable[[Knobs, float, np.random.Generator], float]
"""Function from a setting, a relative noise and a generator to a factor on one measurement."""


def lognormal(knobs: Knobs, noise: float, rng: np.random.Generator) -> float:
    """Return a lognormal noise factor."""
    return math.exp(noise * rng.standard_normal())


def steady(iteration: int) -> float:
    """Return 1 for every iteration, because the network does not change."""
    return 1.0


@dataclass(kw_only=True, eq=False)
class Landscape:
    """A job to tune, with true and measured times.

    Attributes:
        family: name of the family of jobs.
        layout: gradients in the order of the backward pass.
        profile: ready times of the gradients.
        space: possible settings.
        default: the untuned setting.
        truth: function from a setting to its true span in seconds.
        later: replaces `truth` from iteration `changes_at` on; None = unchanged.
        changes_at: iteration at which `later` takes effect.
        pace: factor on the spans of all settings, by iteration.
        luck: noise factor of a measurement.
        probe: function from route, bytes, streams and rounds to seconds of a probe on the idle network; None = probes
            are impossible.
        seeds: proposals of the registry.
        presumed: whether planners may assume that probes are representative; false within one host.
        steps_per_octave: resolution of unit sizes in the search of the best.
    """

    family: str
    layout: GradientLayout
    profile: Profile
    space: KnobSpace
    default: Knobs
    truth: Callable[[Knobs], float]
    later: Callable[[Knobs], float] | None = None
    changes_at: int = 0
    pace: Callable[[int], float] = steady
    luck: Luck = lognormal
    probe: Callable[[Route, int, int, int], float] | None = None
    seeds: tuple[Knobs, ...] = ()
    presumed: bool = True
    steps_per_octave: int = 2
    _known: dict[tuple[Knobs, bool], float] = field(default_factory=dict)

    def span_s(self, knobs: Knobs, iteration: int | None = None) -> float:
        """Return the true span of a setting in seconds, at an iteration or at the end."""
        changed = self.later is not None and (iteration is None or iteration >= self.changes_at)
        key = (knobs, changed)
        if key not in self._known:
            truth = self.later if changed and self.later is not None else self.truth
            self._known[key] = truth(knobs)
        return self._known[key] * self.pace(100 if iteration is None else iteration)

    def measure_s(self, knobs: Knobs, iteration: int, noise: float, rng: np.random.Generator) -> float:
        """Return a noisy measurement of a setting's span in seconds."""
        return self.span_s(knobs, iteration) * self.luck(knobs, noise, rng)

    @cached_property
    def best(self) -> Knobs:
        """Return the fastest uniform setting at the end: of a lattice, and of unit sizes around its five fastest."""
        lattice = KnobLattice(self.space, steps_per_octave=self.steps_per_octave)
        ranked = sorted(lattice.points, key=self.span_s)[:5]
        low, high = self.space.unit_bytes
        around = [
            knobs.but(unit_bytes=min(max(round(knobs.unit_bytes * 2 ** (step / 16)), low), high))
            for knobs in ranked
            for step in range(-8, 9)
        ]
        return min([*ranked, *around], key=self.span_s)

    def regret(self, knobs: Knobs) -> float:
        """Return the share by which a setting is slower than the best uniform one; 0 for faster plans."""
        return max(0.0, self.span_s(knobs) / self.span_s(self.best) - 1)

    def probed(self, noise: float, rng: np.random.Generator) -> tuple[KnobSpace, PlanningModel | None]:
        """Probe the idle network. Return the space as narrowed by the probes, and the planners' model."""
        if self.probe is None:
            return self.space, None
        probes: dict[Route, list[LinkProbe]] = {}
        for route in self.space.routes:
            shapes = SHAPES if route == self.space.routes[0] else SHAPES[:ENOUGH]
            probes[route] = []
            for unit_bytes, streams in shapes:
                if streams <= self.space.streams[-1]:
                    rounds = max(1, 2 * 1024 * 1024 // unit_bytes)
                    seconds = self.probe(route, unit_bytes, streams, rounds) * lognormal(self.default, noise, rng)
                    probes[route].append(
                        LinkProbe(unit_bytes=unit_bytes, streams=streams, seconds=seconds, rounds=rounds)
                    )
        space = narrowed(self.space, probes, default=self.default)
        found, profile = Measured(space=self.space, promising=space, links=probes), self.profile
        return space, found.model(self.layout, profile.ready_s, profile.compute_s, profile.forward_s)
