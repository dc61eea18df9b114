"""The space of a search: it follows from the router, the user's settings, and probes."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import RunRanks
from fakes.groups import LoneGroup, LoneOpener

from sirtaki.autotune.knobs import KIB, MIB, KnobSpace, NcclWays
from sirtaki.autotune.model.fits import ContentionModel, RateCurve
from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.device import Device, Event
from sirtaki.comm.nccl_streams.transport import CommunicatorKey, Group
from sirtaki.comm.plan import Algorithm, NcclWay, Route, TransportKind
from sirtaki.comm.router import Router
from sirtaki.engine.settings import Settings
from sirtaki.engine.tuning.plans import (
    LEAST_LARGE_BYTES,
    NEEDED_FIRST,
    PASSES,
    SHAPES,
    SMALL_BYTES,
    SOUNDING_BYTES,
    STREAM_BYTES,
    UNIT_BYTES,
    WAY_BYTES,
    Measured,
    ProbeBudget,
    ProbeSize,
    ThreadProbe,
    contention_model,
    knob_space,
    probe_ways,
    promising_ways,
    threads_matter,
    without_planners,
)
from sirtaki.errors import PlanError


def shapes_of(output: str) -> list[list[tuple[int, ...]]]:
    """Return bytes, streams and rounds of each rank's probes."""
    lines = sorted(output.splitlines())
    return [[tuple(map(int, probe.split("x"))) for probe in line.split()[1:]] for line in lines]


def test_ranks_with_different_budgets_take_the_same_probes(run_ranks: RunRanks) -> None:
    stingy, generous = shapes_of(run_ranks("probes.py", 2, 0.0, 100.0).stdout)
    assert stingy == generous
    least = [(min(unit_bytes, LEAST_LARGE_BYTES), streams) for unit_bytes, streams in SHAPES[:NEEDED_FIRST]]
    assert [probe[:2] for probe in stingy] == least


def test_every_stream_carries_as_much_in_every_probe(run_ranks: RunRanks) -> None:
    probes, _ = shapes_of(run_ranks("probes.py", 2, 100.0, 100.0).stdout)
    assert {probe[:2] for probe in probes} == {shape for shape in SHAPES if shape[1] <= 4}
    assert {unit_bytes * rounds for unit_bytes, _, rounds in probes} == {PASSES * STREAM_BYTES}


class Link:
    """Takes as long as it takes: streams share the link, and none gets more than a flow may have."""

    def __init__(self, *, alpha_s: float, link_bytes_per_s: float, flow_bytes_per_s: float) -> None:
        self.alpha_s, self._link, self._flow = alpha_s, link_bytes_per_s, flow_bytes_per_s

    def round_s(self, unit_bytes: int, streams: int) -> float:
        return self.alpha_s + unit_bytes / min(self._flow, self._link / streams)

    def probed(self, budget_s: float) -> tuple[list[tuple[ProbeSize, int]], float]:
        """Probes of one route, and what they take in all."""
        small, large = SOUNDING_BYTES
        budget = ProbeBudget((self.round_s(small, 1), self.round_s(large, 1)))
        spent_s = (1 + PASSES) * (self.round_s(small, 1) + self.round_s(large, 1))
        taken = []
        for number, (unit_bytes, streams) in enumerate(SHAPES):
            needed_more = max(0, NEEDED_FIRST - number)
            size = budget.size(unit_bytes, streams, left_s=budget_s - spent_s, needed_more=needed_more)
            if size is not None and (size, streams) not in taken:
                round_s = self.round_s(size.unit_bytes, streams)
                spent_s += (1 + PASSES) * size.rounds * round_s
                budget.learn(streams=streams, unit_bytes=size.unit_bytes, round_s=round_s)
                taken.append((size, streams))
        return taken, spent_s


def test_where_the_link_is_fast_every_stream_carries_all() -> None:
    taken, _ = Link(alpha_s=1e-4, link_bytes_per_s=1e9, flow_bytes_per_s=1e9).probed(1.0)
    assert [(size.unit_bytes, streams) for size, streams in taken] == list(SHAPES)
    assert {size.unit_bytes * size.rounds for size, _ in taken} == {STREAM_BYTES}


@pytest.mark.parametrize("budget_s", [1.0, 2.0, 5.0])
@pytest.mark.parametrize(
    "link",
    [
        Link(alpha_s=1e-3, link_bytes_per_s=8e6, flow_bytes_per_s=8e6),
        Link(alpha_s=1e-3, link_bytes_per_s=3e7, flow_bytes_per_s=2e6),
        Link(alpha_s=0.03, link_bytes_per_s=3e7, flow_bytes_per_s=8e6),
        Link(alpha_s=0.03, link_bytes_per_s=1e9, flow_bytes_per_s=1e9),
    ],
)
def test_a_slow_link_is_probed_within_the_budget_in_two_sizes_and_on_several_streams(
    link: Link, budget_s: float
) -> None:
    taken, spent_s = link.probed(budget_s)
    assert spent_s <= budget_s
    assert len({size.unit_bytes for size, streams in taken if streams == 1}) > 1
    assert any(streams > 1 for _, streams in taken)


def test_many_streams_are_probed_where_each_flow_is_capped() -> None:
    taken, _ = Link(alpha_s=1e-3, link_bytes_per_s=3e7, flow_bytes_per_s=8e5).probed(3.5)
    assert 16 in {streams for _, streams in taken}


def test_a_late_warm_up_still_takes_the_fewest_probes_that_suffice() -> None:
    budget = ProbeBudget((1.0, 20.0))
    assert budget.size(SMALL_BYTES, 1, left_s=-1.0, needed_more=3) == ProbeSize(unit_bytes=SMALL_BYTES, rounds=1)
    assert budget.size(MIB, 4, left_s=-1.0, needed_more=1) == ProbeSize(unit_bytes=LEAST_LARGE_BYTES, rounds=1)
    assert budget.size(MIB, 4, left_s=-1.0, needed_more=0) is None


TRUTH = ContentionModel(
    alpha_1=0.98,
    alpha_2=5e-5,
    overlapped=RateCurve(gamma_1=8e10, gamma_2=7e10, gamma_3=0.01),
    alone=RateCurve(gamma_1=1e11, gamma_2=8e10, gamma_3=0.02),
)


ALPHA_S, COMPUTE_S = 2e-5, 8e-3


def probes(noise: float, *, matter: bool = True, nccls_own: int = 512) -> list[ThreadProbe]:
    rng = np.random.default_rng(3)
    found = []
    for count in (None, 512, 1024, 2048, 4096, 8192):
        seen = (count or nccls_own) if matter else 512
        for unit_bytes in UNIT_BYTES:
            exact = {
                "alone_s": ALPHA_S + TRUTH.alone.seconds(unit_bytes, seen),
                "beside_s": ALPHA_S + TRUTH.overlapped.seconds(unit_bytes, seen),
                "compute_s": COMPUTE_S / TRUTH.compute_speed(seen),
                "undisturbed_s": COMPUTE_S,
            }
            noisy = {
                name: tuple((value * (1 + noise * rng.standard_normal(3))).tolist()) for name, value in exact.items()
            }
            found.append(ThreadProbe(threads=count, unit_bytes=unit_bytes, **noisy))
    return found


def test_threads_matter_where_their_effect_exceeds_the_noise() -> None:
    assert threads_matter(probes(0.01))
    assert not threads_matter(probes(0.01, matter=False))
    assert not threads_matter(probes(0.6))


def test_libras_model_is_fitted_to_the_probes() -> None:
    model = contention_model(probes(0.002), alpha_s=ALPHA_S)
    assert model is not None
    for threads in (512, 2048, 8192):
        assert abs(model.compute_speed(threads) / TRUTH.compute_speed(threads) - 1) < 0.05
        for ours, true in ((model.alone, TRUTH.alone), (model.overlapped, TRUTH.overlapped)):
            assert abs(ours.bytes_per_s(threads) / true.bytes_per_s(threads) - 1) < 0.1


def test_nccls_own_choice_counts_as_the_allowance_that_it_resembles() -> None:
    for threads in (512, 4096, 8192):
        model = contention_model(probes(0.002, nccls_own=threads), alpha_s=ALPHA_S)
        assert model is not None
        assert model.default_threads == threads


def test_probes_that_fit_nothing_give_no_model() -> None:
    assert contention_model(probes(0.9), alpha_s=ALPHA_S) is None


GLOO, MPI, SHARED = (
    (kind, Algorithm.FLAT) for kind in (TransportKind.GLOO, TransportKind.MPI, TransportKind.SHARED_MEMORY)
)


def test_routes_that_were_not_probed_again_may_be_chosen_and_only_some_of_them_promise_something() -> None:
    probed = KnobSpace(routes=(GLOO,))
    found = Measured(space=probed, promising=probed).with_routes([SHARED, GLOO, MPI], promising=[SHARED, GLOO])
    assert found.space.routes == (SHARED, GLOO, MPI)
    assert found.promising.routes == (SHARED, GLOO)


def test_without_probes_threads_are_not_tuned() -> None:
    found = without_planners(KnobSpace(routes=(GLOO,), threads=(None, 512)))
    assert found.space.threads == found.promising.threads == (None,)
    assert found.links == {}
    assert found.model([], [], 0.0, 0.0) is None  # type: ignore[arg-type]


ROUTE = (TransportKind.NCCL, Algorithm.FLAT)


TREE = (TransportKind.NCCL, Algorithm.HIERARCHICAL)


class NcclRouter:
    """A router over NCCL, as far as a knob space asks for it."""

    def __init__(self, streams: int, *, on_tree: int = 0) -> None:
        self._limits = {ROUTE: streams, **({TREE: on_tree} if on_tree else {})}
        self.routes = tuple(self._limits)

    def max_streams(self, routes: Sequence[Route] | None = None, *, fixed: bool = False) -> int:
        return min(self._limits[route] for route in routes or self.routes)

    def why_not_more(self, routes: Sequence[Route]) -> str:
        return "as is"

    def threads(self) -> tuple[int, ...]:
        return 512, 1024

    @property
    def nccl_ways(self) -> tuple[NcclWay, ...]:
        return tuple(NcclWay)


@pytest.mark.parametrize(("streams", "offered"), [(24, (None, 512, 1024)), (1, (None,))])
def test_several_allowances_are_offered_where_their_communicators_may_overlap(
    streams: int, offered: tuple[int | None, ...]
) -> None:
    space = knob_space(NcclRouter(streams), Settings.from_environ({}), 64 * MIB)  # type: ignore[arg-type]
    assert space.threads == offered
    assert bool(space.nccl) == (streams > 1)
    assert space.streams[-1] == streams


def test_nccl_settings_are_tried_if_they_were_clearly_faster_in_probes() -> None:
    space = knob_space(NcclRouter(24), Settings.from_environ({}), 64 * MIB)  # type: ignore[arg-type]
    sizes = [size for of_class in WAY_BYTES for size in of_class]
    probed = {(way, size): 1.0 for way in (None, *NcclWay) for size in sizes}
    assert promising_ways(space.nccl, probed) == ()
    probed[NcclWay.RING_SIMPLE, WAY_BYTES[1][1]] = 0.7
    probed[NcclWay.RING_LL, WAY_BYTES[0][0]] = 0.6
    probed[NcclWay.TREE_SIMPLE, WAY_BYTES[1][0]] = 0.98
    for size in sizes:
        del probed[NcclWay.TREE_LL128, size]  # which NCCL has refused
    small, large = NcclWays(small=NcclWay.RING_LL), NcclWays(large=NcclWay.RING_SIMPLE)
    assert promising_ways(space.nccl, probed) == (small, large)
    assert promising_ways(space.nccl, {}) == ()
    assert without_planners(space).space.nccl == ()


class Clock(Device):
    """Shows the seconds that all-reduces have taken by themselves."""

    now_s = 0.0

    def record_event(self, *, timed: bool = False) -> Event:
        return self.now_s


class TimedGroup(LoneGroup):
    """Takes a while for a size, by its way."""

    def __init__(self, clock: Clock, way: NcclWay | None) -> None:
        super().__init__(multiplies=True)
        self._clock, self._way = clock, way

    def all_reduce_scaled(self, tensor: torch.Tensor, scale: float) -> bool:
        fast = self._way is NcclWay.RING_SIMPLE and 4 * tensor.numel() >= MIB
        self._clock.now_s += 1.0 if fast else 2.0
        return super().all_reduce_scaled(tensor, scale)


class TimedOpener(LoneOpener):
    """Does not have one of the ways."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def open(self, key: CommunicatorKey) -> Group:
        if key.way is NcclWay.TREE_LL128:
            raise PlanError("no such way")
        return TimedGroup(self._clock, key.way)


def test_ways_of_nccl_are_probed_on_communicators_of_their_own() -> None:
    control: Any = SimpleNamespace(
        rank=0,
        size=2,
        local_size=1,
        local_rank=0,
        local_sizes=[1, 1],
        one_node=False,
        is_homogeneous=True,
        failures=FailureBoard(),
        barrier=lambda: None,
        minimum=lambda values: values,
        maximum=lambda values: values,
        agree_on_success=lambda problem: None,
        broadcast=lambda value: value,
    )
    clock = Clock()
    router = Router(control, timeout_s=10.0, device=clock, nccl=TimedOpener(clock))
    probed = probe_ways(control, router, ROUTE, largest_bytes=4 * MIB)
    assert {size for _, size in probed} == {64 * KIB, 512 * KIB, 4 * MIB}
    assert {way for way, _ in probed} == {None, *NcclWay} - {NcclWay.TREE_LL128}
    assert (probed[None, 4 * MIB], probed[NcclWay.RING_SIMPLE, 4 * MIB]) == (2.0, 1.0)
    ways = knob_space(router, Settings.from_environ({}), 64 * MIB).nccl
    assert promising_ways(ways, probed) == (NcclWays(large=NcclWay.RING_SIMPLE),)


def test_a_route_that_opens_fewer_streams_than_another_is_offered_with_as_many_as_it_opens() -> None:
    space = knob_space(NcclRouter(24, on_tree=8), Settings.from_environ({}), 64 * MIB)  # type: ignore[arg-type]
    assert space.streams_on(ROUTE)[-1] == 24
    assert space.streams_on(TREE)[-1] == 8
    assert space.routes == (ROUTE, TREE)


@pytest.mark.parametrize(("streams", "routes"), [("8", (ROUTE, TREE)), ("12", (ROUTE,))])
def test_routes_that_do_not_open_as_many_streams_as_the_user_asks_for_are_left_out(
    streams: str, routes: tuple[Route, ...]
) -> None:
    settings = Settings.from_environ({"SIRTAKI_STREAMS": streams})
    assert knob_space(NcclRouter(24, on_tree=8), settings, 64 * MIB).routes == routes  # type: ignore[arg-type]
