"""The arithmetic of a warm start: unit sizes go with √(M·α/β), streams with what keeps a link busy."""

import math

import pytest

from sirtaki.measures import LARGEST_UNIT_BYTES, SMALLEST_UNIT_BYTES, LinkModel
from sirtaki.registry.topology import LinkClass
from sirtaki.registry.warm_start import (
    Permitted,
    alike,
    bounded,
    link_class,
    link_ratios,
    route_of,
    scaled_streams,
    unit_factor,
    with_uniform_units,
)

MIB = 1 << 20
KNOBS = {
    "unit_bytes": MIB,
    "streams": 4,
    "threads": None,
    "algorithm": "flat",
    "transport": "gloo",
    "cuts": None,
}
PERMITTED = Permitted(routes=(("gloo", "flat"),), streams=(1, 2, 4, 8), unit_bytes=(MIB, 64 * MIB))


def link(*rates: float, alpha_s: float = 1e-3, host_s: float = 0.0) -> LinkModel:
    return LinkModel(alpha_s=alpha_s, throughput=rates, host_s=host_s)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [(1, MIB), (MIB, MIB), (5 * MIB, 5 * MIB), (64 * MIB, 64 * MIB), (64 * MIB + 1, 64 * MIB)],
)
def test_a_unit_size_is_moved_into_what_is_permitted(wanted: int, found: int) -> None:
    assert PERMITTED.nearest({**KNOBS, "unit_bytes": wanted})["unit_bytes"] == found


@pytest.mark.parametrize(("wanted", "found"), [(1, 1), (3, 4), (5, 4), (6, 8), (100, 8)])
def test_streams_are_moved_to_the_nearest_by_ratio(wanted: int, found: int) -> None:
    assert PERMITTED.nearest({**KNOBS, "streams": wanted})["streams"] == found  # 3 is nearer to 4 than to 2: 1.33 < 1.5


@pytest.mark.parametrize(
    ("threads", "wanted", "found"),
    [
        ((None,), 512, None),
        ((None,), None, None),
        ((512, 1024), None, 512),
        ((512, 1024), 700, 512),
        ((512, 1024), 900, 1024),
        ((None, 512, 1024), None, None),
        ((None, 512, 1024), 4096, 1024),
    ],
)
def test_threads_are_moved_to_the_nearest_or_to_what_there_is(
    threads: tuple[int | None, ...], wanted: int | None, found: int | None
) -> None:
    permitted = Permitted(routes=(("nccl", "flat"),), streams=(1,), threads=threads)
    assert permitted.nearest({**KNOBS, "threads": wanted})["threads"] == found


def test_what_has_no_limits_stays_and_nothing_is_changed_in_place() -> None:
    before = dict(KNOBS)
    found = PERMITTED.nearest(KNOBS)
    assert found == KNOBS == before
    assert found is not KNOBS
    assert route_of(KNOBS) == ("gloo", "flat")


def test_small_differences_are_not_acted_on() -> None:
    assert [alike(factor) for factor in (0.79, 0.81, 1.0, 1.24, 1.26)] == [False, True, True, True, False]
    assert not alike(1.25)
    assert not alike(0.8)


def test_a_links_class_is_of_its_best_throughput_and_its_start_up_time() -> None:
    assert link_class(link(1e8, 4e8, 3e8, alpha_s=2e-3, host_s=1e-3)) == LinkClass.of(
        bandwidth_bytes_per_s=4e8, latency_s=3e-3
    )


def test_ratios_are_here_to_there_of_start_up_and_of_one_stream() -> None:
    there, here = link(1e8, 2e8, alpha_s=1e-3), link(4e8, 4e8, alpha_s=2e-3, host_s=1e-3)
    assert link_ratios(there, here) == pytest.approx((3.0, 4.0))
    # Almost no latency is noise, not a ratio.
    assert link_ratios(link(1e8, alpha_s=1e-12), link(1e8, alpha_s=0.0)) == (1.0, 1.0)


def test_units_grow_with_the_root_of_the_product() -> None:
    assert unit_factor(4.0, 1.0, 1.0) == 2.0
    assert unit_factor(2.0, 3.0, 6.0) == pytest.approx(6.0)
    assert unit_factor(0.25, 1.0, 1.0) == 0.5


def test_uniform_units_stay() -> None:
    for empty in (None, []):
        assert with_uniform_units({**KNOBS, "cuts": empty}, 4) == KNOBS


@pytest.mark.parametrize(
    ("sizes", "middle"),
    [([10], 10), ([10, 30], 30), ([30, 10], 30), ([1, 1, 1, 3], 1), ([1, 1, 1, 4], 4), ([5, 5, 5, 5], 5)],
)
def test_cuts_become_units_like_the_one_in_which_the_middle_byte_travels(sizes: list[int], middle: int) -> None:
    stops = [sum(sizes[: number + 1]) * 1000 for number in range(len(sizes))]
    cuts = [[stop, 0, None] for stop in stops]
    found = with_uniform_units({**KNOBS, "cuts": cuts}, 64)
    assert found == {**KNOBS, "cuts": None, "unit_bytes": bounded(middle * 1000 * 64)}


def test_threads_of_that_unit_come_along_or_those_of_all() -> None:
    cuts = [[1000, 0, 256], [9000, 1, 512], [10_000, 0, None]]
    assert with_uniform_units({**KNOBS, "cuts": cuts, "threads": 128}, 4)["threads"] == 512
    cuts[1][2] = None
    assert with_uniform_units({**KNOBS, "cuts": cuts, "threads": 128}, 4)["threads"] == 128


def test_a_unit_size_is_never_out_of_bounds() -> None:
    assert bounded(0.0) == SMALLEST_UNIT_BYTES
    assert bounded(1e18) == LARGEST_UNIT_BYTES
    assert bounded(MIB + 0.6) == MIB + 1


def test_streams_follow_what_keeps_the_link_busy() -> None:
    # There the second stream adds nothing, so one has to move, and 1 ms at 1e8 bytes/s is a tenth of a 1-MiB unit.
    there, here = link(1e8, 1e8), link(1e8, 2e8, 3e8, 4e8, 4e8, 4e8, 4e8, 4e8)
    wanted_there, wanted_here = 1 + 1e5 / MIB, 4 + 4e5 / MIB
    found = scaled_streams({**KNOBS, "streams": 2}, there, here, unit_bytes=MIB)
    assert found == round(2 * wanted_here / wanted_there) == 8
    assert scaled_streams({**KNOBS, "streams": 8}, here, there, unit_bytes=MIB) == 2
    assert scaled_streams({**KNOBS, "streams": 1}, here, there, unit_bytes=MIB) == 1  # never none


def test_smaller_units_need_more_streams_while_others_start_up() -> None:
    here = link(1e8, 2e8, 2e8, 2e8, 2e8, 2e8, alpha_s=10e-3)
    wanted = [2 + 10e-3 * 2e8 / unit_bytes for unit_bytes in (MIB, MIB // 2)]
    found = scaled_streams({**KNOBS, "streams": 3}, here, here, unit_bytes=MIB // 2)
    assert found == round(3 * wanted[1] / wanted[0]) == 4


def test_more_than_was_measured_is_not_asked_for_but_what_was_there_is_kept() -> None:
    there, here = link(1e8, 1e8), link(1e8, 2e8, 3e8)
    assert scaled_streams({**KNOBS, "streams": 2}, there, here, unit_bytes=MIB) == 3
    assert scaled_streams({**KNOBS, "streams": 6}, there, here, unit_bytes=MIB) == 6


def test_streams_stay_where_nothing_was_measured_or_little_changes() -> None:
    one, several = link(1e8), link(1e8, 2e8, 3e8, 4e8)
    for there, here in ((one, several), (several, one), (several, several)):
        assert scaled_streams(KNOBS, there, here, unit_bytes=MIB) == 4
    assert math.isclose(several.throughput[-1], 4e8)
