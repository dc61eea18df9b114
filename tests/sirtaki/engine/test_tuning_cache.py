"""Settings of earlier jobs, of this job and of similar ones, are looked up, proposed and kept."""

import logging
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conformance.graphs import chain_graph

from sirtaki.autotune.arms.planners import make_planners
from sirtaki.autotune.knobs import KIB, MIB, Cut, Knobs, KnobSpace
from sirtaki.autotune.meta.session import Remembered, SessionResult
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.autotune.trial import Trial
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.engine.settings import Settings
from sirtaki.engine.tuning import cache
from sirtaki.engine.tuning import memory as settings_memory
from sirtaki.engine.tuning.cache import (
    OTHER_TIMES,
    OTHER_TIMES_ON_ONE_HOST,
    Hardware,
    TuningCache,
    condition_of,
    first_proposals,
)
from sirtaki.measures import Gain, LinkModel
from sirtaki.registry.cluster import Topology
from sirtaki.registry.opening import open_store
from sirtaki.registry.schema import JobRecord, Provenance, local_time, make_key
from sirtaki.registry.warm_start import WarmStart

ROUTE = (TransportKind.GLOO, Algorithm.FLAT)


SPACE = KnobSpace(routes=(ROUTE,), unit_bytes=(64 * KIB, 64 * MIB), streams=(1, 2, 4, 8))


LINK = LinkModel(alpha_s=1e-3, throughput=(1e9, 2e9, 3e9, 3e9))


KNOBS = Knobs(unit_bytes=MIB, streams=4, transport=ROUTE[0])


WINNER = SessionResult(
    knobs=KNOBS,
    default_span_s=1.0,
    best_span_s=0.5,
    noise_s=0.01,
    arm="grid",
    n_trials=3,
    iterations_used=30,
    reason="because",
    tuned=True,
    gain=Gain(times=2.0, low=1.9, high=2.1),
)


TRIALS = [Trial(arm="grid", knobs=KNOBS, iterations=2, span_s=0.5)] * 3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.db"


def layout_of(model: torch.nn.Module) -> GradientLayout:
    return GradientLayout(sizes=tuple(parameter.numel() for parameter in reversed(list(model.parameters()))))


def job(path: Path, *, layers: int = 6, ranks: int = 2) -> tuple[TuningCache, GradientLayout]:
    """Return the cache of a job with a perceptron, after one forward pass."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers)))
    hosts = [f"host{rank}" for rank in range(ranks)]
    memory = TuningCache(Settings.from_environ({"SIRTAKI_REGISTRY": str(path)}), list(model.parameters()), hosts)
    model(torch.randn(2, 8))
    return memory, layout_of(model)


def keep_winner(path: Path, *, complete: bool = True) -> tuple[TuningCache, GradientLayout]:
    """Return the cache of a job that has stored its result."""
    memory, layout = job(path)
    memory.look_up([layout], SPACE)
    assert memory.keep(WINNER, TRIALS, complete=complete, links={ROUTE: LINK})
    return memory, layout


def only_entry(path: Path) -> JobRecord:
    store = open_store(str(path))
    (entry,) = store.all(JobRecord)
    return entry


def planning_model(layout: GradientLayout, link: LinkModel) -> PlanningModel:
    profile = Profile.from_durations([1e-3] * len(layout.sizes))
    return PlanningModel(layout=layout, profile=profile, links={ROUTE: link})


def test_hosts_and_devices_are_distinguished_by_their_kind(path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    settings = Settings.from_environ({"SIRTAKI_REGISTRY": str(path)})
    for name in ("small", "large"):
        kinds = [Hardware(host=name, device="cpu")] * 2
        memory = TuningCache(settings, list(model.parameters()), ["a", "b"], kinds)
        model(torch.randn(1, 4))
        assert memory.look_up([layout_of(model)], SPACE).exact is None
        assert memory.keep(WINNER, TRIALS, complete=True, links={})
    store = open_store(str(path))
    assert sorted(entry.provenance.host_kinds for entry in store.all(JobRecord)) == [("large",), ("small",)]


def test_the_same_job_starts_tuned_and_its_check_forgets_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_winner(path)
    first = only_entry(path)
    again, layout = job(path)
    found = again.look_up([layout], SPACE)
    assert found.exact is not None
    assert found.exact.knobs == KNOBS
    assert f"in the registry {path} (entry {first.id[:8]}, stored {local_time(first.created_s)})" in found.message
    assert again.first_proposals([layout], SPACE, None) == []
    checked = replace(WINNER, arm="registry", n_trials=2)
    monkeypatch.setattr(cache, "RENEWED_AFTER_S", 0.0)
    told = again.keep(checked, [*found.history, *TRIALS[:2]], complete=True, links={})
    assert told == f"stored in the registry {path} (entry {first.id[:8]})"
    second = only_entry(path)
    assert len(second.trials) == 5
    assert second.id == first.id
    assert (second.arm, second.n_trials, second.link) == ("grid", 5, first.link)


def test_a_check_of_a_recent_entry_stores_nothing_unless_it_learned_something(path: Path) -> None:
    keep_winner(path)
    again, layout = job(path)
    found = again.look_up([layout], SPACE)
    checked, trials = replace(WINNER, arm="registry", n_trials=2), [*found.history, *TRIALS[:2]]
    assert again.keep(checked, trials, complete=True, links={}) == ""
    assert len(only_entry(path).trials) == 3
    other = replace(TRIALS[0], knobs=KNOBS.but(streams=8))
    assert again.keep(checked, [*trials, other], complete=True, links={})
    assert len(only_entry(path).trials) == 6
    again.disprove()
    assert again.keep(checked, trials, complete=True, links={})
    assert len(only_entry(path).trials) == 5


def test_sqlalchemy_is_loaded_ahead_unless_a_recent_entry_is_all_that_the_job_needs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(settings_memory, "load_ahead", loaded.append)

    def look_up(layers: int) -> int:
        again, layout = job(path, layers=layers)
        before = len(loaded)
        again.look_up([layout], SPACE)
        return len(loaded) - before

    keep_winner(path)
    assert (look_up(6), look_up(7)) == (0, 1)
    monkeypatch.setattr(cache, "RENEWED_AFTER_S", 0.0)
    assert look_up(6) == 1


@pytest.mark.parametrize(("times", "condition"), [(4.0, "0.25×"), (0.5, "2×"), (1.1, None)])
def test_a_setting_found_on_another_link_is_stored_separately(path: Path, times: float, condition: str | None) -> None:
    keep_winner(path)
    again, layout = job(path)
    again.look_up([layout], SPACE)
    again.disprove()
    other = replace(
        WINNER, knobs=KNOBS.but(streams=8), best_span_s=0.4 * times, default_span_s=WINNER.default_span_s * times
    )
    assert again.keep(other, TRIALS, complete=True, links={})
    found = {entry.key.condition: entry.knobs.streams for entry in open_store(str(path)).all(JobRecord)}
    assert found == {"": 8, **({condition: 4} if condition else {})}


def test_an_entry_tells_the_gain_that_its_job_proved_and_more_is_forgiven_within_one_host(path: Path) -> None:
    keep_winner(path)
    again, layout = job(path)
    found = again.look_up([layout], SPACE)
    assert found.exact == Remembered(
        knobs=KNOBS, best_s=0.5, default_s=1.0, noise=0.02, other_times=OTHER_TIMES, gain=WINNER.gain
    )
    assert "2.00× faster, ± 0.10" in found.message
    assert OTHER_TIMES < OTHER_TIMES_ON_ONE_HOST


def test_if_the_user_fixes_a_knob_the_jobs_own_entry_becomes_a_proposal(path: Path) -> None:
    keep_winner(path)
    again, layout = job(path)
    narrow = replace(SPACE, streams=(2,))
    assert again.look_up([layout], narrow).exact is None
    (proposal,) = again.first_proposals([layout], narrow, None)
    assert proposal.knobs == KNOBS.but(streams=2)
    assert "an earlier job's setting" in proposal.message
    assert "streams 2 instead of 4" in proposal.message


def test_a_similar_job_gets_proposals_scaled_to_the_link_that_it_has_measured(path: Path) -> None:
    keep_winner(path)
    deeper, layout = job(path, layers=7, ranks=4)
    hit = deeper.look_up([layout], SPACE)
    assert (hit.exact, hit.history) == (None, ())
    slow = replace(LINK, alpha_s=16e-3, residual=100.0)  # so vague a fit that it leaves nothing out
    (proposal,) = deeper.first_proposals([layout], SPACE, planning_model(layout, slow))
    entry = only_entry(path)
    assert f"entry {entry.id[:8]}, stored " in proposal.message
    assert f"(registry {path})" in proposal.message
    assert proposal.message.startswith(
        "Sequential on 4 ranks on 4 hosts: starting from a similar job's setting (Sequential on 2 ranks on 2 hosts"
    )
    assert "its latency × 16" in proposal.message
    assert proposal.knobs.unit_bytes > 3 * MIB
    assert proposal.arm == "grid"


def test_the_technique_that_travelled_is_named_when_its_setting_wins_again(path: Path) -> None:
    memory, layout = job(path)
    memory.look_up([layout], SPACE)
    cuts = tuple(Cut(stop=stop) for stop in (layout.numel // 2, layout.numel))
    planned = replace(WINNER, knobs=KNOBS.but(cuts=cuts), arm="libra")
    memory.keep(planned, TRIALS, complete=True, links={ROUTE: LINK})
    deeper, layout = job(path, layers=7)
    deeper.look_up([layout], SPACE)
    (proposal,) = deeper.first_proposals([layout], SPACE, planning_model(layout, replace(LINK, residual=100.0)))
    assert "planned again for this job by libra" in proposal.message
    assert proposal.knobs.cuts is not None
    assert proposal.knobs.cuts[-1].stop == layout.numel
    assert deeper.keep(replace(WINNER, knobs=proposal.knobs, arm="registry"), TRIALS, complete=True, links={})
    store = open_store(str(path))
    assert {entry.arm for entry in store.all(JobRecord)} == {"libra"}


def test_an_error_in_entries_of_other_jobs_never_reaches_the_user(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep_winner(path)
    deeper, layout = job(path, layers=7)
    deeper.look_up([layout], SPACE)
    monkeypatch.setattr("sirtaki.engine.tuning.cache.adapted_all", lambda *_: 1 / 0)
    assert deeper.first_proposals([layout], SPACE, None) == []
    assert "training goes on without the registry: ZeroDivisionError" in caplog.text


def test_an_unfinished_warm_up_is_resumed(path: Path) -> None:
    keep_winner(path, complete=False)
    again, layout = job(path)
    found = again.look_up([layout], SPACE)
    assert found.history == tuple(TRIALS)
    assert "continuing after 3 trials" in found.message
    assert again.first_proposals([layout], SPACE, None) == []


def test_nothing_is_kept_of_a_job_that_was_not_measured_or_has_no_registry(path: Path, tmp_path: Path) -> None:
    memory, layout = job(path)
    assert not memory.keep(WINNER, TRIALS, complete=True, links={})  # never recalled
    memory.look_up([layout], SPACE)
    assert not memory.keep(replace(WINNER, default_span_s=float("inf")), TRIALS, complete=False, links={})
    off, layout = job(Path("off"))
    assert off.look_up([layout], SPACE).exact is None
    assert not off.keep(WINNER, TRIALS, complete=True, links={})


def test_a_setting_found_on_a_changed_link_does_not_replace_the_jobs_own_entry(path: Path) -> None:
    memory, layout = keep_winner(path)
    slower = LinkModel(alpha_s=1e-3, throughput=(1e8, 1.1e8))
    other = replace(WINNER, knobs=KNOBS.but(streams=1), default_span_s=4.0, best_span_s=3.9)
    assert memory.keep(other, TRIALS, complete=True, links={ROUTE: slower}, condition="4×")
    store = open_store(str(path))
    assert sorted(entry.key.condition for entry in store.all(JobRecord)) == ["", "4×"]
    assert sorted(summary.condition for summary in store.summaries()) == ["", "4×"]
    again, layout = job(path)
    hit = again.look_up([layout], SPACE)
    assert hit.exact is not None
    assert hit.exact.knobs == KNOBS
    proposals = again.first_proposals([layout], SPACE, planning_model(layout, slower))
    assert KNOBS.but(streams=1) in [proposal.knobs for proposal in proposals]


@pytest.mark.parametrize(
    ("ratio", "condition"),
    [(1.0, ""), (1.3, ""), (1.6, "2×"), (4.4, "4×"), (0.3, "0.25×"), (math.nan, ""), (math.inf, ""), (0.0, "")],
)
def test_conditions_are_distinguished_by_powers_of_two(ratio: float, condition: str) -> None:
    assert condition_of(ratio) == condition


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
    entry = JobRecord(
        key=make_key(graph, topology, dtype="float32", device="cpu"),
        model=graph,
        topology=topology,
        knobs=knobs,
        best_span_s=0.5,
        default_span_s=1.0,
        arm=arm,
        provenance=Provenance(created_s=time.time()),
    )
    return WarmStart(
        knobs=knobs,
        distance=0.1,
        source=f"starting from {name}",
        changes=("scaled",),
        lost_cuts=lost_cuts,
        record=entry,
    )


def best_plan() -> Knobs:
    planner = make_planners(space=SPACE, model=MODEL)[0]
    return planner.ask()[0].knobs


def test_without_a_model_the_nearest_jobs_settings_are_first_and_each_once() -> None:
    other = GOOD.but(streams=2)
    found = first_proposals(
        [start(POOR), start(GOOD), start(POOR), start(other)], layouts=[LAYOUT], space=SPACE, model=None
    )
    assert [proposal.knobs for proposal in found] == [POOR, GOOD, other]
    assert found[0].message == "starting from a job like this; scaled"


def test_proposals_that_the_model_predicts_to_be_slow_are_dropped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    plan = best_plan()
    with caplog.at_level(logging.INFO):
        found = first_proposals(
            [start(POOR, name="Poor"), start(plan, name="Good")], layouts=[LAYOUT], space=SPACE, model=MODEL
        )
    assert [proposal.knobs for proposal in found] == [plan]
    assert "the tuner skips the stored setting of another job, because" in caplog.text
    assert "the best known setting; skipped setting: Poor" in caplog.text


def test_settings_alone_are_measured_against_the_plan_that_would_be_tried_next() -> None:
    assert first_proposals([start(POOR)], layouts=[LAYOUT], space=SPACE, model=MODEL) == []


def test_a_route_that_was_not_measured_cannot_be_judged() -> None:
    unknown = POOR.but(transport=TransportKind.MPI)
    assert [
        proposal.knobs for proposal in first_proposals([start(unknown)], layouts=[LAYOUT], space=SPACE, model=MODEL)
    ] == [unknown]


def test_an_entry_with_units_that_do_not_fit_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    broken = start(GOOD.but(cuts=(Cut(stop=7),)))
    assert first_proposals([broken], layouts=[LAYOUT], space=SPACE, model=None) == []
    assert "Sirtaki ignores the stored tuning result" in caplog.text
