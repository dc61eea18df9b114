"""Families of landscapes that contradict the tuner's own model, or the assumption of smoothness.

Each family draws its numbers from a seed. `OPEN` are the families for development, `HELD_BACK` those for the final
evaluation.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from bench.lib.workloads import workload
from sirtaki.autotune.knobs import KIB, MIB, Knobs, KnobSpace
from sirtaki.autotune.model.simulator import Profile
from sirtaki.comm.plan import Algorithm, GradientLayout, Route, TransportKind
from sirtaki.engine.tuning.plans import default_knobs
from sirtaki.measures import SMALLEST_UNIT_BYTES

from .landscape import Landscape, Message, Physics, replay, round_s

ROUTES = (
    (TransportKind.GLOO, Algorithm.FLAT),
    (TransportKind.MPI, Algorithm.FLAT),
    (TransportKind.GLOO, Algorithm.HIERARCHICAL),
)
NETWORKS = ("resnet50", "densenet201", "bert_base", "inception_v4")
SHARE = 0.25  # Scale of the gradients: full sizes (20 to 110 MB) would make thousands of messages per simulation.

_Rng = np.random.Generator


def _job(rng: _Rng) -> tuple[GradientLayout, Profile]:
    load = workload(NETWORKS[int(rng.integers(len(NETWORKS)))]).scaled(SHARE)
    return load.layout, load.profile(backward_s=float(rng.uniform(0.08, 0.4)))


def _space(layout: GradientLayout, routes: Sequence[Route] = ROUTES) -> KnobSpace:
    largest = 1 << (layout.total_bytes - 1).bit_length()
    return KnobSpace(routes=tuple(routes), unit_bytes=(SMALLEST_UNIT_BYTES, largest))


def _default(space: KnobSpace, layout: GradientLayout) -> Knobs:
    return default_knobs(space, total_bytes=layout.total_bytes, one_node=False)


# ── replayed ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _messages(knobs: Knobs, layout: GradientLayout, profile: Profile) -> list[Message]:
    offsets, issuable_s = layout.offsets, profile.issuable_s
    if knobs.cuts is None:
        step = max(1, knobs.unit_bytes // layout.itemsize_bytes)
        stops = [*range(step, layout.numel, step), layout.numel]
        streams = [index % knobs.streams for index in range(len(stops))]
    else:
        stops, streams = [cut.stop for cut in knobs.cuts], [cut.stream for cut in knobs.cuts]
    return [
        Message(issuable_s[bisect_left(offsets, stop) - 1], (stop - start) * layout.itemsize_bytes, stream)
        for (start, stop), stream in zip(pairwise([0, *stops]), streams, strict=True)
    ]


def _replayed(
    family: str,
    rng: _Rng,
    physics: Callable[[float], Mapping[Route, Physics]],
    *,
    idle: Callable[[float], Mapping[Route, Physics]] | None = None,
    later: Callable[[float], Mapping[Route, Physics]] | None = None,
    changes_at: int = 0,
) -> Landscape:
    """Return a landscape with given physics.

    Args:
        family: name of the family.
        rng: generator that draws the network and its gradients.
        physics: function from the link's rate (bytes per second) to the physics of each route.
        idle: physics of the idle network, which probes see; None = `physics`.
        later: physics from `changes_at` on; None = unchanged.
        changes_at: iteration.
    """
    layout, profile = _job(rng)
    pressure = float(rng.uniform(0.6, 1.8))  # Ratio of the communication time to the backward pass's time.
    seconds = pressure * profile.compute_s
    rate = layout.total_bytes / seconds
    now = physics(rate)
    space = _space(layout, tuple(now))
    probed = now if idle is None else idle(rate)

    def timed(by_route: Mapping[Route, Physics]) -> Callable[[Knobs], float]:
        def seconds(knobs: Knobs) -> float:
            messages = _messages(knobs, layout, profile)
            end_s, _ = replay(messages, compute_s=profile.compute_s, physics=by_route[knobs.route])
            return end_s - profile.ready_s[0]

        return seconds

    return Landscape(
        family=family,
        layout=layout,
        profile=profile,
        space=space,
        default=_default(space, layout),
        truth=timed(now),
        later=None if later is None else timed(later(rate)),
        changes_at=changes_at,
        probe=lambda route, size, streams, rounds: round_s(size, streams, rounds, probed[route]),
    )


def _filling(rate: float, flows: float, crowding: float = 0.0) -> Callable[[int, bool], float]:
    """Return the capacity of a link that `flows` flows fill. Each further flow costs the share `crowding`."""
    return lambda n, computing: rate * min(1.0, n / flows) / (1.0 + crowding * max(0.0, n - flows))


def _plain(rng: _Rng, rate: float) -> dict[Route, Physics]:
    """Return three routes: capped flows; faster start-up and wider flows; slower start-up and perhaps less traffic."""
    flows, alpha_s = float(rng.uniform(2, 6)), float(rng.uniform(0.1e-3, 1e-3))
    wide, saving = float(rng.uniform(0.7, 1.1)), float(rng.uniform(0.85, 1.2))
    return {
        ROUTES[0]: Physics(capacity=_filling(rate, flows, 0.03), latency_s=lambda size: alpha_s),
        ROUTES[1]: Physics(capacity=_filling(wide * rate, 1.5, 0.08), latency_s=lambda size: 0.4 * alpha_s),
        ROUTES[2]: Physics(capacity=_filling(saving * rate, flows, 0.05), latency_s=lambda size: 3 * alpha_s),
    }


def protocols(rng: _Rng) -> Landscape:
    """Make a job whose library has three protocols: for small messages, for medium ones (slow), and for large ones."""
    eager, large = float(rng.uniform(128, 400)) * KIB, float(rng.uniform(1.5, 5)) * MIB
    alpha_s, poor = float(rng.uniform(0.1e-3, 0.5e-3)), float(rng.uniform(0.3, 0.5))

    def one(rate: float, flows: float, shift: float) -> Physics:
        def latency_s(size: float) -> float:
            return alpha_s if size <= eager * shift else 6 * alpha_s if size <= large * shift else 3 * alpha_s

        def quality(size: float) -> float:
            return 0.7 if size <= eager * shift else poor if size <= large * shift else 1.0

        return Physics(capacity=_filling(rate, flows, 0.04), latency_s=latency_s, quality=quality)

    flows = float(rng.uniform(2, 5))
    return _replayed(
        "protocols",
        rng,
        lambda rate: {ROUTES[0]: one(rate, flows, 1.0), ROUTES[1]: one(0.9 * rate, flows, 2.5)},
    )


def collapse(rng: _Rng) -> Landscape:
    """Make a job in which a switch's buffer overflows with more than two or three streams, and the rate collapses."""
    most, flows = int(rng.integers(2, 4)), float(rng.uniform(1.5, 3))
    alpha_s, rest = float(rng.uniform(0.1e-3, 0.6e-3)), float(rng.uniform(0.2, 0.35))

    def physics(rate: float) -> dict[Route, Physics]:
        def capacity(n: int, computing: bool) -> float:
            return rate * min(1.0, n / flows) * (1.0 if n <= most else rest)

        return {
            ROUTES[0]: Physics(capacity=capacity, latency_s=lambda size: alpha_s),
            ROUTES[1]: Physics(capacity=_filling(0.6 * rate, 1.0, 0.02), latency_s=lambda size: alpha_s),
        }

    return _replayed("collapse", rng, physics)


def heavy_tail(rng: _Rng) -> Landscape:
    """Make a job in which every tenth iteration takes longer, twice as long on average."""
    scape = _replayed("heavy tail", rng, lambda rate: _plain(rng, rate))

    def luck(knobs: Knobs, noise: float, rng: _Rng) -> float:
        factor = math.exp(noise * rng.standard_t(3))
        return factor * (1.0 + rng.exponential(1.0)) if rng.random() < 0.1 else factor

    scape.luck = luck
    return scape


def halving(rng: _Rng) -> Landscape:
    """Make a job in which the link's rate halves during the warm-up, so that another setting becomes the best."""
    state = rng.bit_generator.state

    def drawn(rate: float) -> dict[Route, Physics]:
        again = np.random.default_rng()
        again.bit_generator.state = state
        return _plain(again, rate)

    changes_at = int(rng.integers(25, 55))
    return _replayed("halving", rng, drawn, later=lambda rate: drawn(rate / 2), changes_at=changes_at)


def misleading(rng: _Rng) -> Landscape:
    """Make a job with misleading probes: the idle link is fast with many streams, the busy one only with few."""
    alpha_s, flows = float(rng.uniform(0.3e-3, 1.5e-3)), float(rng.uniform(1, 2.5))
    crowding = float(rng.uniform(0.1, 0.3))

    def busy(rate: float) -> dict[Route, Physics]:
        return {
            ROUTES[0]: Physics(capacity=_filling(rate, flows, crowding), latency_s=lambda size: alpha_s),
            ROUTES[1]: Physics(capacity=_filling(1.3 * rate, flows, crowding), latency_s=lambda size: alpha_s / 2),
        }

    def idle(rate: float) -> dict[Route, Physics]:
        return {
            ROUTES[0]: Physics(capacity=_filling(4 * rate, 12.0), latency_s=lambda size: alpha_s / 8),
            ROUTES[1]: Physics(capacity=_filling(rate, 2.0), latency_s=lambda size: alpha_s * 2),
        }

    return _replayed("misleading probes", rng, busy, idle=idle)


def sockets(rng: _Rng) -> Landscape:
    """Make a job on two CPU sockets: odd numbers of streams are unbalanced, and more than six cross between sockets."""
    flows, odd = float(rng.uniform(2, 5)), float(rng.uniform(0.7, 0.85))
    alpha_s, crossing = float(rng.uniform(0.1e-3, 0.6e-3)), float(rng.uniform(0.05, 0.12))

    def physics(rate: float) -> dict[Route, Physics]:
        def capacity(n: int, computing: bool) -> float:
            return rate * min(1.0, n / flows) * (odd if n % 2 else 1.0) / (1 + crossing * max(0, n - 6))

        return {
            ROUTES[0]: Physics(capacity=capacity, latency_s=lambda size: alpha_s),
            ROUTES[2]: Physics(
                capacity=_filling(1.25 * rate, 1.0, crossing), latency_s=lambda size: 5 * alpha_s + size * 2e-11
            ),
        }

    return _replayed("sockets", rng, physics)


def two_bottlenecks(rng: _Rng) -> Landscape:
    """Make a job on hosts that serve one message at a time, with a link that needs many streams."""
    host_s, flows = float(rng.uniform(0.3e-3, 1.5e-3)), float(rng.uniform(4, 12))
    per_byte_s = float(rng.uniform(0.2, 0.5))

    def physics(rate: float) -> dict[Route, Physics]:
        def served_s(size: float) -> float:
            return host_s + per_byte_s * size / rate

        return {
            ROUTES[0]: Physics(capacity=_filling(rate, flows), latency_s=lambda size: host_s / 4, host_s=served_s),
            ROUTES[1]: Physics(capacity=_filling(0.7 * rate, 2.0, 0.05), latency_s=lambda size: host_s / 2),
        }

    return _replayed("two bottlenecks", rng, physics)


def beside_computation(rng: _Rng) -> Landscape:
    """Make a job in which one route competes with computation for the cores. Probes do not show this."""
    share, slow = float(rng.uniform(0.15, 0.4)), float(rng.uniform(0.06, 0.2))
    flows, alpha_s = float(rng.uniform(2, 5)), float(rng.uniform(0.1e-3, 0.5e-3))

    def physics(rate: float) -> dict[Route, Physics]:
        def capacity(n: int, computing: bool) -> float:
            return 1.6 * rate * min(1.0, n / flows) * (share if computing else 1.0)

        return {
            ROUTES[0]: Physics(capacity=capacity, latency_s=lambda size: alpha_s, slowdown=lambda n: 1 + slow * n),
            ROUTES[1]: Physics(
                capacity=_filling(rate, 2.0, 0.03), latency_s=lambda size: 2 * alpha_s, slowdown=lambda n: 1 + 0.02 * n
            ),
        }

    return _replayed("beside computation", rng, physics)


def uneven_noise(rng: _Rng) -> Landscape:
    """Make a job in which times with many streams scatter five times as much as with one."""
    scape = _replayed("uneven noise", rng, lambda rate: _plain(rng, rate))

    def luck(knobs: Knobs, noise: float, rng: _Rng) -> float:
        return math.exp(noise * (0.5 + 2.0 * math.log(knobs.streams) / math.log(24)) * rng.standard_normal())

    scape.luck = luck
    return scape


def drift(rng: _Rng) -> Landscape:
    """Make a job whose settings all slow down by a fifth to a half in the first hundred iterations."""
    scape = _replayed("drift", rng, lambda rate: _plain(rng, rate))
    total = float(rng.uniform(0.2, 0.5))
    scape.pace = lambda iteration: 1.0 + total * min(iteration, 100) / 100
    return scape


def wrong_proposals(rng: _Rng) -> Landscape:
    """Make a job for which the registry proposes slow settings."""
    scape = _replayed("wrong proposals", rng, lambda rate: _plain(rng, rate))
    points = [
        Knobs(unit_bytes=scape.space.unit_bytes[0], streams=24, transport=ROUTES[1][0]),
        Knobs(unit_bytes=scape.space.unit_bytes[1], streams=1, transport=ROUTES[0][0]),
        Knobs(unit_bytes=96 * KIB, streams=2, transport=ROUTES[2][0], algorithm=ROUTES[2][1]),
    ]
    scape.seeds = tuple(points)
    return scape


# ── formulas ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _place(knobs: Knobs, layout: GradientLayout) -> tuple[float, float]:
    """Return log2 of the unit size over 64 KiB, and log2 of the number of streams.

    A plan with explicit cuts counts by the mean unit size (weighted by size) and its number of streams.
    """
    size, streams = float(knobs.unit_bytes), knobs.streams
    if knobs.cuts is not None:
        bounds = [0, *(cut.stop for cut in knobs.cuts)]
        sizes = [(stop - start) * layout.itemsize_bytes for start, stop in pairwise(bounds)]
        size = sum(one * one for one in sizes) / max(1, sum(sizes))
        streams = len({cut.stream for cut in knobs.cuts})
    return math.log2(max(1.0, size / (64 * KIB))), math.log2(streams)


# Function of (log2 of the unit size, log2 of the streams, route) that returns the time as a multiple of the best time.
_Shape = Callable[[float, float, int], float]


def _formula(family: str, rng: _Rng, shape: _Shape, routes: Sequence[Route] = ROUTES) -> Landscape:
    """Return a landscape given by a formula. Probes see an unrelated plain network."""
    layout, profile = _job(rng)
    space = _space(layout, routes)
    best_s = profile.compute_s * float(rng.uniform(1.0, 2.0))

    def truth(knobs: Knobs) -> float:
        size, streams = _place(knobs, layout)
        return best_s * shape(size, streams, space.routes.index(knobs.route))

    probed = _plain(rng, layout.total_bytes / best_s)
    return Landscape(
        family=family,
        layout=layout,
        profile=profile,
        space=space,
        default=_default(space, layout),
        truth=truth,
        probe=lambda route, size, streams, rounds: round_s(size, streams, rounds, probed[route]),
        steps_per_octave=8,
    )


def default_is_best(rng: _Rng) -> Landscape:
    """Make a job whose untuned setting is the best: a bowl around it."""
    width, tilt = float(rng.uniform(0.03, 0.08)), float(rng.uniform(0.05, 0.15))
    scape = _formula("default is best", rng, lambda size, streams, route: 1.0)
    size_0, streams_0 = _place(scape.default, scape.layout)
    best_s = scape.truth(scape.default)

    def truth(knobs: Knobs) -> float:
        size, streams = _place(knobs, scape.layout)
        route = scape.space.routes.index(knobs.route)
        return best_s * (1 + width * (size - size_0) ** 2 + tilt * abs(streams - streams_0) + 0.08 * route)

    scape.truth = truth
    return scape


def narrow(rng: _Rng) -> Landscape:
    """Make a job with a wide bowl and a narrow hollow off its centre, between the points of a coarse grid."""
    size_0, streams_0 = float(rng.uniform(2.2, 6.3)), math.log2(float(rng.choice([2, 3, 4, 6, 8])))
    depth, width = float(rng.uniform(0.15, 0.25)), float(rng.uniform(0.5, 0.8))
    best_route = int(rng.integers(2))

    def shape(size: float, streams: float, route: int) -> float:
        far = (size - size_0 - 0.7) ** 2 + 1.5 * (streams - streams_0 + 0.4) ** 2
        near = ((size - size_0) / width) ** 2 + ((streams - streams_0) / width) ** 2
        return (1 + 0.05 * far - depth * math.exp(-near) * (route == best_route)) * (1 + 0.12 * (route != best_route))

    return _formula("narrow hollow", rng, shape)


def diagonal(rng: _Rng) -> Landscape:
    """Make a job with a narrow valley along size × streams = constant, lowest between the arms' settings."""
    product, size_0 = float(rng.uniform(5.0, 8.0)), float(rng.uniform(2.5, 5.0))
    steep, slope = float(rng.uniform(0.12, 0.3)), float(rng.uniform(0.02, 0.05))

    def shape(size: float, streams: float, route: int) -> float:
        across, along = size + streams - product, size - size_0
        return 1 + steep * min(abs(across), 3.0) + slope * along * along + 0.1 * route

    return _formula("diagonal valley", rng, shape)


def cliff(rng: _Rng) -> Landscape:
    """Make a job in which larger units are faster, up to an edge beyond which they take 1.4 to 2 times as long."""
    edge, fall = float(rng.uniform(3.5, 6.5)), float(rng.uniform(1.4, 2.0))
    gain, streams_0 = float(rng.uniform(0.06, 0.12)), float(rng.uniform(0.8, 3.0))

    def shape(size: float, streams: float, route: int) -> float:
        climb = 1 + gain * abs(edge - size) + 0.05 * (streams - streams_0) ** 2
        return climb * (fall if size > edge else 1.0) * (1.0, 1.15, 0.97)[route]

    return _formula("cliff", rng, shape)


def steps(rng: _Rng) -> Landscape:
    """Make a job whose times change in steps, and whose best route is fast with small units only."""
    level, streams_0 = float(rng.uniform(0.05, 0.09)), float(rng.uniform(1.0, 3.5))
    size_0 = (float(rng.uniform(4, 6)), float(rng.uniform(0.8, 2.2)), float(rng.uniform(3, 6)))
    base = (1.2, 1.0, 1.15)

    def shape(size: float, streams: float, route: int) -> float:
        far = math.floor(1.5 * abs(size - size_0[route])) + math.floor(1.2 * abs(streams - streams_0))
        return base[route] * (1 + level * far)

    return _formula("steps", rng, shape)


def flat(rng: _Rng) -> Landscape:
    """Make a job in which nearly all settings take equally long, so that trials gain nothing and can lose much."""
    bad = float(rng.uniform(1.5, 2.5))

    def shape(size: float, streams: float, route: int) -> float:
        return (1.0 + 0.003 * abs(size - 4)) * (bad if size < 1 or streams > 4 else 1.0)

    return _formula("flat", rng, shape)


Family = Callable[[_Rng], Landscape]

OPEN: tuple[Family, ...] = (
    protocols,
    collapse,
    heavy_tail,
    halving,
    default_is_best,
    misleading,
    narrow,
    diagonal,
)
HELD_BACK: tuple[Family, ...] = (
    sockets,
    two_bottlenecks,
    beside_computation,
    uneven_noise,
    drift,
    wrong_proposals,
    cliff,
    steps,
    flat,
)
