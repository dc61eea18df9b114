"""The log of trials, as it is written and as it is read."""

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
    """The parts of a step.

    Attributes:
        backward_s: the backward pass, from its first ready gradient on; it hides communication.
        between_s: from the last reduced gradient to the first ready one of the next step.
    """

    backward_s: float
    between_s: float

    def step_s(self, span_s: float) -> float:
        """The whole step, if communication takes so long."""
        return self.between_s + span_s

    def exposed_s(self, span_s: float) -> float:
        """What the backward pass does not hide of it."""
        return max(0.0, span_s - self.backward_s)

    def at_this_pace(self, cold: Profile) -> Profile:
        """A profile of the first iterations, which are slower than later ones, at the pace of those."""
        compute_s, forward_s = min(cold.compute_s, self.backward_s), min(cold.forward_s, self.between_s)
        pace = compute_s / cold.compute_s if cold.compute_s > 0.0 else 1.0
        ready_s = tuple(min(pace * moment_s, compute_s) for moment_s in cold.ready_s)
        return Profile(ready_s=ready_s, compute_s=compute_s, forward_s=forward_s)


class StepTimer:
    """Collects them.

    Attributes:
        cold_between_s: `StepTime.between_s` of the last order-profiling iteration; not a number before there is one.
    """

    def __init__(self) -> None:
        self.cold_between_s = math.nan
        self._finished_s = math.nan
        self._warm: list[StepTime] = []

    def note(self, report: IterationReport) -> None:
        """An iteration has just ended."""
        now_s = time.perf_counter()
        between_s = now_s - report.span_s - self._finished_s
        self._finished_s = now_s
        if report.ready_s:
            self.cold_between_s = between_s
        elif between_s > 0.0:
            self._warm.append(StepTime(backward_s=report.backward_s, between_s=between_s))

    def pause(self) -> None:
        """What passes until the next iteration ends belongs to tuning, not to a step."""
        self._finished_s = math.nan

    @property
    def usual(self) -> StepTime | None:
        """What each part takes, None before the first scheduled iteration.

        Of the backward pass the tenth part that is quickest counts: communication beside it slows it down.
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
"""Of the format; 1 had neither `version` and `tuner` nor predictions."""


@functools.cache
def _process() -> str:
    """The same for all optimizers of this process."""
    return uuid.uuid4().hex[:8]


_OF_RESULT = ("default_span_s", "best_span_s", "noise_s", "n_trials", "reason", "tuned")


def _finite(value: float) -> float | None:
    """None where JSON has no number for it."""
    return value if math.isfinite(value) else None


class TrialLogWriter:
    """Appends to a file; if it cannot be written, that is a warning and training goes on."""

    def __init__(self, path: str | None) -> None:
        self._file: IO[str] | None = None
        self._tuner = uuid.uuid4().hex[:8]  # other optimizers and later jobs may append to the same file
        if path is not None:
            try:
                self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115  # stays open for the whole warm-up
            except (OSError, ValueError) as err:
                logger.warning("the trial log cannot be written: %s", err)

    def knows(self, model: PlanningModel) -> None:
        """What the planners have been told about this job; also the saved profile for `sirtaki plan`."""
        self._write({"event": "model", **model.to_json()})

    def retunes(self, running: Knobs, ratio: float, *, iteration: int) -> None:
        """After `iteration` a re-tune begins: communication takes `ratio` times as long as it did by `running`."""
        told = {"iteration": iteration, "ratio": _finite(ratio), "running": running.to_json()}
        self._write({"event": "retune", **told})

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
        """An assignment has run.

        Args:
            assignment: what ran.
            spans_s: its measured spans.
            iteration: at which it ended.
            best_span_s: the best setting's time so far.
            credits: each arm's AUC since.
            predicted_s: its span by the planners' model, None = that says nothing.
            forecast: that model's, with this trial, None = there is no model.
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
        """The warm-up is over; `usual` is what steps take besides communication."""
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
        """After `iteration` it is decided how a parameter's sparse gradient travels."""
        self._write({"event": "sparse", "iteration": iteration, **summary.to_json()})

    def _write(self, record: dict[str, object]) -> None:
        if self._file is None:
            return
        try:
            whose = {"version": VERSION, "tuner": self._tuner, "process": _process()}
            self._file.write(json.dumps({**whose, **record}) + "\n")
            self._file.flush()
        except (OSError, ValueError, TypeError) as err:  # what an arm puts into knobs need be no JSON
            logger.warning("the trial log cannot be written any more: %s", err)
            self.close()

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # it writes what it could not write before
                file.close()


Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Measurement(msgspec.Struct, frozen=True, kw_only=True, rename={"credits": "auc"}):
    """One assignment that ran.

    Attributes:
        iteration: training iteration at which it ended.
        arm: who proposed it.
        purpose: "default", "trial", "finals", …
        knobs: the setting.
        span_s: median of its spans; infinite where it failed.
        was_best: it became the best so far.
        best_s: the best so far, after it.
        credits: the bandit's credit (AUC) of each arm after it; empty where the log has none.
        predicted_s: its span by the planners' model; None where that says nothing.
        agreement: of that model with what has run so far (`Forecast.agreement`); None without a model.
        believed: that model, after it; None without a model.
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
        """Return whether there is a span to show."""
        return math.isfinite(self.span_s)


class LoggedResult(msgspec.Struct, frozen=True, kw_only=True, rename={"span_s": "best_span_s"}):
    """What the warm-up kept, or the best so far where it did not end.

    Attributes:
        span_s, default_span_s: communication times.
        backward_s, between_s: what steps take besides (`StepTime`); None where the log does not say.
        gain: that was proved; None where the default stays, in older logs, and where the warm-up did not end.
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
        """What steps take besides; None where the log does not say."""
        if self.backward_s is None or self.between_s is None:
            return None
        return StepTime(backward_s=self.backward_s, between_s=self.between_s)


class Retune(msgspec.Struct, kw_only=True):
    """A short search after the warm-up.

    Attributes:
        iteration: after which it began.
        ratio: how many times as long communication took then; None where the log does not say.
        running: what ran until then.
        measurements: in their order.
        result: what has run since, None if the log ends before that; its default is what ran until then.
    """

    iteration: int
    ratio: Seconds | None = None
    running: Knobs
    measurements: list[Measurement] = []
    result: LoggedResult | None = None


@dataclass(slots=True, kw_only=True)
class TrialLog:
    """Everything in a log that the report uses, of one job and optimizer.

    Attributes:
        measurements: in their order.
        result: how its warm-up ended, None if it did not.
        model: what its planners knew, None if the log has none.
        retunes: what came after the warm-up.
        process: which wrote it; empty in logs of older releases.
        sparse: how its sparse gradients travelled in the end, by name; also those of the job's other optimizers.
    """

    measurements: list[Measurement] = field(default_factory=list)
    result: LoggedResult | None = None
    model: PlanningModel | None = None
    retunes: list[Retune] = field(default_factory=list)
    process: str = ""
    sparse: dict[str, SparseSummary] = field(default_factory=dict)

    @property
    def default(self) -> Measurement | None:
        """The first measurement of the untuned setting."""
        return next((m for m in self.measurements if m.purpose == "default" and m.succeeded), None)

    @property
    def last_iteration(self) -> int:
        """At which the last measurement ended."""
        return max(m.iteration for m in self.measurements)

    @property
    def fastest_s(self) -> float:
        """The shortest time of any measurement."""
        return min(m.span_s for m in self.measurements)

    @property
    def bound_s(self) -> float | None:
        """What no setting falls below: the model's bound, unless a measurement has shown the link to carry more.

        None without a model, and where it sets no bound.
        """
        if self.model is None or not self.model.bound_s > 0:
            return None
        return min(self.model.bound_s, self.fastest_s)

    @property
    def outcome(self) -> LoggedResult:
        """The result, or without one the last new best."""
        if self.result is not None:
            return self.result
        succeeded = [m for m in self.measurements if m.succeeded]
        winners = [m for m in succeeded if m.was_best] or [min(succeeded, key=lambda m: m.span_s)]
        return LoggedResult(
            knobs=winners[-1].knobs,
            arm=winners[-1].arm,
            span_s=winners[-1].span_s,
            default_span_s=self.default.span_s if self.default else None,
            reason="the tuning phase had not ended when the log did",
        )


def read_log(path: Path) -> TrialLog:
    """The last job's log in `path`; without measurements where all of its gradients are sparse.

    Raises:
        ConfigError: it cannot be read, a line cannot be understood, or nothing was measured.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"the log {path} cannot be read: {err}") from err
    logs: dict[str, TrialLog] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            if not isinstance(data, dict):
                raise TypeError(f"a JSON {type(data).__name__} where an object was expected")
            if int(data.get("version", 1)) > VERSION:
                raise ConfigError(
                    f"its version is {data['version']}, this Sirtaki knows {VERSION}: install a newer one"
                )
            _sort_in(logs, data)
        except (KeyError, TypeError, ValueError, OverflowError, SirtakiError) as err:
            not_written_to_its_end = number > 1 and number == len(lines) and not line.endswith("\n")
            if not_written_to_its_end and isinstance(err, json.JSONDecodeError):
                break
            raise ConfigError(f"line {number} of {path} is not part of a log of trials: {err!r}") from err
    measured = [log for log in logs.values() if any(m.succeeded for m in log.measurements)]
    measured = measured or [log for log in logs.values() if log.sparse]
    if not measured:
        raise ConfigError(f"the log {path} has no measured trial; was it written by a job that was tuned?")
    last = measured[-1]
    same_process = [log.sparse for log in logs.values() if last.process and log.process == last.process]
    last.sparse = {name: told for sparse in same_process for name, told in sparse.items()}
    return last


def _sort_in(logs: dict[str, TrialLog], data: Mapping[str, Any]) -> None:
    """Adds one line to the log that it belongs to; the log that was measured last is the last of `logs`."""
    tuner = str(data.get("tuner", ""))
    log = logs.get(tuner, TrialLog())
    if "tuner" not in data and _begins_another_job(log, data):
        log = TrialLog()
    _take_in(log, data)
    if "knobs" in data:
        logs.pop(tuner, None)
    logs[tuner] = log


def _begins_another_job(log: TrialLog, data: Mapping[str, Any]) -> bool:
    """A job's log ends with its result; one that was cut short is followed by an earlier iteration."""
    if log.result is not None:
        return "knobs" in data or data.get("event") == "model"
    return bool(log.measurements and "knobs" in data and int(data["iteration"]) < log.measurements[-1].iteration)


def _take_in(log: TrialLog, data: Mapping[str, Any]) -> None:
    """Adds one line."""
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
    """What one line says; `best_s` was the best before. Version 1 has one span, and says if it was best."""
    told = msgspec.convert(data.get("spans_s", [data.get("span_s")]), list[Seconds | None])
    spans_s = [span_s for span_s in told if span_s is not None]
    best_after_s = msgspec.convert(data.get("best_span_s"), Seconds | None) or best_s
    found = {
        "span_s": median(spans_s) if spans_s else math.inf,
        "was_best": data.get("was_best", best_after_s < best_s),
        "best_s": min(best_s, best_after_s),
    }
    return msgspec.convert({**data, **found}, Measurement)
