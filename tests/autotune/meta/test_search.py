"""Trials as races: measured as often as it takes to tell them from the best, until budget, patience or ideas end."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fakes.warmup_job import BEST, DEFAULT, SPACE, ListArm, Sure, streams

from sirtaki.autotune.arms.base import Arm
from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.meta.search import Search
from sirtaki.autotune.meta.trials import REFINEMENT_ARM, Assignment, Budget, Purpose, Trials
from sirtaki.autotune.trial import Proposal, TrialStatus

Span = Callable[[Knobs], float]


class Made:
    """A search, and what it ran."""

    def __init__(
        self, arm: Arm, *, span_of: Span, default_runs: bool = True, identity: Callable[[Knobs], Any] = lambda it: it
    ) -> None:
        budget = Budget(iterations=100, discarded=1, measured=2)
        self.trials = Trials(default=DEFAULT, budget=budget, identity=identity, arm=arm)
        self.proposed: list[Knobs] = []
        self.search = Search(trials=self.trials, proposals=self)  # type: ignore[arg-type]
        self.space, self._arm, self._span_of = SPACE, arm, span_of
        self.refused: set[Knobs] = set()
        self.ran: list[Assignment] = []
        if default_runs:
            self.drive(self.trials.run_default())
            self.ran.clear()

    def next(self) -> Proposal | None:
        """Of `Proposals`."""
        found = self._arm.ask()
        return found[0] if found else None

    def accepts(self, knobs: Knobs) -> bool:
        """Of `Proposals`."""
        return knobs not in self.refused

    def drive(self, script: Any) -> Any:
        """Runs a script to its end; what it returns."""
        send: Sequence[float] | None = None
        while True:
            try:
                now = script.send(send)
            except StopIteration as stop:
                return stop.value
            self.ran.append(now)
            send = [self._span_of(now.knobs)] * now.measured_iterations

    def run(self, *, for_refinement: int = 0) -> str:
        reason: str = self.drive(self.search.run(for_refinement=for_refinement))
        return reason

    def measured(self, knobs: Knobs) -> int:
        return sum(now.measured_iterations for now in self.ran if now.knobs == knobs)


def spans(by_streams: dict[int, float]) -> Span:
    return lambda knobs: by_streams.get(knobs.streams, 1.0)


def test_a_proposal_that_is_hopeless_is_measured_once_and_told_as_given_up() -> None:
    made = Made(ListArm(streams(2)), span_of=spans({2: 5.0}))
    assert made.run() == "nothing left to propose"
    assert made.measured(streams(2)) == 1
    assert made.trials.all[-1].status is TrialStatus.PRUNED


def test_one_that_is_clearly_best_is_measured_as_often_as_is_usual() -> None:
    made = Made(ListArm(streams(2)), span_of=spans({2: 0.2}))
    made.run()
    assert made.measured(streams(2)) == 2
    assert [now.discarded_iterations for now in made.ran] == [1, 0]
    assert made.trials.all[-1].was_best


def test_one_that_is_close_is_measured_up_to_twice_as_often() -> None:
    made = Made(ListArm(streams(2)), span_of=spans({2: 0.999}))
    made.run()
    assert made.measured(streams(2)) == 4


def test_an_arm_may_ask_for_more_measurements() -> None:
    made = Made(ListArm(Proposal(arm="list", knobs=streams(2), iterations=5)), span_of=spans({2: 0.2}))
    made.run()
    assert made.measured(streams(2)) == 5


@pytest.mark.parametrize("has_rival", [True, False])
def test_what_could_not_be_run_is_not_run_again(has_rival: bool) -> None:
    made = Made(ListArm(streams(2)), span_of=spans({2: float("inf")}), default_runs=has_rival)
    made.run()
    assert made.measured(streams(2)) == 1
    assert made.trials.all[-1].status is TrialStatus.FAILED


def test_the_first_setting_has_no_rival() -> None:
    made = Made(ListArm(streams(2)), span_of=spans({}), default_runs=False)
    made.run()
    assert made.measured(streams(2)) == 2


def test_the_search_ends_with_the_budget_less_what_is_kept_for_neighbours() -> None:
    several = [streams(2), streams(3), streams(4), streams(6), streams(8)] * 20
    used = {}
    for kept in (0, 20):
        made = Made(ListArm(*several), span_of=spans({2: 0.5, 3: 0.6, 4: 0.7}))
        assert made.run(for_refinement=kept) == "budget of 100 iterations used"
        used[kept] = made.trials.budget.spent
        assert kept <= made.trials.left < kept + 4
    assert used[0] > used[20]


@pytest.mark.parametrize(("expected", "ends"), [(0.0, True), (0.0009, True), (0.0011, False)])
def test_patience_ends_where_the_arm_expects_nothing_more(expected: float, ends: bool) -> None:
    bad = [replace(DEFAULT, unit_bytes=DEFAULT.unit_bytes + number) for number in range(1, 13)]
    made = Made(Sure(expected, *bad), span_of=lambda knobs: 1.0 if knobs == DEFAULT else 9.0)
    reason = made.run()
    assert reason == ("no new best in 8 trials" if ends else "nothing left to propose")
    assert len(made.trials.all) == (8 if ends else 1 + 12)  # the default is one of them


def test_an_arm_without_an_opinion_is_not_taken_to_have_given_up() -> None:
    bad = [replace(DEFAULT, unit_bytes=DEFAULT.unit_bytes + number) for number in range(1, 13)]
    made = Made(ListArm(*bad), span_of=lambda knobs: 1.0 if knobs == DEFAULT else 9.0)
    assert made.run() == "nothing left to propose"


def test_neighbours_of_the_fastest_are_run_until_none_is_new() -> None:
    made = Made(ListArm(BEST), span_of=lambda knobs: 0.1 * (1 + abs(knobs.streams - 4)) if knobs != DEFAULT else 1.0)
    made.run()
    made.ran.clear()
    made.drive(made.search.refine())
    assert made.ran
    assert {now.arm for now in made.ran} == {REFINEMENT_ARM}
    assert {now.purpose for now in made.ran} == {Purpose.TRIAL}
    assert len({now.knobs for now in made.ran}) < 20
    assert BEST not in {now.knobs for now in made.ran}
    made.ran.clear()
    made.drive(made.search.refine())
    assert made.ran == []


def test_neighbours_that_are_refused_are_left_out() -> None:
    made = Made(ListArm(BEST), span_of=lambda knobs: 0.1 if knobs == BEST else 1.0)
    made.run()
    made.ran.clear()
    made.refused = {replace(BEST, streams=3)}
    made.drive(made.search.refine())
    ran = {now.knobs for now in made.ran}
    assert replace(BEST, streams=6) in ran
    assert not made.refused & ran


def test_neighbours_that_are_a_setting_that_ran_are_left_out() -> None:
    made = Made(
        ListArm(BEST),
        span_of=lambda knobs: 0.1 if knobs == BEST else 1.0,
        identity=lambda knobs: (knobs.unit_bytes, min(knobs.streams, 4)),
    )
    made.run()
    made.ran.clear()
    made.drive(made.search.refine())
    ran = {now.knobs for now in made.ran}
    assert replace(BEST, streams=3) in ran
    assert replace(BEST, streams=6) not in ran


def test_where_nothing_was_measured_there_are_no_neighbours() -> None:
    made = Made(ListArm(), span_of=spans({}), default_runs=False)
    made.drive(made.search.refine())
    assert made.ran == []
