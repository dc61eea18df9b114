"""How compiled models are judged by what was measured; nothing is measured here."""

from __future__ import annotations

from typing import Any

import pytest

from bench.compiled import ADVISED, EARLY, WHOLE, judge
from bench.lib.harness import Report


def judged(case: str, *, advice: int | None, **samples: list[float]) -> Report:
    report = Report(name="compiled")
    result: dict[str, Any] = {"samples": samples, "advice": advice, "setups": {WHOLE: "gloo", EARLY: "gloo"}}
    judge(report, case, result)
    return report


@pytest.mark.parametrize(("case", "met"), [("capped", False), ("fast", True), ("one-host", True)])
def test_parts_have_to_gain_where_links_are_slow_and_to_cost_next_to_nothing_elsewhere(case: str, met: bool) -> None:
    report = judged(case, advice=5, **{WHOLE: [2.0, 1.0], EARLY: [1.9, 0.99], ADVISED: [1.0, 0.5]})
    early, advised = report.bars
    assert early.value == pytest.approx(0.97)
    assert (early.met, advised.met) == (met, True)
    assert advised.value == 0.5


def test_a_model_that_is_to_stay_whole_takes_what_it_took() -> None:
    report = judged("fast", advice=0, **{WHOLE: [1.0, 1.2], EARLY: [1.1, 1.3]})
    assert [bar.met for bar in report.bars] == [False, True]
    assert report.bars[1].value == 1.0
    assert "advised to leave it whole" in report.notes[0]
    assert {row["contender"]: row["setup"] for row in report.rows}[ADVISED] == "the same as whole"
