"""What a real tuned job writes down is what `sirtaki report` and `sirtaki plan` read."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import RunRanks

from sirtaki.cli.__main__ import main


def test_a_real_jobs_log_becomes_a_report_and_a_forecast(
    run_ranks: RunRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, forecast = tmp_path / "trials.jsonl", tmp_path / "scaling.html"
    run_ranks("tuning.py", 2, 40, env={"SIRTAKI_WARMUP_ITERATIONS": "30", "SIRTAKI_TRIAL_LOG": str(log)})
    records = [json.loads(line) for line in log.read_text().splitlines()]
    cold, *_, model = [record for record in records if record["event"] == "model"]
    assert 0.0 < model["profile"]["forward_s"] <= cold["profile"]["forward_s"]
    assert 0.0 < model["profile"]["compute_s"] <= cold["profile"]["compute_s"]
    trials = [record for record in records if record["event"] == "trial"]
    assert all(0.0 <= credit <= 1.0 for trial in trials for credit in trial["auc"].values())
    assert {trial["arm"] for trial in trials if trial["purpose"] == "trial"} <= set(trials[-1]["auc"])

    assert main(["report", str(log)]) == 0
    page = log.with_suffix(".html").read_text()
    # "No plan …", or, where steps came out faster than the probes allow, what "no plan" was said to do.
    for promised in ("o plan can take less than", "Which arm was trusted when", "Gradients travel in"):
        assert promised in page
    plots = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)]
    # On a busy machine the probes of a route may be too far from any model; a setting on it has no timeline then.
    known = {(link["transport"], link["algorithm"]) for link in model["links"]}
    shown = [(record["knobs"]["transport"], record["knobs"]["algorithm"]) for record in (trials[0], records[-1])]
    has_predictions = any(trial["predicted_s"] for trial in trials)
    timelines = 1 + (trials[0]["knobs"] != records[-1]["knobs"])  # the default's; the winner's if that is another
    # Trials, who proposed what, credits, predictions, timelines.
    assert len(plots) == 3 + has_predictions + timelines * (known >= set(shown))

    capsys.readouterr()
    described = ["--ranks", "2,64", "--link-gbit", "25", "--flow-gbit", "10"]
    assert main(["plan", str(log), *described, "--json", "--plot", str(forecast)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["ranks"] for row in rows} == {2, 64}
    assert all(row["iteration_s"] > model["profile"]["forward_s"] for row in rows)
    assert forecast.read_text().count("<svg") == 2
