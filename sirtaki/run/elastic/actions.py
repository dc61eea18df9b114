"""What the rules of membership want done; who does it reports back what became of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from sirtaki.engine.membership import Change


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgent:
    """Start the agent of a host."""

    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAgent:
    """The host is not used any more, and no rank is left there."""

    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRank:
    """Start a process.

    Attributes:
        worker: names it in this job; no other one has had the number.
    """

    worker: int
    host: str
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRank:
    """End a process with all it has started.

    Attributes:
        at_once: without asking it first.
    """

    worker: int
    host: str
    at_once: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss:
    """Answer the rank that waits for a generation: it is not wanted any more."""

    worker: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Let members know that the generation is to change.

    Attributes:
        lost: which member has died first, for who waits for it; "" = none.
    """

    workers: tuple[int, ...]
    change: Change
    lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Answer all that wait: this is their generation.

    Attributes:
        workers: by rank.
        new: those of them that do not hold the job's state.
        older: see `Quorum`; None = nobody takes a lost driver's place.
    """

    number: int
    workers: tuple[int, ...]
    new: frozenset[int]
    older: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """Let all agents know which generations before the newest may still count.

    Attributes:
        number: of the newest.
        older: see `Quorum`.
    """

    number: int
    older: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """A line for the user."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The job has ended; nothing follows.

    Attributes:
        text: why, for the user; "" = as it should.
    """

    exit_code: int
    text: str = ""


Action = StartAgent | StopAgent | StartRank | KillRank | Dismiss | Tell | Form | Settle | Say | End
