"""The setting found by a warm-up or a re-tuning runs from then on. The current setting stays unless it is beaten."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.tuned import KnobJob

from sirtaki.autotune.arms.techniques import OUR_ARMS
from sirtaki.autotune.knobs import KIB, MIB, Knobs, KnobSpace
from sirtaki.autotune.meta.session import Purpose, TuningSession
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.autotune.trial import Proposal, Trial
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.engine.settings import REGISTRY_OFF, Settings
from sirtaki.engine.tuning.cache import TuningCache
from sirtaki.engine.tuning.knob_search import KnobSearch
from sirtaki.engine.tuning.plans import Carried, CarriedTuning, key_of
from sirtaki.engine.tuning.report import describe_change, describe_progress, describe_result, tuning_ahead
from sirtaki.engine.tuning.trial_log import StepTime
from sirtaki.measures import Gain, LinkModel
from sirtaki.watch import Decision, TrialEnded, Watcher, watchers

ROUTE = (TransportKind.GLOO, Algorithm.FLAT)


SPACE = KnobSpace(routes=(ROUTE,), unit_bytes=(64 * KIB, 64 * MIB), streams=(1, 2, 4, 8))


DEFAULT = Knobs(unit_bytes=MIB, streams=1, transport=ROUTE[0])


WINNER = Knobs(unit_bytes=2 * MIB, streams=4, transport=ROUTE[0])


LAYOUTS = [GradientLayout(sizes=(1 << 20,) * 8)]


class Proposes:
    """An arm that proposes given settings in turn, repeats the last one, or fails without any."""

    name = "one"

    def __init__(self, *knobs: Knobs) -> None:
        self._left = list(knobs)

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        return [Proposal(arm=self.name, knobs=self._left.pop(0) if len(self._left) > 1 else self._left[0])]

    def tell(self, trials: Sequence[Trial]) -> None:
        pass


def made(
    *arms: Proposes,
    log: Path | None = None,
    presumed: bool = True,
    space: KnobSpace = SPACE,
    make_model: Callable[[], PlanningModel | None] = lambda: None,
    before: Sequence[Carried] = (),
    place: Sequence[int] = (),
    registry: Path | None = None,
    warmup_iterations: int = 100,
    saturates: bool = False,
) -> KnobJob:
    """Return a new job, without registry unless its path is given, and with the usual arms unless others are given."""
    path = REGISTRY_OFF if registry is None else str(registry)
    settings = Settings(registry=path, trial_log=None if log is None else str(log), warmup_iterations=warmup_iterations)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(8)))
    cache = TuningCache(settings, list(model.parameters()), ["host"] * 2)
    model(torch.zeros(1, 8))
    search = KnobSearch(
        settings,
        cache,
        default=DEFAULT,
        arms=arms or None,
        discarded_iterations=1,
        presumed=presumed,
        saturates=saturates,
    )
    return KnobJob(search, LAYOUTS, space, make_model=make_model, before=before, place=place)


def begun(*arms: Proposes, log: Path | None = None) -> KnobJob:
    job = made(*arms, log=log)
    job.begin()
    return job


def after_warm_up(arm: Proposes, log: Path | None = None) -> KnobJob:
    """Return a job whose warm-up has ended and in which a re-tuning has begun."""
    job = made(arm, log=log)
    job.search_of_knobs.retune(WINNER, LAYOUTS, ratio=3.0, iteration=200)
    job.begin(recalls=False)
    return job


def run(job: KnobJob, spans_s: dict[Knobs, float]) -> int:
    """Run until a setting is kept. Return the number of iterations."""
    return job.run(lambda knobs: spans_s.get(knobs, 1.0))


def test_a_warm_up_begins_with_the_default_and_ends_with_the_found_setting(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    job = begun(Proposes(WINNER), log=tmp_path / "log")
    assert job.running == DEFAULT
    run(job, {DEFAULT: 1.0, WINNER: 0.25})
    assert job.assignments[0][0].purpose is Purpose.DEFAULT
    assert (job.running, job.kept) == (WINNER, True)
    assert "4.00× faster" in caplog.text
    job.search_of_knobs.remember(None)
    assert '"event": "result"' in (tmp_path / "log").read_text()


def test_if_the_default_fills_the_links_the_search_ends_early_and_states_the_cost_compared_with_ddp(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    job = made(saturates=True)
    job.refine_until = 10_000
    job.begin()
    run(job, {DEFAULT: 1.0} | dict.fromkeys(SPACE.contrasts(DEFAULT), 1.02))
    assert job.running == DEFAULT
    assert (
        "tuned in 15 steps with 5 settings: communication takes 1000 ms; the default stays (none of 4 clearly "
        "different settings was faster, so the search ended early); 32 all-reduces per step instead of DDP's 3"
    ) in caplog.text
    n_measured = len(job.assignments)
    job.train(2000, lambda knobs: 1.0)
    assert len(job.assignments) == n_measured  # no refinement tries anything


def test_a_better_setting_replaces_the_current_one_within_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    better = Knobs(unit_bytes=MIB, streams=8, transport=ROUTE[0])
    caplog.set_level(logging.INFO)
    job = after_warm_up(Proposes(better))
    assert job.running == WINNER
    assert 0 < run(job, {better: 0.2, WINNER: 0.5}) <= 31
    assert job.running == better
    assert "communication takes 3 times as long as when this setting was chosen" in caplog.text
    assert "communication is 2.50× faster, ± " in caplog.text


@pytest.mark.parametrize("arm", [Proposes(DEFAULT), Proposes()])
def test_the_current_setting_stays_if_nothing_is_better_or_the_search_fails(arm: Proposes) -> None:
    job = after_warm_up(arm)
    run(job, {WINNER: 0.5})
    assert job.running == WINNER
    assert not job.controller.failed


def test_a_job_that_ends_in_a_re_tune_keeps_the_current_setting(tmp_path: Path) -> None:
    job = after_warm_up(Proposes(DEFAULT), tmp_path / "log")
    job.search_of_knobs.remember(job.controller.release(job))
    run(job, {})
    assert (job.running, job.kept) == (WINNER, True)
    assert '"event": "result"' not in (tmp_path / "log").read_text()


class Listener(Watcher):
    def __init__(self) -> None:
        self.trials: list[TrialEnded] = []
        self.decisions: list[Decision] = []

    def trial(self, event: TrialEnded) -> None:
        self.trials.append(event)

    def decision(self, event: Decision) -> None:
        self.decisions.append(event)


def test_watchers_get_every_trial_and_its_decision() -> None:
    listener, job = Listener(), begun(Proposes(WINNER))
    watchers.add(listener)
    try:
        run(job, {DEFAULT: 1.0, WINNER: 0.25})
    finally:
        watchers.remove(listener)
    first, last = listener.trials[0], listener.trials[-1]
    assert (first.arm, first.communication_s, Knobs.from_json(first.knobs)) == ("default", 1.0, DEFAULT)
    assert (last.best_s, last.iteration > first.iteration) == (0.25, True)
    (decision,) = listener.decisions
    assert (decision.iteration, decision.arm, decision.setting) == (job.iterations_run, "one", WINNER.describe())
    settings = {event.setting for event in listener.trials}
    assert (decision.default_s, decision.best_s, decision.n_trials, decision.retune) == (
        1.0,
        0.25,
        len(settings),
        False,
    )


MODEL = PlanningModel(
    layout=LAYOUTS[0],
    profile=Profile.from_durations([1e-3] * 8, forward_s=4e-3),
    links={ROUTE: LinkModel(alpha_s=1e-6, throughput=(1e9, 2e9))},
)


def with_usual_arms(
    make_model: Callable[[], PlanningModel | None],
    *,
    presumed: bool = True,
    job: PlanningModel | None = None,
    log: Path | None = None,
) -> list[str]:
    """Return the arms of the settings that run. An iteration takes a second, or its time in the given job."""
    tuned = made(log=log, presumed=presumed, make_model=make_model)
    tuned.begin()

    tuned.run(lambda knobs: 1.0 if job is None else job.simulator(ROUTE).run_knobs(knobs).span_s)
    assert not tuned.controller.failed
    tuned.search_of_knobs.remember(None)
    return [assignment.arm for assignment, _ in tuned.assignments]


def test_planners_are_asked_first_where_their_model_is_presumed_to_be_right() -> None:
    asked = with_usual_arms(lambda: MODEL, job=MODEL)
    assert asked[1] == "asc_wfbp_n"
    assert with_usual_arms(lambda: MODEL, presumed=False)[1] in OUR_ARMS


HERE, ELSEWHERE = (0, 0, 0), (0, 0)


def carried(knobs: Knobs, *, settled: bool, trials: tuple[Trial, ...] = ()) -> Carried:
    """Return the state that a generation at `HERE` has left."""
    return Carried(knobs=knobs, settled=settled, place=HERE, trials=trials)


def next_generation(
    *before: Carried, space: KnobSpace = SPACE, goes_on: bool = False, now: tuple[int, ...] = HERE
) -> KnobJob:
    job = made(space=space, before=before, place=now)
    job.begin()
    assert job.searched != goes_on
    return job


def tried(job: KnobJob) -> list[Knobs]:
    """Return the settings that run until one is kept, in order."""
    job.run(lambda knobs: 0.5 if knobs == WINNER else 1.0)
    return [assignment.knobs for assignment, _ in job.assignments]


def test_a_winner_runs_on_where_it_has_won_and_begins_the_search_elsewhere() -> None:
    job = next_generation(carried(WINNER, settled=True), goes_on=True)
    assert (job.running, job.kept) == (WINNER, True)
    elsewhere = next_generation(carried(WINNER, settled=True), now=ELSEWHERE)
    assert WINNER in tried(elsewhere)[:3]


def test_ranks_of_a_new_generation_use_the_found_setting() -> None:
    brought = CarriedTuning()
    brought.leave("model", carried(DEFAULT, settled=True))
    brought.leave("model", carried(WINNER, settled=True))
    brought.leave("model", replace(carried(DEFAULT, settled=True), place=ELSEWHERE))
    brought.leave("other", carried(DEFAULT, settled=True))
    assert next_generation(*brought.of("model"), goes_on=True).running == WINNER


def test_an_earlier_generations_setting_that_cannot_run_is_replaced_by_the_default() -> None:
    job = made(before=[carried(WINNER, settled=True)], place=HERE)
    job.broken.add(WINNER)
    job.begin()
    assert (job.running, job.kept, job.searched) == (DEFAULT, True, False)


def tried_in(job: KnobJob) -> set[Knobs]:
    """Return the settings that were proposed and measured."""
    return {assignment.knobs for assignment, _ in job.assignments if assignment.purpose is Purpose.TRIAL}


def with_more_streams_faster(knobs: Knobs) -> float:
    return 1.0 / knobs.streams


def test_refinement_continues_after_a_restart_without_measuring_settings_again() -> None:
    before = Trial(arm="one", knobs=WINNER.but(streams=2), iterations=2, span_s=0.5)
    job = made(before=[carried(WINNER, settled=True, trials=(before,))], place=HERE)
    job.refine_until = 1000
    job.begin()
    job.train(700, with_more_streams_faster)
    assert job.running.streams == 8
    assert tried_in(job)
    assert before.knobs not in tried_in(job)


def test_the_next_job_starts_with_a_refined_setting_and_its_trials(tmp_path: Path) -> None:
    registry, kept, tried = tmp_path / "registry.db", list[Knobs](), list[set[Knobs]]()
    for number in range(3):
        job = made(registry=registry, warmup_iterations=6)
        job.refine_until = 1000
        job.begin()
        if number:
            assert not job.searched
        job.train(90 if number else 700, with_more_streams_faster)
        job.search_of_knobs.remember(job.controller.release(job))
        kept.append(job.running)
        tried.append(tried_in(job))
    assert kept[0].streams == 8
    assert kept[0] in tried[0]
    assert kept[1] == kept[0]
    assert tried[1]
    assert not tried[1] & tried[0]
    assert not tried[2] & (tried[1] | tried[0])


def test_a_winner_that_is_not_possible_any_more_leads_to_a_new_search() -> None:
    narrow = KnobSpace(routes=(ROUTE,), unit_bytes=(64 * KIB, 64 * MIB), streams=(1, 2))
    next_generation(carried(WINNER, settled=True), space=narrow)


def test_an_unfinished_warm_up_resumes_after_its_trials_in_the_same_place_only() -> None:
    first = next_generation()
    first.run(lambda knobs: 1.0, at_most=36)
    session = first.controller.release(first)
    assert session is not None
    knobs, trials = session.result.knobs, session.trials
    assert len(trials) >= 3
    again = next_generation(carried(knobs, settled=False, trials=trials))
    anew = next_generation()
    assert len(tried(again)) < len(tried(anew))
    elsewhere = next_generation(carried(WINNER, settled=False, trials=trials), now=ELSEWHERE)
    assert WINNER in tried(elsewhere)


def test_parameters_are_recognised_by_names_shapes_and_dtypes() -> None:
    known = key_of(["a"], [torch.zeros(2, 3)])
    assert key_of(["a"], [torch.ones(2, 3)]) == known
    others = (["b"], [torch.zeros(2, 3)]), (["a"], [torch.zeros(3, 2)]), (["a"], [torch.zeros(2, 3).double()]), ([], [])
    assert len({known, *(key_of(*other) for other in others)}) == 1 + len(others)


USUAL = StepTime(backward_s=0.04, between_s=0.1)


TOLD_SPACE = KnobSpace(routes=((TransportKind.GLOO, Algorithm.FLAT),), streams=(1, 2, 4))


def streams(count: int) -> Knobs:
    return Knobs(unit_bytes=32 * MIB, streams=count, transport=TransportKind.GLOO)


def session(*spans_s: float) -> TuningSession:
    """After so many assignments: the default, then measurements of the first proposal."""
    job = TuningSession(
        space=TOLD_SPACE, default=streams(1), arm=Proposes(streams(2), streams(4)), rng=np.random.default_rng(0)
    )
    for span_s in spans_s:
        job.record([span_s] * job.assignment.measured_iterations)
    return job


def test_progress_is_logged_in_milliseconds_per_step_and_as_not_yet_confirmed() -> None:
    nothing = describe_progress(session(), None)
    assert nothing.line() == (
        "tuning, step 0 of at most 250: now measuring the default: gloo flat, 32 MiB units, 1 stream"
    )
    assert nothing.bar().startswith("tuning [.....] 0/250; now measuring the default: ")
    assert describe_progress(session(0.2), USUAL).line() == (
        "tuning, step 3 of at most 250, at most 74 s more: so far no setting is faster than the default "
        "(step time 300 ms); "
        "now trying: gloo flat, 32 MiB units, 2 streams"
    )
    progress = describe_progress(session(0.2, 0.15, 0.15), USUAL)
    assert progress.line().startswith(
        "tuning, step 6 of at most 250, at most 61 s more: best so far, not yet proved: "
        "50 ms less per step (step time 300 ms → 250 ms); "
        "now"
    )
    assert progress.bar() == "tuning [.....] 6/250; best so far, not yet proved: 50 ms less per step"
    longest = replace(progress, used=99, seen="best so far, not yet proved: 1120 ms less per step")
    assert len(longest.bar()) < 80


def test_the_result_reports_proofs_and_none_for_a_search_cut_short() -> None:
    found = session(0.2, 0.15, 0.15).result
    assert "1 stream" not in describe_result(found, USUAL, "the search technique two")
    assert "not yet proved" in describe_result(found, USUAL, "the search technique two")
    proved = replace(found, gain=Gain(times=4 / 3, low=1.3, high=1.37))
    said = describe_result(proved, USUAL, "the search technique two")
    assert "communication is 33 % faster, ± 3 (150 ms instead of 200 ms)" in said
    assert "steps take 250 ms instead of 300 ms (1.20× faster, 95 % interval 1.18 to 1.22)" in said
    assert "110 ms instead of 160 ms" in said
    assert "2 streams, proposed by the search technique two" in said
    kept = replace(found, tuned=False, best_span_s=0.2, iterations_used=1, n_trials=1)
    assert describe_result(kept, USUAL, "the default").startswith(
        "tuned in 1 step with 1 setting: communication takes 200 ms, a step 300 ms; the default stays ("
    )


def test_the_steps_announced_for_tuning_are_those_that_its_progress_counts() -> None:
    budget = 100
    before = tuning_ahead(Settings(warmup_iterations=budget))
    search, proof = map(int, re.findall(r"(\d+) (?:further )?steps", before))
    assert search == budget
    assert f" of at most {search + proof}, " in describe_progress(session(0.2), USUAL).line()


def test_the_reason_of_a_re_tune_is_logged_also_with_an_unknown_ratio() -> None:
    assert describe_change(0.2, 20).startswith("communication is 5 times as fast as when this setting was chosen")
    assert describe_change(2.34, 20).startswith("communication takes 2.3 times as long as when this setting was chosen")
    assert describe_change(math.nan, 20).startswith("communication time has changed since this setting was chosen")
