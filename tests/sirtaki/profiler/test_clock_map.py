import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.analysis.operators import Mark, map_clock
from sirtaki.errors import RecordingError

EPOCH_NS = 1_795_374_239_018_036_638


def mark(true_s: float, *, early_s: float, late_s: float, ahead_s: float) -> Mark:
    """One that was made at `true_s` of our clock, of which we know that it was not earlier nor later than that."""
    return Mark(
        before_s=true_s - early_s,
        after_s=true_s + 1e-6 + late_s,
        start_ns=EPOCH_NS + round((true_s + ahead_s) * 1e9),
        duration_ns=1000,
    )


@given(
    ahead_s=st.floats(-1e3, 1e3),
    widths=st.lists(st.tuples(st.floats(0, 1e-3), st.floats(0, 1e-3)), min_size=1, max_size=8),
)
def test_the_clock_is_known_within_what_the_quickest_marks_leave_open(
    ahead_s: float, widths: list[tuple[float, float]]
) -> None:
    marks = [mark(50.0 + number, early_s=a, late_s=b, ahead_s=ahead_s) for number, (a, b) in enumerate(widths)]
    clock = map_clock(marks)
    told_s = clock.at(EPOCH_NS + round((52.5 + ahead_s) * 1e9))
    assert abs(told_s - 52.5) <= clock.error_s + 1e-8
    assert clock.error_s <= min(a + b for a, b in widths) / 2 + 1e-8


def test_marks_that_contradict_each_other_say_by_how_much() -> None:
    exact = {"early_s": 0.0, "late_s": 0.0}
    clock = map_clock([mark(1.0, **exact, ahead_s=0.0), mark(2.0, **exact, ahead_s=4e-6)])
    assert clock.error_s == pytest.approx(2e-6, abs=1e-8)


def test_without_marks_nothing_is_known() -> None:
    with pytest.raises(RecordingError):
        map_clock([])
