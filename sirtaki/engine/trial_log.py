"""One JSON object a line for everything that the warm-up ran: for `sirtaki report`, and for people who grep."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.meta.assignment import Assignment, SessionResult
from sirtaki.autotune.model.forecast import Forecast
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.sparse.summary import SparseSummary

from .step_times import StepTime

logger = logging.getLogger(__name__)

VERSION = 2
"""Of the format; 1 had neither `version` and `tuner` nor predictions."""


@functools.cache
def _process() -> str:
    """The same for all optimizers of this process."""
    return uuid.uuid4().hex[:8]


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
        self._write(
            {
                "event": "retune",
                "iteration": iteration,
                "ratio": ratio if math.isfinite(ratio) else None,
                "running": running.to_json(),
            }
        )

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
                "spans_s": [span if math.isfinite(span) else None for span in spans_s],
                "best_span_s": best_span_s if math.isfinite(best_span_s) else None,
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
                "default_span_s": result.default_span_s,
                "best_span_s": result.best_span_s,
                "noise_s": result.noise_s,
                "n_trials": result.n_trials,
                "reason": result.reason,
                "tuned": result.tuned,
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
