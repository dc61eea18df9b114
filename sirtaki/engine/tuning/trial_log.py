"""Write and read the trial log: one JSON line for each setting tried, each later search and each result of tuning."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Annotated, Any

import msgspec

from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.meta.session import Assignment, SessionResult
from sirtaki.autotune.model.planning import Forecast, PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.autotune.sparse import SparseSummary
from sirtaki.comm.gradients.trace import IterationReport
from sirtaki.errors import ConfigError, SirtakiError
from sirtaki.measures import Gain


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Durations of the parts of a training step.

    Attributes:
        backward_s: duration of the backward pass from its first ready gradient on. Communication overlaps with it.
        between_s: time from the last reduced gradient of a step to the first ready gradient of the next step.
    """

    backward_s: float
    between_s: float

    def step_s(self, span_s: float) -> float:
        """Return the duration of a training step whose communication takes `span_s` seconds."""
        return self.between_s + span_s

    def exposed_s(self, span_s: float) -> float:
        """Return the seconds of the communication time `span_s` that do not overlap with the backward pass."""
        return max(0.0, span_s - self.backward_s)

    def at_this_pace(self, cold: Profile) -> Profile:
        """Return `cold`, the times of gradients in the slower first iterations, scaled to the speed of later ones."""
        compute_s, forward_s = min(cold.compute_s, self.backward_s), min(cold.forward_s, self.between_s)
        pace = compute_s / cold.compute_s if cold.compute_s > 0.0 else 1.0
        ready_s = tuple(min(pace * moment_s, compute_s) for moment_s in cold.ready_s)
        return Profile(ready_s=ready_s, compute_s=compute_s, forward_s=forward_s)


class StepTimer:
    """Measures the typical durations of the parts of a training step.

    Attributes:
        cold_between_s: time from the last reduced gradient of the previous step to the first ready gradient of a step,
            in the latest iteration in which the order of gradients was profiled. NaN before the first profile.
    """

    def __init__(self) -> None:
        self.cold_between_s = math.nan
        self._finished_s = math.nan
        self._warm: list[StepTime] = []

    def note(self, report: IterationReport) -> None:
        """Record the times of an iteration. Call as soon as the iteration has ended."""
        now_s = time.perf_counter()
        between_s = now_s - report.span_s - self._finished_s
        self._finished_s = now_s
        if report.ready_s:
            self.cold_between_s = between_s
        elif between_s > 0.0:
            self._warm.append(StepTime(backward_s=report.backward_s, between_s=between_s))

    def pause(self) -> None:
        """Do not measure the step in progress, because its time contains work of the tuner."""
        self._finished_s = math.nan

    @property
    def usual(self) -> StepTime | None:
        """Return the typical duration of each part of a step. None before the first scheduled iteration.

        An iteration is scheduled once the launch order of units (buckets) has been profiled.

        The typical backward time is the 10th percentile, because concurrent communication slows most passes down.
        """
        if not self._warm:
            return None
        backward_s = sorted(time.backward_s for time in self._warm)
        return StepTime(
            backward_s=backward_s[len(backward_s) // 10],
            between_s=median(time.between_s for time in self._warm),
        )


logger = logging.getLogger(__name__)

VERSION = 2
"""Version of the trial log's format. Lines of version 1 have no `version`, no `tuner` and no predicted times."""


@functools.cache
def _process() -> str:
    """Return a random id that identifies this process in the trial log."""
    return uuid.uuid4().hex[:8]


_OF_RESULT = ("default_span_s", "best_span_s", "noise_s", "n_trials", "reason", "tuned")


def _finite(value: float) -> float | None:
    """Return None for infinities and NaN, which JSON cannot represent."""
    return value if math.isfinite(value) else None


class TrialLogWriter:
    """Appends lines to the trial log's file. If that fails, a warning is logged, and training continues."""

    def __init__(self, path: str | None) -> None:
        self._file: IO[str] | None = None
        # Id of this writer in each line, because several optimizers may append to one file.
        self._tuner = uuid.uuid4().hex[:8]
        if path is not None:
            try:
                self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115  # stays open for the whole warm-up
            except (OSError, ValueError) as err:
                logger.warning(
                    "the trial log (SIRTAKI_TRIAL_LOG) cannot be opened; training continues without it: %s", err
                )

    def knows(self, model: PlanningModel) -> None:
        """Write the cost model of this job, with which planners predict times. `sirtaki plan` reads it."""
        self._write({"event": "model", **model.to_json()})

    def retunes(self, running: Knobs, ratio: float, *, iteration: int) -> None:
        """Write that a search after the warm-up begins, because communication time has changed.

        Args:
            running: setting that is in use.
            ratio: communication time now, relative to the time when `running` was chosen.
            iteration: training iteration after which the search begins.
        """
        self._write({"event": "retune", "iteration": iteration, "ratio": _finite(ratio), "running": running.to_json()})

    def ran(
        self,
        assignment: Assignment,
        spans_s: Sequence[float],
        *,
        iteration: int,
        best_span_s: float,
        credits: Mapping[str, float],
        predicted_s: float | None,
        forecast: Forecast | None,
    ) -> None:
        """Write the measured times of an assignment (a setting that ran for some iterations).

        Args:
            assignment: the setting, and why it ran.
            spans_s: measured communication times, in seconds.
            iteration: training iteration at which the assignment ended.
            best_span_s: communication time of the best setting so far, in seconds.
            credits: score of each search method (arm) after this trial: its AUC credit, which rates its recent
                improvements.
            predicted_s: communication time predicted by the planners' cost model. None without a prediction.
            forecast: accuracy of the planners' cost model, including this trial. None without a model.
        """
        self._write(
            {
                "event": "trial",
                "iteration": iteration,
                "arm": assignment.arm,
                "purpose": assignment.purpose.value,
                "knobs": assignment.knobs.to_json(),
                "spans_s": [_finite(span_s) for span_s in spans_s],
                "best_span_s": _finite(best_span_s),
                "auc": {arm: round(credit, 4) for arm, credit in credits.items()},
                "predicted_s": predicted_s,
                "agreement": None if forecast is None else round(forecast.agreement, 4),
                "believed": None if forecast is None else forecast.believed,
            }
        )

    def ended(self, result: SessionResult, *, iteration: int, usual: StepTime | None) -> None:
        """Write the result of the warm-up, and `usual`, the typical durations of the parts of a step."""
        self._write(
            {
                "event": "result",
                "iteration": iteration,
                "arm": result.arm,
                "knobs": result.knobs.to_json(),
                **{name: getattr(result, name) for name in _OF_RESULT},
                "gain": None if result.gain is None else asdict(result.gain),
                "backward_s": None if usual is None else usual.backward_s,
                "between_s": None if usual is None else usual.between_s,
            }
        )

    def sparse(self, summary: SparseSummary, *, iteration: int) -> None:
        """Write which all-reduce algorithm was chosen after `iteration` for the sparse gradients of one parameter."""
        self._write({"event": "sparse", "iteration": iteration, **summary.to_json()})

    def _write(self, record: dict[str, object]) -> None:
        if self._file is None:
            return
        try:
            whose = {"version": VERSION, "tuner": self._tuner, "process": _process()}
            self._file.write(json.dumps({**whose, **record}) + "\n")
            self._file.flush()
        # json raises TypeError for values that it does not support. A user's search method may use such values.
        except (OSError, ValueError, TypeError) as err:
            logger.warning(
                "the trial log %s cannot be written, usually because the disk is full (%s); training continues, but "
                "later measurements of tuning are not logged",
                self._file.name,
                err,
            )
            self.close()

    def close(self) -> None:
        """Close the file of the trial log. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                # `close` retries a failed write of buffered lines, which may fail again.
                file.close()


Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Measurement(msgspec.Struct, frozen=True, kw_only=True, rename={"credits": "auc"}):
    """Result of one assignment (a setting that ran for some iterations), as read from the trial log.

    Attributes:
        iteration: training iteration at which the assignment ended.
        arm: name of the search method (arm) that proposed the setting.
        purpose: why the setting ran: "default", "trial", "finals", …
        knobs: setting that ran.
        span_s: median communication time in seconds. Infinite if the setting failed.
        was_best: True if the setting was the fastest one up to this trial.
        best_s: shortest communication time up to this trial, in seconds.
        credits: score (AUC credit) of each search method after this trial. Empty in logs without scores.
        predicted_s: communication time predicted by the planners' cost model. None without a prediction.
        agreement: how well the cost model's predictions agree with measured times (`Forecast.agreement`). None without
            a model.
        believed: True if the tuner relies on the cost model after this trial. None without a model.
    """

    iteration: int
    arm: str
    purpose: str = "trial"
    knobs: Knobs
    span_s: float
    was_best: bool
    best_s: float
    credits: dict[str, float] = {}
    predicted_s: Seconds | None = None
    agreement: float | None = None
    believed: bool | None = None

    @property
    def succeeded(self) -> bool:
        """Return whether a communication time was measured."""
        return math.isfinite(self.span_s)


class LoggedResult(msgspec.Struct, frozen=True, kw_only=True, rename={"span_s": "best_span_s"}):
    """Result of a warm-up, as read from the log. Describes the best setting so far if the warm-up did not end.

    Attributes:
        span_s, default_span_s: communication times of the kept setting and of the default, in seconds.
        backward_s: duration of the backward pass from its first ready gradient on. None if the log does not have it.
        between_s: time from the last reduced gradient of a step to the first ready gradient of the next step. None if
            the log does not have it.
        gain: proved gain over the default. None if the default was kept, if the warm-up did not end, or if an older
            release wrote the log.
    """

    knobs: Knobs
    arm: str
    span_s: Seconds
    default_span_s: Seconds | None = None
    reason: str = ""
    backward_s: float | None = None
    between_s: float | None = None
    gain: Gain | None = None

    @property
    def usual(self) -> StepTime | None:
        """Return the durations of the parts of a step. None if the log has no such values."""
        if self.backward_s is None or self.between_s is None:
            return None
        return StepTime(backward_s=self.backward_s, between_s=self.between_s)


class Retune(msgspec.Struct, kw_only=True):
    """A short search for a faster setting after the warm-up, as read from the trial log.

    Attributes:
        iteration: training iteration after which the search began.
        ratio: communication time when the search began, relative to the time when `running` was chosen. None if the
            log does not contain it.
        running: setting that ran before the search.
        measurements: results of the settings that the search tried, in order of time.
        result: result of the search, with `running` as the default. None if the log ends before the search does.
    """

    iteration: int
    ratio: Seconds | None = None
    running: Knobs
    measurements: list[Measurement] = []
    result: LoggedResult | None = None


@dataclass(slots=True, kw_only=True)
class TrialLog:
    """Log of the tuning of one optimizer in one job, as read from a file.

    Attributes:
        measurements: results of the settings that the warm-up tried, in order of time.
        result: result of the warm-up. None if the warm-up did not end.
        model: cost model of the job, with which planners predict times. None if the log does not contain one.
        retunes: searches after the warm-up, in order of time.
        process: id of the process that wrote the log. "" in logs of older releases.
        sparse: for each parameter with sparse gradients, by name, the all-reduce algorithm that was chosen, of all
            optimizers of the job.
    """

    measurements: list[Measurement] = field(default_factory=list)
    result: LoggedResult | None = None
    model: PlanningModel | None = None
    retunes: list[Retune] = field(default_factory=list)
    process: str = ""
    sparse: dict[str, SparseSummary] = field(default_factory=dict)

    @property
    def default(self) -> Measurement | None:
        """Return the first successful measurement of the untuned setting. None if there is none."""
        return next((m for m in self.measurements if m.purpose == "default" and m.succeeded), None)

    @property
    def last_iteration(self) -> int:
        """Return the training iteration at which the last measurement ended."""
        return max(m.iteration for m in self.measurements)

    @property
    def fastest_s(self) -> float:
        """Return the shortest measured communication time, in seconds."""
        return min(m.span_s for m in self.measurements)

    @property
    def bound_s(self) -> float | None:
        """Return a lower bound of the communication time, in seconds.

        It is the bound of the planners' cost model, or the shortest measured time if that is shorter. None without a
        model, or if the model has no bound.
        """
        if self.model is None or not self.model.bound_s > 0:
            return None
        return min(self.model.bound_s, self.fastest_s)

    @property
    def outcome(self) -> LoggedResult:
        """Return the result of the warm-up. If the warm-up did not end, return one with the best setting so far."""
        if self.result is not None:
            return self.result
        succeeded = [m for m in self.measurements if m.succeeded]
        winners = [m for m in succeeded if m.was_best] or [min(succeeded, key=lambda m: m.span_s)]
        return LoggedResult(
            knobs=winners[-1].knobs,
            arm=winners[-1].arm,
            span_s=winners[-1].span_s,
            default_span_s=self.default.span_s if self.default else None,
            reason="the log ends before the tuning phase does",
        )


def read_log(path: Path) -> TrialLog:
    """Read the trial log of the last job in `path`.

    The log has no `measurements` if all gradients of the job are sparse.

    Raises:
        ConfigError: the file cannot be read, has an invalid line, or contains no measured trial.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except IsADirectoryError as err:
        raise ConfigError(
            f"{path} is a folder, but a trial log is a file; pass the file that a tuned job has written because "
            "SIRTAKI_TRIAL_LOG was set. A folder of `sirtaki profile` is for `sirtaki report`, `replay`, `optimize` "
            "and `trace`"
        ) from err
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"the trial log {path} cannot be read: {err}; check the path") from err
    logs: dict[str, TrialLog] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            if not isinstance(data, dict):
                raise TypeError(f"each line of a trial log must be a JSON object, found a {type(data).__name__}")
            version = int(data.get("version", 1))
            if version <= VERSION:
                _add_to_job(logs, data)
        except (KeyError, TypeError, ValueError, OverflowError, SirtakiError) as err:
            is_incomplete = number > 1 and number == len(lines) and not line.endswith("\n")
            if is_incomplete and isinstance(err, json.JSONDecodeError):
                break
            reason = repr(err) if isinstance(err, KeyError) else str(err)
            raise ConfigError(
                f"line {number} of the trial log {path} is invalid ({reason}); correct or delete this line"
            ) from err
        if version > VERSION:
            raise ConfigError(
                f"the trial log {path} has version {version}, but this release of Sirtaki reads only versions up to "
                f"{VERSION}; install a newer release"
            )
    measured = [log for log in logs.values() if any(m.succeeded for m in log.measurements)]
    measured = measured or [log for log in logs.values() if log.sparse]
    if not measured:
        raise ConfigError(
            f"the trial log {path} has no measurements, because its job did not tune or had one rank; use the log of "
            "another job"
        )
    last = measured[-1]
    same_process = [log.sparse for log in logs.values() if last.process and log.process == last.process]
    last.sparse = {name: summary for sparse in same_process for name, summary in sparse.items()}
    return last


def _add_to_job(logs: dict[str, TrialLog], data: Mapping[str, Any]) -> None:
    """Add one line of the trial log to the log of its job in `logs`.

    If the line is a measurement or a result, move the log of its job to the end of `logs`.
    """
    tuner = str(data.get("tuner", ""))
    log = logs.get(tuner, TrialLog())
    if "tuner" not in data and _begins_another_job(log, data):
        log = TrialLog()
    _add_to_log(log, data)
    if "knobs" in data:
        logs.pop(tuner, None)
    logs[tuner] = log


def _begins_another_job(log: TrialLog, data: Mapping[str, Any]) -> bool:
    """Return whether a line of a trial log (format version 1) belongs to the job after that of `log`.

    A job ends with its result. If a job was cut short, the next one begins with a smaller iteration number.
    """
    if log.result is not None:
        return "knobs" in data or data.get("event") == "model"
    return bool(log.measurements and "knobs" in data and int(data["iteration"]) < log.measurements[-1].iteration)


def _add_to_log(log: TrialLog, data: Mapping[str, Any]) -> None:
    part = log.retunes[-1] if log.retunes else log
    log.process = str(data.get("process", ""))
    if data.get("event") == "retune":
        log.retunes.append(msgspec.convert(data, Retune))
    elif data.get("event") == "result":
        part.result = msgspec.convert(data, LoggedResult)
    elif data.get("event") == "sparse":
        summary = SparseSummary.from_json(data)
        log.sparse[summary.name] = summary
    elif data.get("event") == "model":
        log.model = PlanningModel.from_json(data)
    elif "knobs" in data:
        best_s = part.measurements[-1].best_s if part.measurements else math.inf
        part.measurements.append(_measurement(data, best_s=best_s))


def _measurement(data: Mapping[str, Any], *, best_s: float) -> Measurement:
    """Parse the line of one measurement. `best_s` is the shortest communication time before it.

    Lines of format version 1 have `span_s` and `was_best` instead of `spans_s`.
    """
    values = msgspec.convert(data.get("spans_s", [data.get("span_s")]), list[Seconds | None])
    spans_s = [span_s for span_s in values if span_s is not None]
    best_after_s = msgspec.convert(data.get("best_span_s"), Seconds | None) or best_s
    found = {
        "span_s": median(spans_s) if spans_s else math.inf,
        "was_best": data.get("was_best", best_after_s < best_s),
        "best_s": min(best_s, best_after_s),
    }
    return msgspec.convert({**data, **found}, Measurement)
