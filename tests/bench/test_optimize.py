"""How the chosen plan is judged by what was measured; nothing is measured here."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from fakes.drawn_jobs import drawn_job

from bench.lib.harness import Report
from bench.optimize import CHOSEN, COLUMNS, DEFAULT, TUNED, judge
from sirtaki.analysis.plan_search import EVERY, optimize


def judged(finals: dict[str, list[float]]) -> Report:
    report, job = Report(name="optimize"), drawn_job(0)
    outcome = optimize(job, least_bytes=16 * 1024)
    knobs = {
        CHOSEN: outcome.knobs,
        **{name: replace(outcome.knobs, cuts=None, streams=1, unit_bytes=1 << 20) for name in (DEFAULT, TUNED)},
        **{name: replace(outcome.knobs, cuts=None, streams=int(name), unit_bytes=1 << 16) for name in ("1", "2")},
    }
    result = {"sweep": finals, "finals": finals, "knobs": {name: one.to_json() for name, one in knobs.items()}}
    judge(report, "capped", result, outcome, job)
    return report


def test_the_chosen_plan_is_held_against_the_fastest_of_those_that_ran_again() -> None:
    report = judged({DEFAULT: [0.2, 0.2], CHOSEN: [0.12, 0.13, 0.14], TUNED: [0.11], "1": [0.3], "2": [0.1, 0.3, 0.1]})
    chosen, search = report.bars
    assert round(chosen.value, 6) == 1.3
    assert not chosen.met
    assert search.met
    assert "measured 35.0 %; warm-up's setting ÷ best 1.100" in report.notes[0]
    assert [row["who"] for row in report.rows] == [DEFAULT, CHOSEN, TUNED, "grid", "grid"] * 2
    assert "rank correlation of replayed and measured steps of the grid 1.00" in report.notes[0]
    assert report.rows[0]["replayed_s"] > report.rows[1]["replayed_s"]


def test_a_chosen_plan_that_is_the_fastest_meets_the_bar() -> None:
    report = judged({DEFAULT: [0.2], CHOSEN: [0.1], TUNED: [0.11], "1": [0.12], "2": [0.12]})
    assert report.bars[0].met


def test_columns_add_one_acceleration_after_the_other() -> None:
    sets = [set(accelerations) for _, accelerations in COLUMNS]
    assert sets[0] == set()
    assert sets[-1] == EVERY
    assert all(len(after - before) == 1 and before < after for before, after in pairwise(sets))
