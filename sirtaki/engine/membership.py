"""Membership of an elastic job: generations (lists of ranks), and the messages between a rank and its agent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Flag
from typing import Protocol

from msgspec import Struct

from sirtaki.comm.control.members import Listeners, Member, Membership, connect_members
from sirtaki.comm.control.mesh import MeshCommunicator
from sirtaki.comm.control.waiting import Deadline
from sirtaki.errors import CommError


class Dismissed(CommError):
    """Raised in a rank that the job does not need any more. The rank exits with code 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One membership of an elastic job, as this process connects to it. It ends when its members change.

    Ranks of one host are adjacent. Under this constraint, members that hold the job's state precede new ones, in their
    previous order. So rank 0 holds the state unless all members are new. If any member is new, all members must
    synchronise, even if the previous generation reported no added rank.

    Attributes:
        membership: its ranks, and the generation's number, which ascends from 1.
        rank: rank of this process.
        listeners: sockets at which this process accepts connections of its peers.
        why_in_vain: returns why a member will not connect, "" if all may. Non-blocking.
    """

    membership: Membership
    rank: int
    listeners: Listeners = field(default=(), repr=False)
    why_in_vain: Callable[[], str] = field(default=lambda: "", repr=False)

    def connect(self, *, timeout_s: float, heartbeat_s: float | None) -> MeshCommunicator:
        """Connect all members pairwise, see `connect_members`. Collective."""
        return connect_members(
            self.membership,
            self.listeners,
            rank=self.rank,
            deadline=Deadline.after(timeout_s),
            heartbeat_s=heartbeat_s,
            why_in_vain=self.why_in_vain,
        )


class Change(Flag):
    """Difference between the current and the next generation."""

    ADDED = 1
    REMOVED = 2


class MembershipSource(Protocol):
    """Source of the generations of a rank: the agent of its host, or MPI. Call from one thread at a time."""

    def join(self, *, after: int, has_state: bool, timeout_s: float) -> Generation:
        """Join the next generation. Blocks until all its members have called `join`.

        Args:
            after: number of the generation that this rank leaves. 0 if it has been in none.
            has_state: this rank has synchronised in some generation, so it holds the job's state. A rank without the
                state must not become the rank whose state all members copy.
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
    """Credentials for authentication between processes of a job: the job's id and its secret."""

    job: str
    secret: str = field(repr=False)


class Join(Struct, tag=True, frozen=True, kw_only=True):
    """The rank asks for the next generation. Its slot and number are not set."""

    member: Member


class Patience(Struct, tag=True, frozen=True):
    """Report of a rank that it computed for `seconds` without polling for membership changes."""

    seconds: float


class Finished(Struct, tag=True, frozen=True):
    """Report of a rank that it has completed its work."""


class Formed(Struct, tag=True, frozen=True, kw_only=True):
    """The next generation, in which the receiver has rank `rank`."""

    rank: int
    membership: Membership


class Dismissal(Struct, tag=True, frozen=True):
    """Answer to `Join`: there is no next generation for this rank."""


class Changed(Struct, tag=True, frozen=True):
    """Notification that the generation is about to change. `lost`: how the first dead member died, "" if none died."""

    change: Change
    lost: str = ""


FromRank = Join | Patience | Finished
ToRank = Formed | Dismissal | Changed
