"""What a tuner is put on: a job whose time under any setting is known without noise, and what can be seen of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from sirtaki.autotune.knobs import KnobLattice, Knobs, KnobSpace
from sirtaki.autotune.model.fits import LinkProbe
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.comm.plan import GradientLayout, Route
from sirtaki.engine.tuning.probes import ENOUGH, SHAPES, narrowed, planning_model

Luck = Callable[[Knobs, float, np.random.Generator], float]
"""A factor on one measurement of a setting, for a given noise."""


def lognormal(knobs: Knobs, noise: float, rng: np.random.Generator) -> float:
    """The usual luck."""
    return math.exp(noise * rng.standard_normal())


def steady(iteration: int) -> float:
    """A network that stays as it is."""
    return 1.0


@dataclass(kw_only=True, eq=False)
class Landscape:
    """A job to tune.

    Attributes:
        family: what is hard about it.
        layout: gradients in the order of the backward pass.
        profile: when they are ready.
        space: what may be chosen.
        default: what runs untuned.
        truth: seconds that a setting takes, at the beginning.
        later: seconds that it takes from `changes_at` on; None = as at the beginning.
        changes_at: iteration.
        pace: factor on all settings at an iteration.
        luck: of a measurement.
        probe: seconds of a probe on the idle network: route, bytes, streams, rounds; None = it cannot be probed.
        seeds: what the registry proposes.
        presumed: probes show what a job will see, as far as anyone can tell beforehand; not within one host.
        steps_per_octave: of unit sizes, where the best is looked for.
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
        """Without noise; at the end unless an iteration is given."""
        changed = self.later is not None and (iteration is None or iteration >= self.changes_at)
        key = (knobs, changed)
        if key not in self._known:
            truth = self.later if changed and self.later is not None else self.truth
            self._known[key] = truth(knobs)
        return self._known[key] * self.pace(100 if iteration is None else iteration)

    def measure_s(self, knobs: Knobs, iteration: int, noise: float, rng: np.random.Generator) -> float:
        """With noise."""
        return self.span_s(knobs, iteration) * self.luck(knobs, noise, rng)

    @cached_property
    def best(self) -> Knobs:
        """The fastest uniform setting at the end: all of a lattice, then unit sizes around the five fastest."""
        lattice = KnobLattice(self.space, steps_per_octave=self.steps_per_octave)
        ranked = sorted(lattice.points, key=self.span_s)[:5]
        low, high = self.space.unit_bytes
        around = [
            replace(knobs, unit_bytes=min(max(round(knobs.unit_bytes * 2 ** (step / 16)), low), high))
            for knobs in ranked
            for step in range(-8, 9)
        ]
        return min([*ranked, *around], key=self.span_s)

    def regret(self, knobs: Knobs) -> float:
        """Share by which a setting is slower than the best; none for plans that are faster still."""
        return max(0.0, self.span_s(knobs) / self.span_s(self.best) - 1)

    def probed(self, noise: float, rng: np.random.Generator) -> tuple[KnobSpace, PlanningModel | None]:
        """What a warm-up would know from probes: the space without what they rule out, and the planners' model."""
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
        profile = self.profile
        model = planning_model(self.layout, profile.ready_s, profile.compute_s, probes, forward_s=profile.forward_s)
        return space, model
