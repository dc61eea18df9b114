"""Reads the log of trials that a tuned job writes: JSON lines, one object each.

The log is data from elsewhere: whatever is wrong with it is found here, with its line.

A line with `knobs` and `spans_s` (or one `span_s`) is a measurement, one with `"event": "result"` the end of a
warm-up. A line `{"event": "model", **PlanningModel.to_json()}` lets the report show timelines, a line `{"event":
"sparse", **SparseSummary.to_json()}` tells how a sparse gradient travels. Other lines are skipped, so that the log may
grow; so is the last one where a job that was killed has left it half written. Jobs, and several optimizers of a job,
append to the same file; the one that measured last counts, with the sparse gradients of its process. Lines of version 1
do not say whose they are, which is then found by their order.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.sparse.summary import SparseSummary
from sirtaki.errors import ConfigError, SirtakiError

from .step_times import StepTime
from .trial_log import VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
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
    purpose: str
    knobs: Knobs
    span_s: float
    was_best: bool
    best_s: float = math.inf
    credits: Mapping[str, float] = field(default_factory=dict)
    predicted_s: float | None = None
    agreement: float | None = None
    believed: bool | None = None

    @property
    def succeeded(self) -> bool:
        """Whether there is a span to show."""
        return math.isfinite(self.span_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the warm-up kept, or the best so far where it did not end.

    Attributes:
        span_s, default_span_s: communication times.
        usual: what steps take besides; None where the log does not say.
    """

    knobs: Knobs
    arm: str
    span_s: float
    default_span_s: float | None
    reason: str
    usual: StepTime | None = None


@dataclass(slots=True, kw_only=True)
class Retune:
    """A short search after the warm-up.

    Attributes:
        iteration: after which it began.
        ratio: how many times as long communication took then; None where the log does not say.
        running: what ran until then.
        measurements: in their order.
        result: what has run since, None if the log ends before that; its default is what ran until then.
    """

    iteration: int
    ratio: float | None
    running: Knobs
    measurements: list[Measurement] = field(default_factory=list)
    result: Outcome | None = None


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
    result: Outcome | None = None
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
    def outcome(self) -> Outcome:
        """The result, or without one the last new best."""
        if self.result is not None:
            return self.result
        succeeded = [m for m in self.measurements if m.succeeded]
        winners = [m for m in succeeded if m.was_best] or [min(succeeded, key=lambda m: m.span_s)]
        return Outcome(
            knobs=winners[-1].knobs,
            arm=winners[-1].arm,
            span_s=winners[-1].span_s,
            default_span_s=self.default.span_s if self.default else None,
            reason="the warm-up had not ended when the log did",
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
        ratio = _positive_or_none(data.get("ratio"))
        running = Knobs.from_json(data["running"])
        log.retunes.append(Retune(iteration=int(data["iteration"]), ratio=ratio, running=running))
    elif data.get("event") == "result":
        part.result = Outcome(
            knobs=Knobs.from_json(data["knobs"]),
            arm=str(data["arm"]),
            span_s=_positive(data["best_span_s"]),
            default_span_s=_positive_or_none(data.get("default_span_s")),
            reason=str(data.get("reason", "")),
            usual=_usual(data.get("backward_s"), data.get("between_s")),
        )
    elif data.get("event") == "sparse":
        summary = SparseSummary.from_json(data)
        log.sparse[summary.name] = summary
    elif data.get("event") == "model":
        log.model = PlanningModel.from_json(data)
    elif "knobs" in data:
        best_s = part.measurements[-1].best_s if part.measurements else math.inf
        part.measurements.append(_measurement(data, best_s=best_s))


def _measurement(data: Mapping[str, Any], *, best_s: float) -> Measurement:
    """What one line says; `best_s` was the best before."""
    spans_s = [_positive(span) for span in data.get("spans_s", [data.get("span_s")]) if span is not None]
    best_after_s = _positive_or_none(data.get("best_span_s")) or best_s
    return Measurement(
        iteration=int(data["iteration"]),
        arm=str(data["arm"]),
        purpose=str(data.get("purpose", "trial")),
        knobs=Knobs.from_json(data["knobs"]),
        span_s=median(spans_s) if spans_s else math.inf,
        was_best=bool(data.get("was_best", best_after_s < best_s)),
        best_s=min(best_s, best_after_s),
        credits={str(arm): float(credit) for arm, credit in data.get("auc", {}).items()},
        predicted_s=_positive_or_none(data.get("predicted_s")),
        agreement=None if data.get("agreement") is None else float(data["agreement"]),
        believed=None if data.get("believed") is None else bool(data["believed"]),
    )


def _usual(backward_s: Any, between_s: Any) -> StepTime | None:  # Any: whatever JSON had there
    if backward_s is None or between_s is None:
        return None
    return StepTime(backward_s=float(backward_s), between_s=float(between_s))


def _positive(value: Any) -> float:  # Any: whatever JSON had there
    seconds = float(value)
    if not seconds > 0:
        raise ValueError(f"a time of {seconds} s")
    return seconds


def _positive_or_none(value: Any) -> float | None:  # Any: whatever JSON had there
    return None if value is None else _positive(value)
