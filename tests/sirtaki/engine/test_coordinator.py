"""What a warm-up or a re-tune finds runs from then on, what runs stays unless it is beaten, whatever goes wrong."""

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from sirtaki.autotune.knobs import KIB, MIB, Knobs, KnobSpace
from sirtaki.autotune.meta.session import Purpose
from sirtaki.autotune.trial import Proposal, Trial
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.engine.tuning.cache import TuningCache
from sirtaki.engine.tuning.coordinator import RETUNE_ITERATIONS, TuningCoordinator
from sirtaki.settings import Settings

ROUTE = (TransportKind.GLOO, Algorithm.FLAT)
SPACE = KnobSpace(routes=(ROUTE,), unit_bytes=(64 * KIB, 64 * MIB), streams=(1, 2, 4, 8))
DEFAULT = Knobs(unit_bytes=MIB, streams=1, transport=ROUTE[0])
WINNER = Knobs(unit_bytes=2 * MIB, streams=4, transport=ROUTE[0])
LAYOUTS = [GradientLayout(sizes=(1 << 20,) * 8)]


class OneSetting:
    """An arm that proposes one setting, or fails."""

    name = "one"

    def __init__(self, knobs: Knobs | None) -> None:
        self._knobs = knobs

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        if self._knobs is None:
            raise RuntimeError("on purpose")
        return [Proposal(arm=self.name, knobs=self._knobs)]

    def tell(self, trials: Sequence[Trial]) -> None:
        pass


def fresh(arm: OneSetting, log: Path | None = None) -> TuningCoordinator:
    """A coordinator of a job that begins, of which no registry knows anything."""
    environ = {"SIRTAKI_REGISTRY": "off", **({"SIRTAKI_TRIAL_LOG": str(log)} if log else {})}
    settings = Settings.from_environ(environ)
    cache = TuningCache(settings, [], ["host"] * 2)
    return TuningCoordinator(settings, cache, default=DEFAULT, arms=[arm], discarded_iterations=1)


def after_warm_up(arm: OneSetting, log: Path | None = None) -> TuningCoordinator:
    """A coordinator whose warm-up is over and in whose job a re-tune has begun."""
    coordinator = fresh(arm, log)
    coordinator.retune(WINNER, LAYOUTS, ratio=3.0, iteration=200)
    coordinator.search(SPACE, SPACE, lambda: None)
    return coordinator


def run(coordinator: TuningCoordinator, spans_s: dict[Knobs, float]) -> int:
    """Iterations until something is kept."""
    iterations = 0
    while (now := coordinator.assignment).purpose is not Purpose.KEPT:
        iterations += now.discarded_iterations + now.measured_iterations
        coordinator.record([spans_s.get(now.knobs, 1.0)] * now.measured_iterations, iteration=200 + iterations)
    return iterations


def test_without_a_session_the_default_runs_and_nothing_is_measured() -> None:
    coordinator = fresh(OneSetting(WINNER))
    assert not coordinator.recall(LAYOUTS, SPACE)
    now = coordinator.assignment
    assert (now.knobs, now.purpose) == (DEFAULT, Purpose.KEPT)
    assert (now.discarded_iterations, now.measured_iterations) == (0, 0)
    coordinator.record([], iteration=1)
    coordinator.end(iteration=1)
    coordinator.close()
    assert not coordinator.failed


def test_a_warm_up_begins_with_the_default_and_what_it_finds_runs_from_then_on(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    coordinator = fresh(OneSetting(WINNER), tmp_path / "log")
    coordinator.recall(LAYOUTS, SPACE)
    coordinator.search(SPACE, SPACE, lambda: None)
    assert (coordinator.assignment.knobs, coordinator.assignment.purpose) == (DEFAULT, Purpose.DEFAULT)
    run(coordinator, {DEFAULT: 1.0, WINNER: 0.25})
    coordinator.end(iteration=300)
    assert (coordinator.assignment.knobs, coordinator.assignment.purpose) == (WINNER, Purpose.KEPT)
    assert "4.00× faster" in caplog.text
    coordinator.close()
    assert '"event": "result"' in (tmp_path / "log").read_text()
    coordinator.record([float("inf")], iteration=301)  # it cannot be run any more
    assert coordinator.assignment.knobs == DEFAULT


def test_a_fault_in_tuning_ends_tuning_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Cache(TuningCache):
        def first_proposals(self, *args: object) -> list[object]:  # type: ignore[override]
            raise RuntimeError("on purpose")

    settings = Settings.from_environ({"SIRTAKI_REGISTRY": "off"})
    cache = Cache(settings, [], ["host"] * 2)
    coordinator = TuningCoordinator(settings, cache, default=DEFAULT, arms=[OneSetting(WINNER)], discarded_iterations=1)
    with caplog.at_level(logging.WARNING):
        coordinator.search(SPACE, SPACE, lambda: None)
    assert coordinator.failed
    assert "tuning has failed and ends here; the default runs from now on" in caplog.text
    assert (coordinator.assignment.knobs, coordinator.assignment.purpose) == (DEFAULT, Purpose.KEPT)
    coordinator.record([1.0], iteration=5)
    coordinator.end(iteration=5)


def test_a_better_setting_takes_over_within_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    better = Knobs(unit_bytes=MIB, streams=8, transport=ROUTE[0])
    caplog.set_level(logging.INFO)
    coordinator = after_warm_up(OneSetting(better))
    assert coordinator.assignment.knobs == WINNER
    assert 0 < run(coordinator, {better: 0.2, WINNER: 0.5}) <= RETUNE_ITERATIONS
    assert coordinator.assignment.knobs == better
    coordinator.end(iteration=220)
    assert "communication takes 3 times as long as when this setting was chosen" in caplog.text
    assert "2.50× faster than with the setting that ran" in caplog.text
    assert coordinator.assignment.knobs == better


@pytest.mark.parametrize("arm", [OneSetting(DEFAULT), OneSetting(None)])
def test_what_runs_stays_where_nothing_is_better_or_the_search_fails(arm: OneSetting) -> None:
    coordinator = after_warm_up(arm)
    run(coordinator, {WINNER: 0.5})
    assert coordinator.assignment.knobs == WINNER


def test_a_job_that_ends_in_a_re_tune_leaves_what_ran(tmp_path: Path) -> None:
    coordinator = after_warm_up(OneSetting(DEFAULT), tmp_path / "log")
    coordinator.remember()
    assert (coordinator.assignment.knobs, coordinator.assignment.purpose) == (WINNER, Purpose.KEPT)
    coordinator.close()
    assert '"event": "result"' not in (tmp_path / "log").read_text()


def test_where_what_ran_cannot_be_run_any_more_the_default_does() -> None:
    coordinator = after_warm_up(OneSetting(DEFAULT))
    run(coordinator, {WINNER: 0.5})
    coordinator.record([float("inf")], iteration=230)
    assert coordinator.assignment.knobs == DEFAULT
    assert not coordinator.failed
