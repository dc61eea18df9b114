"""Whether a recorded job fits into a budget of memory, and what makes it fit at the least cost of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sirtaki.errors import RecordingError
from sirtaki.profiler.recording import RankRecording, Recording
from sirtaki.replay.job_model import JobModel
from sirtaki.replay.memory import MemoryReplay, main_device
from sirtaki.replay.remedies import play
from sirtaki.replay.step_times import StepTimes, replayed

from .memory_passes import MemoryPass, MemoryQuestion, MemoryRemedy


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRemedy:
    """A remedy, and what a step takes with it.

    Attributes:
        by: the pass that found it.
        remedy: what is done.
        times: of a step then, with the units that were recorded.
    """

    by: str
    remedy: MemoryRemedy
    times: StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """What is known of a job and its budget.

    Attributes:
        rank: that holds most, and was looked at.
        device: of it.
        budget_bytes: of the device.
        peak_bytes: as it was recorded.
        times: of a step then.
        remedies: the fastest of each pass that fits, the one that needs least of one that does not; the fastest first.
        chosen: None = nothing is needed, or nothing is enough.
    """

    rank: int
    device: str
    budget_bytes: int
    peak_bytes: int
    times: StepTimes
    remedies: tuple[TimedRemedy, ...]
    chosen: TimedRemedy | None

    @property
    def is_met(self) -> bool:
        """By the chosen remedy, or without one."""
        return self.chosen is not None or self.peak_bytes <= self.budget_bytes

    @property
    def least_bytes(self) -> int:
        """The lowest peak of all that was found."""
        return min([self.peak_bytes, *(one.remedy.peak_bytes for one in self.remedies)])

    def applied_to(self, job: JobModel) -> JobModel:
        """The job with what was chosen."""
        return job if self.chosen is None else self.chosen.remedy.apply(job)


def highest_rank(recording: Recording) -> RankRecording:
    """The rank that holds most memory.

    Raises:
        RecordingError: memory was not recorded.
    """
    with_memory = [rank for rank in recording.ranks.values() if rank.memory is not None]
    if not with_memory:
        raise RecordingError(
            "memory is not in this recording, which was made by an older version of Sirtaki or without operators: "
            "record the job anew"
        )
    return max(with_memory, key=lambda rank: memory_replay(rank).peak().n_bytes)


def memory_replay(rank: RankRecording) -> MemoryReplay:
    """Of the device that the rank trains on; its memory is known."""
    assert rank.memory is not None
    return MemoryReplay(rank.memory, main_device(rank.memory))


def fit(recording: Recording, job: JobModel, passes: Sequence[MemoryPass], *, budget_bytes: int) -> Fitting:
    """Looks for the fastest remedy that fits.

    Args:
        recording: memory in it.
        job: the same as it is replayed.
        passes: to be asked; those of last resort where the others do not fit.
        budget_bytes: of the device that ranks train on.

    Raises:
        RecordingError: memory was not recorded.
    """
    rank = highest_rank(recording)
    replay = memory_replay(rank)
    question = MemoryQuestion(replay=replay, modules=rank.modules, budget_bytes=budget_bytes)
    peak_bytes = replay.peak().n_bytes
    found: list[TimedRemedy] = []
    for last_resort in (False, True):
        if peak_bytes > budget_bytes and not _fitting(found, budget_bytes):
            for one in passes:
                if one.last_resort is last_resort:
                    found += _best(one, question, job)
    fitting = sorted(_fitting(found, budget_bytes), key=lambda one: one.times.iteration_s)
    return Fitting(
        rank=rank.rank,
        device=replay.memory.devices[replay.device],
        budget_bytes=budget_bytes,
        peak_bytes=peak_bytes,
        times=replayed(play(job)),
        remedies=(*fitting, *(one for one in found if one not in fitting)),
        chosen=fitting[0] if fitting else None,
    )


def _fitting(found: Sequence[TimedRemedy], budget_bytes: int) -> list[TimedRemedy]:
    return [one for one in found if one.remedy.peak_bytes <= budget_bytes]


def _best(one: MemoryPass, question: MemoryQuestion, job: JobModel) -> Iterator[TimedRemedy]:
    """The fastest that fits; where none does, the one that needs least."""
    answers = list(one.remedies(question))
    fitting = [remedy for remedy in answers if remedy.peak_bytes <= question.budget_bytes]
    least = sorted(answers, key=lambda remedy: remedy.peak_bytes)[:1]
    timed = [
        TimedRemedy(by=one.name, remedy=remedy, times=replayed(play(remedy.apply(job)))) for remedy in fitting or least
    ]
    if timed:
        yield min(timed, key=lambda one: one.times.iteration_s)
