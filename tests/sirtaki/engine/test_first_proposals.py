"""What a job tries first, of what similar jobs have found: the registry proposes, the job's own model may object."""

import logging
from dataclasses import replace

import pytest
from conformance.graphs import chain_graph

from sirtaki.autotune.arms.planners import make_planners
from sirtaki.autotune.knobs import KIB, MIB, Cut, Knobs, KnobSpace
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.engine.tuning.cache import first_proposals
from sirtaki.measures import LinkModel
from sirtaki.registry.entry import Entry, make_key
from sirtaki.registry.topology import Topology
from sirtaki.registry.warm_start import WarmStart

ROUTE = (TransportKind.GLOO, Algorithm.FLAT)
SPACE = KnobSpace(routes=(ROUTE,), unit_bytes=(64 * KIB, 64 * MIB), streams=(1, 2, 4, 8))
LAYOUT = GradientLayout(sizes=(256 * KIB,) * 20)
MODEL = PlanningModel(
    layout=LAYOUT,
    profile=Profile.from_durations([1e-3] * 20),
    links={ROUTE: LinkModel(alpha_s=1e-3, throughput=(1e9, 2e9, 3e9, 4e9))},
)
GOOD = Knobs(unit_bytes=MIB, streams=4, transport=ROUTE[0])
POOR = Knobs(unit_bytes=64 * KIB, streams=1, transport=ROUTE[0])


def start(knobs: Knobs, *, arm: str = "grid", lost_cuts: bool = False, name: str = "a job like this") -> WarmStart:
    graph, topology = chain_graph([10]), Topology.from_ranks(["host"] * 2)
    entry = Entry(
        key=make_key(graph, topology, dtype="float32", device="cpu"),
        model=graph,
        topology=topology,
        knobs=knobs.to_json(),
        best_span_s=0.5,
        default_span_s=1.0,
        arm=arm,
    )
    return WarmStart(
        knobs=knobs.to_json(),
        distance=0.1,
        source=f"starting from {name}",
        changes=("scaled",),
        lost_cuts=lost_cuts,
        entry=entry,
    )


def best_plan() -> Knobs:
    planner = make_planners(space=SPACE, model=MODEL)[0]
    return planner.ask()[0].knobs


def test_without_a_model_the_nearest_jobs_settings_come_first_and_each_once() -> None:
    other = replace(GOOD, streams=2)
    found = first_proposals(
        [start(POOR), start(GOOD), start(POOR), start(other)], layouts=[LAYOUT], space=SPACE, model=None
    )
    assert [proposal.knobs for proposal in found] == [POOR, GOOD, other]
    assert found[0].message == "starting from a job like this; scaled"


def test_what_the_model_expects_to_be_slow_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    plan = best_plan()
    with caplog.at_level(logging.INFO):
        found = first_proposals(
            [start(POOR, name="Poor"), start(plan, name="Good")], layouts=[LAYOUT], space=SPACE, model=MODEL
        )
    assert [proposal.knobs for proposal in found] == [plan]
    assert "not tried, as" in caplog.text
    assert "starting from Poor" in caplog.text


def test_settings_alone_are_measured_against_the_plan_that_would_be_tried_next() -> None:
    assert first_proposals([start(POOR)], layouts=[LAYOUT], space=SPACE, model=MODEL) == []


def test_a_link_that_is_known_badly_leaves_nothing_out() -> None:
    vague = replace(MODEL, links={ROUTE: replace(MODEL.links[ROUTE], residual=50.0)})
    assert [
        proposal.knobs for proposal in first_proposals([start(POOR)], layouts=[LAYOUT], space=SPACE, model=vague)
    ] == [POOR]


def test_a_route_that_was_not_measured_cannot_be_judged() -> None:
    unknown = replace(POOR, transport=TransportKind.MPI)
    assert [
        proposal.knobs for proposal in first_proposals([start(unknown)], layouts=[LAYOUT], space=SPACE, model=MODEL)
    ] == [unknown]


def test_a_planner_whose_units_do_not_fit_plans_anew() -> None:
    (planner, *_) = make_planners(space=SPACE, model=MODEL)
    found = first_proposals([start(POOR, arm=planner.name, lost_cuts=True)], layouts=[LAYOUT], space=SPACE, model=MODEL)
    assert [(proposal.knobs, proposal.arm) for proposal in found] == [(best_plan(), planner.name)]
    assert f"planned anew by {planner.name}" in found[0].message
    assert "scaled" not in found[0].message  # what was scaled is not what is tried


def test_units_that_fit_are_taken_as_they_are() -> None:
    cuts = tuple(Cut(stop=stop, stream=stop // (MIB) % 4) for stop in range(MIB, LAYOUT.numel + 1, MIB))
    planned = replace(GOOD, cuts=cuts)
    found = first_proposals([start(planned, arm="libra")], layouts=[LAYOUT], space=SPACE, model=None)
    assert [proposal.knobs for proposal in found] == [planned]


def test_two_jobs_of_one_planner_have_it_plan_once() -> None:
    starts = [start(POOR, arm="asc_wfbp_n", lost_cuts=True), start(GOOD, arm="asc_wfbp_n", lost_cuts=True)]
    assert len(first_proposals(starts, layouts=[LAYOUT], space=SPACE, model=MODEL)) == 1


def test_an_entry_with_knobs_that_are_none_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    broken = replace(start(GOOD), knobs={**GOOD.to_json(), "transport": "pigeon"})
    assert first_proposals([broken], layouts=[LAYOUT], space=SPACE, model=None) == []
    assert "is left alone" in caplog.text
