"""`sirtaki plan` and `sirtaki report` on a job's log."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.pages import figures

from sirtaki.autotune.knobs import MIB, Knobs
from sirtaki.autotune.model.fits import ContentionModel, RateCurve
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.replayer import SharedHost
from sirtaki.autotune.model.simulator import Profile
from sirtaki.cli.__main__ import main
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.measures import LinkModel

MODEL = PlanningModel(
    layout=GradientLayout(sizes=(500_000,) * 20),
    profile=Profile.from_durations([1e-3] * 20),
    links={(TransportKind.GLOO, Algorithm.FLAT): LinkModel(alpha_s=1e-4, throughput=(1e9, 2e9))},
)
KNOBS = Knobs(unit_bytes=MIB, streams=2, transport=TransportKind.GLOO)


def written(path: Path, model: PlanningModel = MODEL, *, error: float = 1.0, **result: Any) -> Path:
    """Write the log of a job in which the default took `error` times as long as the model predicts.

    `result` are fields of the result. Without any, the log ends before the tuning phase does.
    """
    span_s = error * (model.expected_s(KNOBS) or 0.0)
    trial = {"arm": "default", "knobs": KNOBS.to_json(), "spans_s": [span_s], "best_span_s": span_s}
    lines: list[dict[str, Any]] = [{"event": "model", **model.to_json()}]
    lines.append({"event": "trial", "iteration": 3, **trial, "purpose": "default"})
    if result:
        lines.append({"iteration": 9, **trial, "event": "result", "default_span_s": span_s, **result})
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return written(tmp_path / "trials.jsonl")


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
    lines[1]["spans_s"] = [simulator.run_knobs(KNOBS).span_s]
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
    rate = RateCurve(gamma_1=1e9, gamma_2=0.0, gamma_3=1.0)
    slowed = ContentionModel(alpha_1=1.0, alpha_2=1e-3, overlapped=rate, alone=rate)  # 512 threads: half the speed
    written(log, replace(MODEL, contention=slowed))
    assert min(iterations_s("--measured-ranks", "2")) > 1.2 * min(alone)
    assert iterations_s("--link-gbit", "8") == described


@pytest.mark.lengthy
def test_a_described_network_costs_what_the_measured_one_does_beside_its_rates_and_latency(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The measured network is described. It must have the same start-up and processor time of all-reduces."""
    link = LinkModel(alpha_s=1e-3, host_s=1e-4, throughput=(1e9, 2e9))
    log = str(written(tmp_path / "log", replace(MODEL, ranks=2, links=dict.fromkeys(MODEL.links, link))))

    def untuned_s(*arguments: str, ranks: str = "2") -> float:
        table = rows(capsys, log, "--ranks", ranks, *arguments)
        return next(float(row["iteration_s"]) for row in table if row["planner"] == "default")

    described = ["--link-gbit", f"{16 / 0.95}", "--flow-gbit", f"{8 / 0.95}"]
    assert untuned_s(*described) == pytest.approx(untuned_s())
    assert untuned_s(*described, ranks="4") == pytest.approx(untuned_s(ranks="4"))
    slow = [*described, "--measured-hop-us", "100", "--hop-us", "5100"]
    assert untuned_s(*slow) > untuned_s(*described) + 2 * 5e-3


def test_the_setting_that_the_job_kept_is_predicted_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = KNOBS.but(unit_bytes=4 * MIB)
    log = written(tmp_path / "log", knobs=kept.to_json(), best_span_s=0.02)
    (row,) = [row for row in rows(capsys, str(log), *map(str, AT_10_GBIT)) if row["planner"] == "kept"]
    assert Knobs.from_json(row["knobs"]) == kept


def test_plans_whose_units_cost_too_much_processor_time_are_not_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = LinkModel(alpha_s=1e-4, host_s=4e-4, throughput=(1e9, 2e9))  # a unit of 1 MiB takes 0.5 ms on the link
    log = written(tmp_path / "log", replace(MODEL, links=dict.fromkeys(MODEL.links, link)), knobs=KNOBS.to_json())
    status, out, err = answered(capsys, log, "--measured-ranks", 2, "--ranks", 2)
    assert (status, out) == (1, "")
    assert "it has no measured setting with units (buckets) that take longer on the link than on a processor" in err


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
        assert all(trace["x"] == pytest.approx([2, 16], rel=0.15) for trace in plot.traces)
        points = [point for trace in plot.traces for point in zip(trace["x"], trace["y"], strict=True)]
        assert len({x for x, _ in points}) == len(points)  # No point hides another.
    assert len(plots) == 2


@pytest.mark.lengthy
def test_for_one_number_of_ranks_each_planner_has_a_bar_with_its_value(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "scaling.html"
    assert main(["plan", str(log), *map(str, AT_10_GBIT), "--plot", str(page)]) == 0
    capsys.readouterr()
    found = rows(capsys, str(log), *map(str, AT_10_GBIT))
    times, efficiencies = figures(page.read_text())
    for plot in (times, efficiencies):
        (bars,) = plot.traces
        assert (bars["type"], bars["y"]) == ("bar", [row["planner"] for row in found])
        assert plot.layout["yaxis"]["dtick"] == 1
    assert times.traces[0]["x"] == pytest.approx([1e3 * row["iteration_s"] for row in found])
    assert times.traces[0]["text"][0] == f"{1e3 * found[0]['iteration_s']:.4g} ms"


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


def answered(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["plan", *map(str, arguments)])
    found = capsys.readouterr()
    return status, found.out, found.err


AT_10_GBIT = ("--ranks", 16, "--link-gbit", 10)


def test_a_prediction_has_an_interval_its_measured_error_and_its_assumptions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "log", error=1.05, backward_s=0.019, between_s=0.15)
    status, out, err = answered(capsys, path, *AT_10_GBIT)
    assert (status, err) == (0, "")
    assert "Measured error: for the 1 setting(s) that this job tried" in out
    assert re.search(r"The job's own step took 17\d ms with the kept setting; the model predicts 1[67]\d ms\.", out)
    assert "at least 12 %, and 10 % for each factor of 2.7 from the job's number of ranks" in out
    assert "each rank has a link of its own" in out
    found = rows(capsys, str(path), "--ranks", "2,16", "--link-gbit", "10")
    # Nothing is predicted to be faster than the job's own time outside of communication, and its backward pass.
    assert all(row["low_s"] + 1e-9 >= 0.15 + 0.019 for row in found)
    assert all(row["low_s"] <= row["iteration_s"] <= row["high_s"] for row in found)
    near, far = (max(row["high_s"] / row["iteration_s"] for row in found if row["ranks"] == n) for n in (2, 16))
    assert 1.05 < near < far
    told = rows(capsys, str(path), "--ranks", "16", "--link-gbit", "10", "--measured-ranks", "8")
    assert max(row["high_s"] / row["iteration_s"] for row in told) < far


def test_the_time_outside_of_communication_is_part_of_a_predicted_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "log", backward_s=0.019, between_s=0.15)
    fast = rows(capsys, str(path), "--ranks", "2", "--link-gbit", "1000")
    assert min(row["iteration_s"] for row in fast) > 0.15
    assert min(row["efficiency"] for row in fast) > 0.9


@pytest.mark.parametrize(
    ("model", "error", "options", "reason"),
    [
        (MODEL, 2.0, AT_10_GBIT, "predicted step differs from the measured one by up to 100 %"),
        (MODEL, 0.5, AT_10_GBIT, "predicted step differs from the measured one by up to 100 %"),
        (
            replace(MODEL, host=SharedHost(ranks=4, processors=2)),
            1.0,
            AT_10_GBIT,
            "4 ranks with 1 thread(s) each shared 2",
        ),
        (
            replace(MODEL, host=SharedHost(ranks=2, processors=2)),
            1.0,
            (),
            "pass the rate of the network with --link-gbit",
        ),
    ],
    ids=["too slow", "too fast", "crowded", "no network"],
)
def test_what_the_log_cannot_show_is_refused_with_the_reason_and_a_remedy(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: PlanningModel,
    error: float,
    options: tuple[object, ...],
    reason: str,
) -> None:
    path = written(tmp_path / "log", model, error=error)
    status, out, err = answered(capsys, path, *options, "--measured-ranks", 2)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "does not suffice to predict this job" in err
    assert reason in err
    assert "write a log with one rank on each of two or more hosts" in err


def test_ranks_of_one_host_with_processors_of_their_own_are_predicted_on_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "log", replace(MODEL, host=SharedHost(ranks=2, processors=4)))
    assert answered(capsys, path, *AT_10_GBIT)[0] == 0


def test_an_invalid_log_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_text("no log\n")
    assert main(["report", str(garbage)]) == 1
    assert "line 1" in capsys.readouterr().err


def test_a_folder_instead_of_a_log_is_refused_with_a_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert "is a folder, but a trial log is a file" in err
    assert "Errno" not in err
