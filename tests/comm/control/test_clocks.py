import time

import pytest
from fakes.meshes import on_planes
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.comm.control.plane import ClockOffset, compare_clocks, offset_from

DELAYS = st.floats(min_value=0.0, max_value=0.01)


@given(
    offset_s=st.floats(min_value=-1000.0, max_value=1000.0),
    delays=st.lists(st.tuples(DELAYS, DELAYS), min_size=1, max_size=20),
)
def test_the_offset_is_wrong_by_half_the_quickest_round_trip_at_most(
    offset_s: float, delays: list[tuple[float, float]]
) -> None:
    answers = [
        (number, number + there + offset_s, number + there + back) for number, (there, back) in enumerate(delays)
    ]
    quickest = min(there + back for there, back in delays)
    assert abs(offset_from(answers) - offset_s) <= quickest + 1e-9  # half for the way, half for "no difference"


def test_clocks_that_may_be_one_count_as_one() -> None:
    assert offset_from([(5.0, 5.0001, 5.001)]) == 0.0
    assert offset_from([(5.0, 6.0005, 5.001)]) == pytest.approx(1.0)


def test_every_rank_finds_how_far_its_clock_is_and_how_well_that_is_known() -> None:
    def find(control):
        ahead_s = 10.0 * control.rank
        return compare_clocks(control, now_s=lambda: time.perf_counter() + ahead_s)

    first, *others = on_planes(3, find)
    assert first == ClockOffset(0.0, 0.0)
    for rank, found in enumerate(others, 1):
        assert 0.0 < found.round_trip_s < 1.0
        assert abs(found.offset_s + 10.0 * rank) <= found.round_trip_s
