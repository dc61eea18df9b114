"""How the chosen plan is judged by what was measured; nothing is measured here."""

from __future__ import annotations

from fakes.drawn_jobs import drawn_job

from bench.lib.harness import Report
from bench.optimize import CHOSEN, COLUMNS, DEFAULT, TUNED, judge
from sirtaki.optimizer.outcome import optimize
from sirtaki.optimizer.view import EVERY


def judged(finals: dict[str, list[float]]) -> Report:
    report = Report(name="optimize")
    result = {"sweep": finals, "finals": finals, "settings": {name: f"set by {name}" for name in finals}}
    judge(report, "capped", result, optimize(drawn_job(0), least_bytes=16 * 1024), 0.1)
    return report


def test_the_chosen_plan_is_held_against_the_fastest_of_those_that_ran_again() -> None:
    report = judged({DEFAULT: [0.2, 0.2], CHOSEN: [0.12, 0.13, 0.14], TUNED: [0.11], "grid": [0.1, 0.3, 0.1]})
    chosen, search = report.bars
    assert round(chosen.value, 6) == 1.3
    assert not chosen.met
    assert search.met
    assert "measured 35.0 %; warm-up's setting ÷ best 1.100" in report.notes[0]
    assert [row["who"] for row in report.rows] == [DEFAULT, CHOSEN, TUNED, "grid"] * 2
    assert report.rows[2]["replayed_s"] is None
    assert report.rows[0]["replayed_s"] > report.rows[1]["replayed_s"]


def test_a_chosen_plan_that_is_the_fastest_meets_the_bar() -> None:
    report = judged({DEFAULT: [0.2], CHOSEN: [0.1], TUNED: [0.11], "grid": [0.12]})
    assert report.bars[0].met


def test_columns_add_one_acceleration_after_the_other() -> None:
    sets = [set(accelerations) for _, accelerations in COLUMNS]
    assert sets[0] == set()
    assert sets[-1] == EVERY
    assert all(len(after - before) == 1 and before < after for before, after in zip(sets, sets[1:], strict=False))
