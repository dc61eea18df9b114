"""Tells how sparse gradients travel, once that is decided: to who asks, and in the trial log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sirtaki.autotune.sparse.choice import LEARNING_ITERATIONS, Seen, SparseChoice, Stage
from sirtaki.autotune.sparse.coverage import TouchCounts
from sirtaki.autotune.sparse.summary import SparseSummary, summarise
from sirtaki.autotune.sparse.traffic import Shape
from sirtaki.comm.sparse.rows import RowFormat

from .trial_log import TrialLogWriter

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane


def shape_of(form: RowFormat) -> Shape:
    """A format of rows as the tuner knows it."""
    return Shape(
        n_rows=form.n_rows,
        row_bytes=form.row_bytes,
        item_bytes=form.dtype.itemsize,
        index_bytes=form.index_dtype.itemsize,
    )


@dataclass(slots=True)
class _Tally:
    """What one parameter's first iterations have shown, or those since rows were touched otherwise.

    Attributes:
        looked_up: rows in this rank's gradients, all iterations together.
        counts: how many rows were touched.
        n: iterations in which any were.
        mean: `looked_up` in an iteration, mean over the ranks; None until they have said it.
        told: which way is taken then.
    """

    looked_up: int = 0
    counts: TouchCounts = field(default_factory=TouchCounts)
    n: int = 0
    mean: float | None = None
    told: bool = False


class SparseTelling:
    """Of the sparse gradients of one reducer.

    Attributes:
        summaries: by name; of those whose way is decided, the same on all ranks.
    """

    def __init__(self, control: ControlPlane, *, trial_log: str | None) -> None:
        """`trial_log`: where rank 0 writes; None = nowhere."""
        self._control = control
        self._log = TrialLogWriter(trial_log if control.rank == 0 else None)
        self._tallies: dict[str, _Tally] = {}
        self._iterations = 0
        self.summaries: dict[str, SparseSummary] = {}

    def begin(self, name: str) -> None:
        """Nothing is known of this parameter."""
        self._tallies[name] = _Tally()
        self.summaries.pop(name, None)

    def tell_again(self, name: str) -> None:
        """Its way is another one, though nothing else has changed: it is told once more."""
        self._tallies[name].told = False

    def look_up(self, name: str, n: int) -> None:
        """This rank's gradient has `n` rows, the same one several times."""
        tally = self._tallies[name]
        if tally.n < LEARNING_ITERATIONS:
            tally.looked_up += n

    def note(self, name: str, seen: Seen, choice: SparseChoice) -> None:
        """An iteration is over, and the choice knows of it."""
        tally = self._tallies[name]
        if tally.told and choice.stage is Stage.LEARN:
            tally = self._tallies[name] = _Tally()
        elif tally.n < LEARNING_ITERATIONS and seen.n_touched:
            tally.counts.note_totals(seen.n_touched, seen.n_touched / self._control.size, seen.union)
            tally.n += 1

    def end_iteration(self, choices: Mapping[str, SparseChoice], forms: Mapping[str, RowFormat]) -> None:
        """Collective once a parameter's first iterations are over, which all ranks see alike."""
        self._iterations += 1
        tallies = {name: self._tallies[name] for name in choices}
        if due := [tally for tally in tallies.values() if tally.mean is None and tally.n == LEARNING_ITERATIONS]:
            self._agree(due)
        for name, tally in tallies.items():
            choice = choices[name]
            if tally.mean is not None and choice.stage is Stage.KEEP and not tally.told:
                tally.told = True
                self.summaries[name] = summary = summarise(
                    choice,
                    shape_of(forms[name]),
                    name=name,
                    width=forms[name].width,
                    ranks=self._control.size,
                    looked_up=tally.mean,
                    counts=tally.counts,
                )
                self._log.sparse(summary, iteration=self._iterations)

    def _agree(self, tallies: Iterable[_Tally]) -> None:
        """Collective."""
        due = list(tallies)
        totals = self._control.total(np.array([float(tally.looked_up) for tally in due])).tolist()
        for tally, total in zip(due, totals, strict=True):
            tally.mean = total / (LEARNING_ITERATIONS * self._control.size)

    def close(self) -> None:
        """Closes the log."""
        self._log.close()
