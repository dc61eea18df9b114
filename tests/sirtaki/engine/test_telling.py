"""What watchers hear of iterations, trials and decisions."""

from collections.abc import Iterator

import pytest

from sirtaki.autotune.knobs import MIB, Knobs
from sirtaki.autotune.meta.session import Assignment, Purpose, SessionResult
from sirtaki.comm.gradients.iteration import IterationReport
from sirtaki.comm.plan import TransportKind
from sirtaki.engine.tuning.coordinator import IterationTeller, tell_decision, tell_trial
from sirtaki.watch import Decision, IterationEnded, TrialEnded, Watcher, watchers

KNOBS = Knobs(unit_bytes=2 * MIB, streams=2, transport=TransportKind.GLOO)


class Listener(Watcher):
    def __init__(self) -> None:
        self.heard: list[object] = []

    def iteration(self, event: IterationEnded) -> None:
        self.heard.append(event)

    def trial(self, event: TrialEnded) -> None:
        self.heard.append(event)

    def decision(self, event: Decision) -> None:
        self.heard.append(event)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    watchers.add(listener)
    yield listener
    watchers.remove(listener)


def test_a_step_is_told_from_one_iterations_end_to_the_next(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = iter((10.0, 10.5))
    monkeypatch.setattr("time.perf_counter", lambda: next(now_s))
    teller = IterationTeller(1_000)
    teller.tell(IterationReport(span_s=0.2, backward_s=0.05), number=1, tuning=True)
    teller.tell(IterationReport(span_s=0.2, backward_s=0.3), number=2, tuning=False)
    first, second = listener.heard
    assert isinstance(first, IterationEnded)
    assert isinstance(second, IterationEnded)
    assert first.step_s != first.step_s  # not known yet
    assert (first.exposed_s, first.number, first.tuning) == (pytest.approx(0.15), 1, True)
    assert second == IterationEnded(
        number=2, step_s=0.5, communication_s=0.2, exposed_s=0.0, n_bytes=1_000, tuning=False
    )


def test_a_trial_is_told_with_its_shortest_span(listener: Listener) -> None:
    assignment = Assignment(
        knobs=KNOBS, discarded_iterations=1, measured_iterations=2, arm="grid", purpose=Purpose.TRIAL
    )
    tell_trial(assignment, [0.3, 0.2], iteration=7, best_s=0.1)
    (event,) = listener.heard
    assert isinstance(event, TrialEnded)
    assert (event.iteration, event.arm, event.setting) == (7, "grid", KNOBS.describe())
    assert (event.communication_s, event.best_s) == (0.2, 0.1)
    assert Knobs.from_json(event.knobs) == KNOBS


def test_a_decision_is_told_with_what_it_gains(listener: Listener) -> None:
    result = SessionResult(
        knobs=KNOBS,
        default_span_s=0.4,
        best_span_s=0.1,
        noise_s=0.0,
        arm="grid",
        n_trials=9,
        iterations_used=30,
        reason="",
        tuned=True,
    )
    tell_decision(result, iteration=31, retune=True)
    (event,) = listener.heard
    assert isinstance(event, Decision)
    assert (event.iteration, event.arm, event.setting, event.retune) == (31, "grid", KNOBS.describe(), True)
    assert (event.default_s, event.best_s, event.n_trials) == (0.4, 0.1, 9)
