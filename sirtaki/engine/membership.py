"""Membership of an elastic job: generations (lists of ranks), and the messages between a rank and its agent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Flag
from typing import Protocol

from msgspec import Struct

from sirtaki.comm.control.mesh_rendezvous import Attendee, Meeting
from sirtaki.errors import CommError


class Dismissed(CommError):
    """Raised in a rank that the job does not need any more. The rank exits with code 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank of a generation.

    Attributes:
        host: host name as used by the launcher.
        slot: index of the rank on its host, constant while the process lives. Slots are unique per host and may
            have gaps where ranks have exited.
        is_new: the rank does not hold the job's state: it has not synchronised in any generation.
    """

    host: str
    slot: int
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One membership of an elastic job. It ends when a member is lost or when ranks are added.

    Ranks of one host are adjacent. Under this constraint, members that hold the job's state come first, in their
    previous order; so rank 0 holds the state unless all members are new. If any member is new, all members must
    synchronise, even if the previous generation reported no added rank.

    Attributes:
        number: id of the generation, ascending from 1.
        members: members in rank order.
        meeting: rendezvous of the members, with this process's rank.
    """

    number: int
    members: tuple[Member, ...]
    meeting: Meeting


class Change(Flag):
    """Difference between the current and the next generation."""

    ADDED = 1
    REMOVED = 2


class Membership(Protocol):
    """Membership service of a rank, provided by the agent that is the rank's parent. Call from one thread at a time."""

    def join(self, *, after: int, has_state: bool, timeout_s: float) -> Generation:
        """Join the next generation. Blocks until all its members have called `join`.

        Args:
            after: number of the generation that this rank leaves. 0 if it has been in none.
            has_state: this rank has synchronised in some generation, so it holds the job's state. A rank without the
                state must not become the rank whose state the others copy.
            timeout_s: maximum wait in seconds.

        Raises:
            Dismissed: the job does not need this rank any more.
            CommError: there is no next generation: too few hosts remain, or the agent has exited.
        """
        ...

    def change(self) -> Change:
        """Return what has changed since the current generation began; 0 means no change. Non-blocking.

        The result contains REMOVED if a member has died. A rank that does not communicate, or that waits for a
        connection, learns of the death only here.
        """
        ...

    def on_loss(self, report: Callable[[str], object]) -> None:
        """Call `report` once with the cause of the first death of a member, until the next `join`.

        `report` runs in any thread, possibly before `on_loss` returns. It ends waits for a dead rank. Deaths that the
        control plane detects itself need not be reported.
        """
        ...

    def finished(self) -> None:
        """Report that this rank has completed its work, so that the job is not restarted when it exits."""
        ...


# ── messages between a rank and its agent ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Credentials with which processes of a job authenticate to each other: the job's id and its secret."""

    job: str
    secret: str = field(repr=False)


class Join(Struct, tag=True, frozen=True, kw_only=True):
    """Request of a rank for the next generation. The rank listens at the addresses in `attendee`."""

    has_state: bool
    attendee: Attendee


class Patience(Struct, tag=True, frozen=True):
    """Report of a rank that it computed for `seconds` without polling for membership changes."""

    seconds: float


class Finished(Struct, tag=True, frozen=True):
    """Report of a rank that it has completed its work."""


class Formed(Struct, tag=True, frozen=True, kw_only=True):
    """The next generation, sent to its member `rank`. `members` and `attendees` are in rank order."""

    number: int
    rank: int
    members: tuple[Member, ...]
    attendees: tuple[Attendee, ...]
    proof: Proof


class Dismissal(Struct, tag=True, frozen=True):
    """Answer to `Join`: there is no next generation for this rank."""


class Changed(Struct, tag=True, frozen=True):
    """Notification that the generation is about to change. `lost`: how the first dead member died, "" if none died."""

    change: Change
    lost: str = ""


FromRank = Join | Patience | Finished
ToRank = Formed | Dismissal | Changed
