from dataclasses import replace

import pytest
from fakes.played_jobs import made_job, plan_of, record
from fakes.replays import SIZES, over_a_link

from sirtaki.analysis.job_model import histories
from sirtaki.analysis.timeline_plot import Kind, exposures, late_units, step_parts

DURATIONS = (0.02, 0.01, 0.03, 0.02)
SLOW = tuple(2 * seconds for seconds in DURATIONS)


def test_exposed_is_what_the_bars_call_so() -> None:
    found = histories(record(over_a_link(ranks=3)))
    waits = {one.rank: one.seconds[Kind.EXPOSED] for one in step_parts(found)}
    assert {one.rank: one.exposed_s for one in exposures(found)} == pytest.approx(waits)


def test_waiting_for_a_late_rank_is_told_from_waiting_for_units() -> None:
    plan, per_byte = plan_of(SIZES, (4,)), 1e-6
    job = made_job(durations_s={0: DURATIONS, 1: SLOW}, sizes=SIZES, plan=plan, seconds_per_byte=per_byte)
    quick, slow = exposures(histories(record(job)))
    unit_s = 4 * sum(SIZES) * per_byte
    assert (quick.held_s, quick.moving_s) == pytest.approx((sum(DURATIONS), unit_s))
    assert (slow.held_s, slow.moving_s) == pytest.approx((0.0, unit_s), abs=1e-9)


def test_units_that_end_after_the_backward_pass_are_late() -> None:
    plan, per_byte = plan_of(SIZES, (1, 2, 4)), 1e-6
    job = made_job(
        durations_s={0: DURATIONS, 1: DURATIONS}, sizes=SIZES, plan=plan, seconds_per_byte=per_byte, iterations=3
    )
    (last,) = late_units(histories(record(job)))
    assert (last.unit.name, last.unit.n_bytes, last.times) == ("w2 … w3 (2)", 10_000, 3)
    assert last.late_s == last.done_s == pytest.approx(10_000 * per_byte)
    assert last.begin_s == pytest.approx(0.0, abs=1e-9)
    assert last.issue_s == pytest.approx(0.0, abs=1e-9)


def test_where_nothing_is_exchanged_nothing_is_late() -> None:
    recording = record(over_a_link())
    ranks = {
        number: replace(rank, iterations=tuple(replace(one, units=()) for one in rank.iterations))
        for number, rank in recording.ranks.items()
    }
    found = histories(replace(recording, ranks=ranks))
    assert late_units(found) == ()
    assert [one.exposed_s for one in exposures(found)] == [0.0, 0.0]
