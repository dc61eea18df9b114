"""The processes of a job whose ranks come and go, dead ones left out, and the order in which they become ranks."""

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """How far a process is."""

    STARTING = "starting"  # it has not asked for a generation yet
    WAITING = "waiting"  # it has
    MEMBER = "member"  # it was given one
    FINISHED = "finished"  # it has done its work
    DISMISSED = "dismissed"  # it was told, or made, to end


@dataclass(slots=True, kw_only=True)
class Worker:
    """A process that is there.

    Attributes:
        number: names it in this job.
        rank: in the generation that it is or was in last; None = in none.
        generation: that one's number, 0 = none.
        has_state: it holds the job's state.
        is_leaving: it is not wanted any more.
        since_s: when its phase began.
        verdict: why it was killed, as part of a sentence; "" = it was not.
    """

    number: int
    host: str
    slot: int
    phase: Phase = Phase.STARTING
    rank: int | None = None
    generation: int = 0
    has_state: bool = False
    is_leaving: bool = False
    since_s: float = 0.0
    verdict: str = ""

    @property
    def label(self) -> str:
        """As the user is told of it."""
        who = "a new rank" if self.rank is None else f"rank {self.rank}"
        return f"{who} (host {self.host}, slot {self.slot})"

    def enter(self, phase: Phase, now_s: float) -> None:
        """From now on it is in that phase."""
        self.phase, self.since_s = phase, now_s


def seniority(worker: Worker) -> tuple[bool, int, int, int]:
    """Sorts those first that hold the state, of the newest generation, in the order of its ranks; new ones by age."""
    return not worker.has_state, -worker.generation, 0 if worker.rank is None else worker.rank, worker.number


def ranked(workers: Iterable[Worker], hosts: Sequence[str]) -> list[Worker]:
    """The order of ranks: ranks of a host are neighbours; who holds the state comes first and keeps its order.

    Args:
        workers: the members to be.
        hosts: the order of hosts, as far as state and former ranks do not say otherwise.
    """
    place = {host: number for number, host in enumerate(hosts)}

    def own(worker: Worker) -> tuple[bool, int, int, int, int]:
        return *seniority(worker)[:3], place.get(worker.host, len(place)), worker.slot

    ordered = sorted(workers, key=own)
    first: dict[str, int] = {}
    for number, worker in enumerate(ordered):
        first.setdefault(worker.host, number)
    return sorted(ordered, key=lambda worker: first[worker.host])  # stable


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How a process has ended.

    Attributes:
        exit_code: as a shell has it, 128 + the signal's number.
        reason: what it has said of it, or what its agent has seen; "" = nothing.
    """

    exit_code: int
    reason: str = ""

    @property
    def is_signal(self) -> bool:
        """It was killed."""
        return self.exit_code > 128

    @property
    def text(self) -> str:
        """As part of a sentence."""
        if self.is_signal:
            try:
                name = signal.Signals(self.exit_code - 128).name
            except ValueError:
                name = f"signal {self.exit_code - 128}"
            return f"was killed by {name}"
        if not self.exit_code:
            return "ended"
        return f"failed ({self.reason or f'exit code {self.exit_code}'})"
