"""The log of trials is read as it was written, also by later releases and after a job was cut short."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path

import pytest
from fakes.trial_logs import JOB, TABLE, knobs, trial

from sirtaki.autotune.knobs import MIB, Knobs
from sirtaki.autotune.meta.session import Assignment, Purpose
from sirtaki.autotune.model.planning import Forecast, PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.autotune.trial import Trial
from sirtaki.comm.gradients.trace import IterationReport
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.engine.tuning.trial_log import StepTime, StepTimer, TrialLogWriter, read_log
from sirtaki.errors import ConfigError
from sirtaki.measures import LinkModel

ROUTE = (TransportKind.GLOO, Algorithm.FLAT)


MODEL = PlanningModel(
    layout=GradientLayout(sizes=(4 * MIB,) * 8),
    profile=Profile.from_durations([1e-4] * 8),
    links={ROUTE: LinkModel(alpha_s=1e-6, throughput=(1e9, 2e9, 3e9, 4e9))},
)


def streams(count: int) -> Knobs:
    return Knobs(unit_bytes=2 * MIB, streams=count, transport=ROUTE[0])


def write(log: TrialLogWriter, knobs: Knobs, span_s: float, *, iteration: int, forecast: Forecast | None) -> None:
    assignment = Assignment(
        knobs=knobs, discarded_iterations=1, measured_iterations=1, arm="grid", purpose=Purpose.TRIAL
    )
    log.ran(
        assignment,
        [span_s],
        iteration=iteration,
        best_span_s=span_s,
        credits={"grid": 0.5},
        predicted_s=forecast and forecast.predicted_s(knobs),
        forecast=forecast,
    )


def test_a_models_prediction_and_whether_it_was_trusted_can_be_read_again(tmp_path: Path) -> None:
    path, forecast = tmp_path / "log", Forecast(MODEL)
    log = TrialLogWriter(str(path))
    for count, span_s in ((1, 0.1), (2, 0.2), (4, 0.4)):  # the model expects the other order
        forecast.tell([Trial(arm="grid", knobs=streams(count), iterations=1, span_s=span_s)])
        write(log, streams(count), span_s, iteration=3 * count, forecast=forecast)
    log.close()
    first, *_, last = read_log(path).measurements
    assert first.predicted_s == pytest.approx(MODEL.simulator(ROUTE).run_knobs(streams(1)).span_s)
    assert (first.agreement, first.believed) == (1.0, True)
    assert last.agreement is not None
    assert last.agreement < 0.0
    assert last.believed is False


def test_without_a_model_nothing_is_predicted(tmp_path: Path) -> None:
    with closing(TrialLogWriter(str(tmp_path / "log"))) as log:
        write(log, streams(1), 0.1, iteration=3, forecast=None)
    (only,) = read_log(tmp_path / "log").measurements
    assert (only.predicted_s, only.agreement, only.believed) == (None, None, None)


def test_two_optimizers_that_write_one_log_are_distinguished(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    with closing(TrialLogWriter(path)) as first, closing(TrialLogWriter(path)) as second:
        for iteration in (3, 6, 9):
            write(first, streams(1), 0.1 * iteration, iteration=iteration, forecast=None)
            write(second, streams(2), 0.2, iteration=iteration - 1, forecast=None)
    measurements = read_log(tmp_path / "log").measurements
    assert [(m.iteration, m.knobs.streams) for m in measurements] == [(2, 2), (5, 2), (8, 2)]


def test_a_log_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(json.dumps({"version": 3, "event": "trial"}) + "\n")
    with pytest.raises(ConfigError, match=r"has version 3, but this release of Sirtaki reads only versions up to 2"):
        read_log(tmp_path / "log")


def test_a_log_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = TrialLogWriter(str(tmp_path / "nowhere" / "log"))
    write(log, streams(1), 0.1, iteration=3, forecast=None)
    assert "cannot be opened; training continues without it" in caplog.text


def test_a_job_that_was_cut_short_shows_its_best_so_far(log_of):
    outcome = read_log(log_of(*JOB[:3])).outcome
    assert (outcome.arm, outcome.span_s, outcome.default_span_s) == ("grid", 0.1, 0.2)


def test_of_several_jobs_in_a_file_the_last_counts(log_of):
    second = [trial(2, "default", knobs(64), 0.5, 0.5, "default")]
    assert len(read_log(log_of(*JOB, *second)).measurements) == 1
    assert len(read_log(log_of(*JOB[:3], *second)).measurements) == 1


def test_lines_of_another_kind_are_skipped(log_of):
    assert len(read_log(log_of({"event": "weather"}, *JOB, {"event": "sunset"})).measurements) == 4


def test_a_plain_record_with_one_span_is_read_too(log_of):
    record = {"iteration": 1, "arm": "a", "purpose": "trial", "knobs": knobs().to_json(), "span_s": 0.5, "noise_s": 0.0}
    (measurement,) = read_log(log_of({**record, "was_best": True, "status": "complete"})).measurements
    assert (measurement.span_s, measurement.was_best) == (0.5, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no measurements"),
        ("nonsense\n", "line 1"),
        ("[1]\n", "must be a JSON object, found a list"),
        ('{"knobs": {}, "iteration": 1}\n', "line 1"),
        (json.dumps(trial(3, "x", knobs(), -1.0, None)) + "\n", "Expected `float` > 0.0"),
        (json.dumps(trial(3, "x", knobs(), None, None)) + "\n", "has no measurements"),
    ],
)
def test_an_invalid_log_is_rejected_with_the_line(tmp_path, text, message):
    path = tmp_path / "trials.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_log(path)


def test_a_last_line_that_was_not_written_to_its_end_is_skipped_and_only_that(log_of):
    path = log_of(*JOB)
    whole = path.read_text()
    path.write_text(whole + json.dumps(JOB[1])[:40])
    assert len(read_log(path).measurements) == 4
    path.write_text(whole + json.dumps(JOB[1])[:40] + "\n")
    with pytest.raises(ConfigError, match="line 6"):
        read_log(path)


def of(process, *records, tuner="a"):
    return [{**record, "version": 2, "tuner": tuner, "process": process} for record in records]


def test_sparse_gradients_are_those_of_the_process_that_measured_last_whichever_of_its_optimizers_has_them(log_of):
    records = [*of("p", TABLE, tuner="c"), *of("q", {**TABLE, "name": "other"}, tuner="b"), *of("p", *JOB)]
    log = read_log(log_of(*records))
    assert list(log.sparse) == ["table"]
    assert read_log(log_of(TABLE, *JOB)).sparse == {}  # nobody knows whose


def test_the_last_record_of_a_sparse_gradient_counts(log_of):
    again = {**TABLE, "plan": "owner"}
    assert read_log(log_of(*of("p", TABLE, *JOB, again))).sparse["table"].plan == "owner"


def test_a_log_of_sparse_gradients_alone_can_be_read(log_of):
    log = read_log(log_of(*of("p", TABLE)))
    assert (log.measurements, list(log.sparse)) == ([], ["table"])


@pytest.mark.parametrize("wrong", [{"plan": "by air"}, {"ways": []}, {"n_rows": "many"}, {"union": -1}])
def test_a_line_of_sparse_gradients_that_cannot_be_understood_is_refused(log_of, wrong):
    with pytest.raises(ConfigError, match="line 5"):
        read_log(log_of(*JOB[:4], *of("p", {**TABLE, **wrong})))


USUAL = StepTime(backward_s=0.02, between_s=0.03)


def test_a_step_is_the_time_between_plus_the_communication_time() -> None:
    assert USUAL.step_s(0.05) == pytest.approx(0.08)
    assert USUAL.exposed_s(0.05) == pytest.approx(0.03)
    assert USUAL.exposed_s(0.01) == 0.0


def test_a_cold_profile_keeps_its_shape_at_the_pace_of_warm_iterations() -> None:
    warm = USUAL.at_this_pace(Profile(ready_s=(0.0, 0.03, 0.06), compute_s=0.08, forward_s=0.5))
    assert warm.ready_s == pytest.approx((0.0, 0.0075, 0.015))
    assert (warm.compute_s, warm.forward_s) == (0.02, 0.03)


def test_only_scheduled_iterations_that_follow_on_another_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 11.0, 21.0, 22.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    times = StepTimer()
    times.note(IterationReport(span_s=0.5, backward_s=9.0, ready_s=(0.0,)))
    times.note(IterationReport(span_s=0.5, backward_s=9.0, ready_s=(0.0,)))
    assert times.usual is None
    assert times.cold_between_s == pytest.approx(9.5)
    times.note(IterationReport(span_s=0.75, backward_s=0.25))
    times.pause()  # the next one holds ten seconds of tuning
    times.note(IterationReport(span_s=0.75, backward_s=5.0))
    times.note(IterationReport(span_s=0.75, backward_s=0.25))
    assert times.usual == StepTime(backward_s=0.25, between_s=0.25)
