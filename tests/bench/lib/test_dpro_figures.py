"""The paper's values, and what is quoted from kept results."""

from __future__ import annotations

from pathlib import Path

from bench.lib.dpro_figures import KEPT, PAPER, kept_bars, kept_lines, line
from bench.lib.harness import Bar, Report
from bench.lib.summary import summary

MODELS = {"conv": 0.02, "mlp": 0.01, "lstm": 0.07, "transformer": 0.03}


def page(*bars: Bar) -> str:
    return summary(Report(name="memory", bars=list(bars)).to_json())


def test_bars_of_a_kept_page_are_read_back_whether_met_or_not() -> None:
    found = kept_bars(
        page(Bar(claim="peak", value=0.031, limit=0.05), Bar(claim="time | more", value=9, limit=5, unit="% "))
    )
    assert found == {"peak": "0.031", "time \\| more": "9 %"}


def test_rows_quote_bars_by_their_words_and_say_where_nothing_is_kept(tmp_path: Path) -> None:
    bars = [Bar(claim=f"{model}: peak off by", value=value, limit=0.05) for model, value in MODELS.items()]
    bars.append(Bar(claim="conv: time off by", value=3, limit=5, unit="% "))
    (tmp_path / "memory.md").write_text(page(*bars))
    found = {row["what"]: row["here"] for row in kept_lines(tmp_path)}
    assert found[PAPER["peak"][1]] == "of 4 at worst lstm: peak off by: 0.07"
    assert found[PAPER["remedies"][1]] == "conv: time off by: 3 %"
    assert found[PAPER["operators"][1]] == "not kept yet"


def test_a_row_has_the_papers_value_beside_ours() -> None:
    row = line("aligned", "up to 0.1 %", "measured")
    assert (row["figure"], row["the paper"], row["here"], row["how"]) == ("fig. 8", "< 5 %", "up to 0.1 %", "measured")
    assert KEPT.keys() <= PAPER.keys()
