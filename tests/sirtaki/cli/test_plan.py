"""`sirtaki plan` and `sirtaki report` on a job's log."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fakes.pages import figures

from sirtaki.autotune.knobs import MIB, Knobs
from sirtaki.autotune.model.fits import ContentionModel, RateCurve
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.cli.__main__ import main
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.measures import LinkModel


@pytest.fixture
def log(tmp_path: Path) -> Path:
    sizes = (500_000,) * 20
    model = PlanningModel(
        layout=GradientLayout(sizes=sizes),
        profile=Profile.from_durations([1e-3] * len(sizes)),
        links={(TransportKind.GLOO, Algorithm.FLAT): LinkModel(alpha_s=1e-4, throughput=(1e9, 2e9))},
    )
    knobs = Knobs(unit_bytes=MIB, streams=2, transport=TransportKind.GLOO).to_json()
    trial = {"arm": "default", "knobs": knobs, "spans_s": [0.03], "best_span_s": 0.03, "purpose": "default"}
    lines = [{"event": "model", **model.to_json()}, {"event": "trial", "iteration": 3, **trial}]
    path = tmp_path / "trials.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["plan", "--json", *arguments]) == 0
    table: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return table


def test_more_ranks_on_a_slow_link_take_longer_than_few_on_a_fast_one(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = rows(capsys, str(log), "--ranks", "2", "--link-gbit", "100")
    slow = rows(capsys, str(log), "--ranks", "64", "--link-gbit", "1")
    assert max(row["iteration_s"] for row in fast) < min(row["iteration_s"] for row in slow)
    assert min(row["efficiency"] for row in fast) > 0.5


@pytest.mark.lengthy
def test_a_measured_link_is_carried_over_to_more_ranks(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = rows(capsys, str(log), "--ranks", "4,2", "--measured-ranks", "2")
    assert [row["ranks"] for row in table] == sorted(row["ranks"] for row in table)
    assert {row["ranks"] for row in table} == {2, 4}


@pytest.mark.lengthy
def test_a_link_that_the_jobs_trials_speak_against_is_fitted_to_them(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = rows(capsys, str(log), "--ranks", "2", "--measured-ranks", "2")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    model = PlanningModel.from_json(lines[0])
    busy = LinkModel(alpha_s=1e-3, throughput=(2e8, 3e8))  # five times as slow as it was while idle
    simulator = replace(model, links=dict.fromkeys(model.links, busy)).simulator(next(iter(model.links)))
    for size in (1, 4, 16):
        for streams in (1, 2):
            knobs = Knobs(unit_bytes=size * MIB, streams=streams, transport=TransportKind.GLOO)
            span_s = simulator.run_knobs(knobs).span_s
            lines.append({**lines[1], "purpose": "trial", "knobs": knobs.to_json(), "spans_s": [span_s]})
    log.write_text("\n".join(map(json.dumps, lines)))
    after = rows(capsys, str(log), "--ranks", "2", "--measured-ranks", "2")
    assert min(row["iteration_s"] for row in after) > 2 * min(row["iteration_s"] for row in before)


@pytest.mark.lengthy
def test_contention_that_was_probed_is_counted_where_the_link_is_the_measured_one(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def iterations_s(*arguments: str) -> list[float]:
        return [row["iteration_s"] for row in rows(capsys, str(log), "--ranks", "2", *arguments)]

    alone, described = iterations_s("--measured-ranks", "2"), iterations_s("--link-gbit", "8")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    rate = RateCurve(gamma_1=1e9, gamma_2=0.0, gamma_3=1.0)
    slowed = ContentionModel(alpha_1=1.0, alpha_2=1e-3, overlapped=rate, alone=rate)  # 512 threads: half the speed
    lines[0]["contention"] = asdict(slowed)
    log.write_text("\n".join(map(json.dumps, lines)))
    assert min(iterations_s("--measured-ranks", "2")) > 1.2 * min(alone)
    assert iterations_s("--link-gbit", "8") == described


@pytest.mark.lengthy
def test_the_expected_scaling_is_plotted_as_a_page_of_its_own(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "scaling.html"
    assert main(["plan", str(log), "--ranks", "2,16", "--link-gbit", "10", "--plot", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    plots = figures(page.read_text())
    planners = {row["planner"] for row in rows(capsys, str(log), "--ranks", "2,16", "--link-gbit", "10")}
    for plot in plots:
        assert {trace["name"] for trace in plot.traces} == planners
        assert plot.layout["xaxis"]["tickvals"] == [2, 16]
        assert all(trace["x"] == [2, 16] for trace in plot.traces)
    assert len(plots) == 2


def test_default_names_the_setting_that_the_job_ran_untuned(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = rows(capsys, str(log), "--ranks", "4", "--link-gbit", "10")
    (untuned,) = [row for row in table if row["planner"] == "default"]
    assert (untuned["knobs"]["unit_bytes"], untuned["knobs"]["streams"]) == (MIB, 2)


@pytest.mark.parametrize(
    ("options", "reason"),
    [(["--link-gbit", "10", "--plot", "{log}/inside"], "cannot be written"), ([], "--link-gbit")],
)
def test_an_impossible_plan_is_reported_in_one_sentence(
    options, reason, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(log), *(option.format(log=log) for option in options)]) == 1
    assert reason in capsys.readouterr().err


def test_an_invalid_log_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_text("no log\n")
    assert main(["report", str(garbage)]) == 1
    assert "line 1" in capsys.readouterr().err
