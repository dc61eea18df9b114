"""What a job writes into its trial log, and what is read from it again."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from sirtaki.autotune.arms.planners import make_planners
from sirtaki.autotune.knobs import MIB, Knobs, KnobSpace
from sirtaki.autotune.meta.session import Assignment, Purpose
from sirtaki.autotune.model.planning import Forecast, PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.autotune.trial import Trial
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.engine.tuning.trial_log import TrialLogWriter, read_log
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


def test_what_a_model_predicted_and_whether_it_was_believed_can_be_read_again(tmp_path: Path) -> None:
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


def test_planners_share_the_forecast_that_is_written_down() -> None:
    planners = make_planners(space=KnobSpace(routes=(ROUTE,), unit_bytes=(MIB, 64 * MIB)), model=MODEL)
    assert planners[0].forecast is not None
    assert {planner.forecast for planner in planners} == {planners[0].forecast}


def test_without_a_model_nothing_is_predicted(tmp_path: Path) -> None:
    with closing(TrialLogWriter(str(tmp_path / "log"))) as log:
        write(log, streams(1), 0.1, iteration=3, forecast=None)
    (only,) = read_log(tmp_path / "log").measurements
    assert (only.predicted_s, only.agreement, only.believed) == (None, None, None)


def test_two_optimizers_that_write_one_log_are_told_apart(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    with closing(TrialLogWriter(path)) as first, closing(TrialLogWriter(path)) as second:
        for iteration in (3, 6, 9):
            write(first, streams(1), 0.1 * iteration, iteration=iteration, forecast=None)
            write(second, streams(2), 0.2, iteration=iteration - 1, forecast=None)
    measurements = read_log(tmp_path / "log").measurements
    assert [(m.iteration, m.knobs.streams) for m in measurements] == [(2, 2), (5, 2), (8, 2)]


def test_a_log_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(json.dumps({"version": 3, "event": "trial"}) + "\n")
    with pytest.raises(ConfigError, match="its version is 3, this Sirtaki knows 2"):
        read_log(tmp_path / "log")


def test_a_log_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = TrialLogWriter(str(tmp_path / "nowhere" / "log"))
    write(log, streams(1), 0.1, iteration=3, forecast=None)
    assert "the trial log cannot be written" in caplog.text
