"""Who belongs to a job whose ranks come and go: generations, each a list of ranks, and what tells of the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag
from typing import Protocol

from sirtaki.comm.control.mesh_rendezvous import Meeting
from sirtaki.errors import CommError


class Dismissed(CommError):
    """This rank is not wanted any more: it leaves, and with exit code 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank of a generation.

    Attributes:
        host: as the launcher calls it.
        slot: its place on that host, for as long as it lives; other ranks of the host have other ones, with gaps
            where some have gone.
        is_new: it does not hold the job's state: it was in no generation before, or in one that ended too soon.
    """

    host: str
    slot: int
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One membership: ranks that start together and end as soon as one of them is lost, or others come.

    Members that hold the job's state keep their order and come first, as far as ranks of a host are neighbours; rank 0
    is one of them, unless all are new. Where any is new all must synchronise, whatever was known of changes when they
    left the one before: a rank may come in between.

    Attributes:
        number: from 1, growing.
        members: by rank.
        meeting: where they meet, with this process's rank.
    """

    number: int
    members: tuple[Member, ...]
    meeting: Meeting


class Change(Flag):
    """What the next generation would differ in."""

    ADDED = 1
    REMOVED = 2


class Membership(Protocol):
    """What a rank asks of the agent that is its parent; from one thread at a time."""

    def join(self, *, after: int, has_state: bool, timeout_s: float) -> Generation:
        """Not collective, but completes only once all members of the next generation have called it. Blocks.

        Args:
            after: number of the generation that this rank leaves; 0 = it has been in none.
            has_state: this rank holds the job's state: it has synchronised in some generation. Who has been killed
                before that must not become the one whose state all take.
            timeout_s: how long to wait.

        Raises:
            Dismissed: this rank is not wanted any more.
            CommError: there is no next generation: too few hosts are left in time, or the agent is gone.
        """
        ...

    def change(self) -> Change:
        """Cheap, never blocks: what has changed since the present generation began; 0 = nothing.

        REMOVED also where a member has died: who notices nothing of it, since it communicates with nobody just now or
        waits for a connection, learns it here.
        """
        ...

    def finished(self) -> None:
        """This rank has done its work: the job is not restarted for its sake."""
        ...


_opener: Callable[[], Membership | None] | None = None


def register(opener: Callable[[], Membership | None] | None) -> None:
    """Before `init()`: who is asked there for the membership of this process, and answers None where ranks stay."""
    global _opener
    _opener = opener


def open_membership() -> Membership | None:
    """That of this process; None where ranks stay."""
    return None if _opener is None else _opener()
