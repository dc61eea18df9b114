"""What watchers are told, and what a watcher is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationEnded:
    """A training iteration of one optimizer has ended on this rank.

    Attributes:
        number: of the iteration, from 1.
        step_s: since the one before ended; not a number for the first, and after a trial that changed something.
        communication_s: from the first gradient that was ready to the last one that was reduced; on GPUs, of the
            iteration before.
        exposed_s: what of that the backward pass did not hide.
        n_bytes: of the gradients as they travel.
        tuning: the setting that ran was a trial's.
    """

    number: int
    step_s: float
    communication_s: float
    exposed_s: float
    n_bytes: int
    tuning: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnded:
    """The tuner has tried a setting; rank 0 is told.

    Attributes:
        iteration: at which it ended.
        arm: who proposed it.
        setting: in words.
        knobs: as in the trial log.
        communication_s: the shortest measured; infinite if it could not be run.
        best_s: of the best setting so far.
    """

    iteration: int
    arm: str
    setting: str
    knobs: Mapping[str, Any]
    communication_s: float
    best_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The tuner has decided what runs from now on; rank 0 is told.

    Attributes:
        iteration: after which.
        arm: who proposed it.
        setting: in words.
        knobs: as in the trial log.
        default_s: communication time of the untuned default; not a number if it was not measured.
        best_s: of what was decided for.
        n_trials: that were run.
        retune: it is the end of a re-tune.
    """

    iteration: int
    arm: str
    setting: str
    knobs: Mapping[str, Any]
    default_s: float
    best_s: float
    n_trials: int
    retune: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBegun:
    """The ranks of the job are together, for the first time or anew.

    Attributes:
        number: of the generation, from 1; 0 where ranks stay.
        rank: this process's.
        size: how many there are.
    """

    number: int
    rank: int
    size: int


class Watcher:
    """To be derived from; each method does nothing by itself.

    They are called in the thread that trains, so they should be quick. One that raises is told of in the log, and
    removed.
    """

    def iteration(self, event: IterationEnded) -> None:
        """A training iteration has ended."""

    def trial(self, event: TrialEnded) -> None:
        """A setting was tried; on rank 0."""

    def decision(self, event: Decision) -> None:
        """It is decided what runs; on rank 0."""

    def generation(self, event: GenerationBegun) -> None:
        """The ranks are together."""

    def close(self) -> None:
        """The job, or the script, has ended; nothing more is told."""
