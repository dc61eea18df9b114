import math

import pytest

from sirtaki.watch import Decision, IterationEnded
from sirtaki.watch.watchers import RECENT, Totals


def iteration(number: int, step_s: float) -> IterationEnded:
    return IterationEnded(
        number=number, step_s=step_s, communication_s=step_s / 2, exposed_s=step_s / 4, n_bytes=100, tuning=True
    )


def test_iterations_are_added_up_and_the_last_ones_averaged() -> None:
    totals = Totals()
    assert totals.now() == {}
    totals.iteration(iteration(1, math.nan))
    for number in range(RECENT):
        totals.iteration(iteration(number, 0.2))
    assert totals.iterations == RECENT + 1
    assert totals.n_bytes == 100 * (RECENT + 1)
    assert totals.step_s == pytest.approx(0.2 * RECENT)
    assert totals.now() == pytest.approx({"step_s": 0.2, "communication_s": 0.1, "exposed_s": 0.05})


def test_a_decision_tells_what_it_gains() -> None:
    totals = Totals()
    assert math.isnan(totals.gain)
    totals.decision(
        Decision(iteration=9, arm="a", setting="gloo", knobs={}, default_s=0.3, best_s=0.1, n_trials=4, retune=False)
    )
    assert (totals.setting, totals.decisions) == ("gloo", 1)
    assert totals.gain == pytest.approx(3.0)
