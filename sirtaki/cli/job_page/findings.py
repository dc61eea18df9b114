"""All that the page says of a recording, as far as it can be found out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from sirtaki.autotune.model.replayer import Replay
from sirtaki.errors import ConfigError, PlanError, RecordingError, ReplayError
from sirtaki.optimizer.budget import Fitting, fit, highest_rank, memory_replay
from sirtaki.optimizer.memory_passes import memory_passes
from sirtaki.profiler.alignment import align
from sirtaki.profiler.folder import of_ranks, read
from sirtaki.profiler.recording import Detail, Recording
from sirtaki.profiler.summary import summary
from sirtaki.replay.critical_path import Part, parts
from sirtaki.replay.from_recording import job_model
from sirtaki.replay.histories import Histories, histories
from sirtaki.replay.job_model import JobModel
from sirtaki.replay.remedies import Answer, play, price_error, price_notes, single_remedies, unanswered
from sirtaki.replay.step_times import StepTimes, recorded, replayed

BUDGETS = (0.75, 0.5)
"""Of the peak of memory."""

FAR = 0.05
"""A replay that is further from the recording is not believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The recorded iterations, replayed.

    Attributes:
        replay: of all of them.
        times: of a step in it.
        parts: of its critical path.
        answers: what each single remedy would bring; empty where the replay is not believed.
        price_error: by which share of a step what is said of other units may be wrong.
        notes: what it takes for granted, and what it cannot answer, a sentence each.
        fittings: what would lower the peak of memory to shares of it; empty where it is not recorded.
    """

    replay: Replay
    times: StepTimes
    parts: tuple[Part, ...]
    answers: tuple[Answer, ...]
    price_error: float
    notes: tuple[str, ...]
    fittings: tuple[Fitting, ...] = ()

    def is_sure(self, one: Answer) -> bool:
        """It would change more than it may be wrong by, as far as that is known."""
        return not one.is_priced or abs(one.gain) > abs(self.price_error)

    @property
    def best(self) -> Answer | None:
        """The remedy that brings most and is sure to; None = none brings anything."""
        return next((one for one in self.answers if one.is_worth_saying and self.is_sure(one)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What there is.

    Attributes:
        folder: that it comes from.
        lines: what was recorded, and of whom, how clocks were aligned.
        problems: what is missing or wrong, a sentence each.
        histories: of the iterations that are shown.
        times: of a step as it was recorded.
        played: None where it cannot be replayed; then `problems` says why.
    """

    folder: Path
    lines: tuple[str, ...]
    problems: tuple[str, ...]
    histories: Histories
    times: StepTimes
    played: Played | None

    @property
    def has_operators(self) -> bool:
        """Of every rank."""
        return all(rank.detail is Detail.OPERATORS for rank in self.histories.recording.ranks.values())

    @property
    def error(self) -> float:
        """How much longer than the recorded step the replayed one is, as a share of it; 0 where there is none."""
        return self.played.times.iteration_s / self.times.iteration_s - 1 if self.played is not None else 0.0

    @property
    def is_far(self) -> bool:
        """The replay is too far from the recording to be believed."""
        return abs(self.error) > FAR


def findings(folder: Path) -> Findings:
    """Reads a recording and replays it.

    Raises:
        RecordingError: there is nothing to show.
    """
    recording = read(folder)
    lines = tuple(line.strip() for line in takewhile(bool, summary(recording, align(recording))))
    shown, problems = _comparable(recording)
    found = histories(shown)
    times = recorded(found)
    played = None
    try:
        played = _played(found, times)
    except (ConfigError, PlanError, ReplayError) as err:
        problems.append(f"what is here cannot be replayed: {err}")
    return Findings(
        folder=folder,
        lines=tuple(line for line in lines if not line.startswith("but: ")),
        problems=(*recording.problems, *problems),
        histories=found,
        times=times,
        played=played,
    )


def _played(found: Histories, was: StepTimes) -> Played:
    job = job_model(found)
    replay = play(job)
    now = replayed(replay)
    error = price_error(job, before_s=now.iteration_s)
    believed = abs(now.iteration_s - was.iteration_s) <= FAR * was.iteration_s
    return Played(
        replay=replay,
        times=now,
        parts=parts(replay),
        answers=single_remedies(job, before_s=now.iteration_s) if believed else (),
        price_error=error,
        notes=(*job.notes, *unanswered(job), *price_notes(error)),
        fittings=_fittings(found, job) if believed else (),
    )


def _fittings(histories: Histories, job: JobModel) -> tuple[Fitting, ...]:
    try:
        most = memory_replay(highest_rank(histories.recording)).peak().n_bytes
    except RecordingError:
        return ()
    shares = [round(share * most) for share in BUDGETS]
    return tuple(fit(histories.recording, job, memory_passes(), budget_bytes=budget) for budget in shares)


def _comparable(recording: Recording) -> tuple[Recording, list[str]]:
    """The ranks that have an iteration in common, as many as there are, and what is left out.

    Raises:
        RecordingError: there is no iteration.
    """
    usual = {
        number: {one.number for one in rank.iterations if one.is_usual} for number, rank in recording.ranks.items()
    }
    count = Counter(number for numbers in usual.values() for number in numbers)
    if not count:
        raise RecordingError(
            "no iteration was recorded, so there is nothing to show: the job has ended too soon after its warm-up"
        )
    best = min(count, key=lambda number: (-count[number], number))
    kept = {number: rank for number, rank in recording.ranks.items() if best in usual[number]}
    return replace(recording, ranks=kept), list(_left_out([number for number in usual if number not in kept]))


def _left_out(ranks: list[int]) -> Iterator[str]:
    if ranks:
        has, is_ = ("has", "is") if len(ranks) == 1 else ("have", "are")
        yield f"{of_ranks(ranks)} {has} no iteration that most others have recorded, and {is_} left out"
