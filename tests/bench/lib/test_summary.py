"""What is kept of a benchmark: a page for people, without raw series."""

import re
import sys
from pathlib import Path

import pytest

from bench.lib.harness import RESULTS, Bar, Report, Spread
from bench.lib.summary import summary

KEPT = sorted(RESULTS.iterdir())


def test_a_summary_says_how_it_was_taken_what_was_promised_and_what_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bench/trial.py", "--quick", "--save"])
    report = Report(name="trial", settings={"ranks": [1, 2], "runs": [{"a": 1}]}, notes=["sizes × 0.25"])
    report.rows = [{"what": "a|b", "step_s": Spread.of([0.1, 0.2, 0.3]), "ratio": 0.5, "samples_s": [0.1, 0.2, 0.3]}]
    report.bars = [
        Bar(claim="the step", value=0.2, limit=0.3, unit="s "),
        Bar(claim="the ratio", value=1234.5, limit=1.0),
    ]
    page = summary(report.to_json())
    assert page.startswith("# trial\n\n    python -m bench.trial --quick\n")
    assert "- Settings: ranks 1 2." in page
    assert "- sizes × 0.25" in page
    assert "| the step | 0.2 s | ≤ 0.3 s | met |" in page
    assert "| ≤ 1 | **missed** |" in page
    assert "| what | step, ms | ratio |\n|---|---|---|\n| a\\|b | 200 (150–250) | 0.5 |" in page
    assert "samples" not in page


@pytest.mark.parametrize("path", KEPT, ids=[path.name for path in KEPT])
def test_results_are_summaries_of_the_scripts_beside_them(path: Path) -> None:
    assert path.suffix == ".md"
    assert path.stat().st_size < 40_000
    page = re.match(r"# (\w+)\n\n    python -m bench\.(\w+)[ \n]", path.read_text(encoding="utf-8"))
    assert page is not None
    name, script = page.groups()
    assert name == path.stem
    assert f"{name}_".startswith(f"{script}_")  # all that the script measures, or a part of it
    assert (RESULTS.parent / f"{script}.py").exists()
