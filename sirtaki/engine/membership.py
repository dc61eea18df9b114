"""Membership of an elastic job: its ranks, and the messages between a rank and the process that starts it (agent).

The list of ranks between two elastic restarts is a generation.
"""

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
    """The elastic job does not need this rank any more. The rank must exit with code 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One generation of an elastic job: its ranks until the next elastic restart, and the rank of this process.

    Ranks of one host are adjacent. Under this constraint, ranks that hold the training state (such as weights) precede
    new ones, and keep their previous order. So rank 0 holds the state unless all ranks are new. If any rank is new, all
    ranks must synchronise their state, even if no added rank was reported before.

    Attributes:
        membership: ranks of the generation, and its number, which ascends from 1.
        rank: rank of this process.
        listeners: sockets at which this process accepts connections of its peers.
        why_in_vain: function that returns why some rank will certainly not connect, otherwise "". Non-blocking.
    """

    membership: Membership
    rank: int
    listeners: Listeners = field(default=(), repr=False)
    why_in_vain: Callable[[], str] = field(default=lambda: "", repr=False)

    def connect(self, *, timeout_s: float, heartbeat_s: float | None) -> MeshCommunicator:
        """Connect all pairs of ranks of the generation. Collective."""
        return connect_members(
            self.membership,
            self.listeners,
            rank=self.rank,
            deadline=Deadline.after(timeout_s),
            heartbeat_s=heartbeat_s,
            why_in_vain=self.why_in_vain,
        )


class Change(Flag):
    """Kinds of changes of the set of ranks since the last elastic restart: ranks were added, or ranks were removed."""

    ADDED = 1
    REMOVED = 2


class MembershipSource(Protocol):
    """Source from which a rank learns which ranks an elastic job has: MPI, or the agent (process that started the
    rank).

    Call from one thread at a time.
    """

    def join(self, *, after: int, has_state: bool, timeout_s: float) -> Generation:
        """Join the next generation (the set of ranks after an elastic restart). Blocks until all its ranks have called
        `join`.

        Args:
            after: number of the generation that this rank leaves. 0 if the rank has not been in one.
            has_state: True if this rank has synchronised in an earlier generation, so that it holds the training state
                (such as weights). A rank without this state must not become the rank whose state all ranks copy.
            timeout_s: maximum wait in seconds.

        Raises:
            Dismissed: the job does not need this rank any more.
            CommError: there is no next generation, because too few hosts remain, or because the agent has exited.
        """
        ...

    def change(self) -> Change:
        """Return how the set of ranks has changed since the last elastic restart. 0 means no change. Non-blocking.

        The result contains REMOVED if a rank has died. A rank that does not communicate, or that waits for a
        connection, learns of the death only by this method.
        """
        ...

    def on_loss(self, report: Callable[[str], object]) -> None:
        """Set the function to call when a rank dies. The next `join` removes it.

        `report` is called once, with the cause of the first death, in any thread, possibly before `on_loss` returns. It
        ends waits for the dead rank. Deaths that the control plane (the channel for messages between ranks) detects
        itself need not be reported.
        """
        ...

    def finished(self) -> None:
        """Report that this rank has completed its work, so that the job is not restarted when the rank exits."""
        ...


# ── messages between a rank and its agent ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Credentials for authentication between processes of a job: the job's id and its secret."""

    job: str
    secret: str = field(repr=False)


class Join(Struct, tag=True, frozen=True, kw_only=True):
    """Request of a new rank to its agent (the process that started it): to join the job at the next elastic restart.

    The agent knows the slot and number, so that they are not set in `member`.
    """

    member: Member


class Patience(Struct, tag=True, frozen=True):
    """Report of a rank of an elastic job to the process that started it (agent): the rank has computed for `seconds`
    without polling for membership changes, but does not hang.
    """

    seconds: float


class Finished(Struct, tag=True, frozen=True):
    """Report of a rank of an elastic job to the process that started it (agent): its script has completed."""


class Formed(Struct, tag=True, frozen=True, kw_only=True):
    """Answer to a rank's `Join` request: the ranks after the elastic restart. The receiver has rank `rank`."""

    rank: int
    membership: Membership


class Dismissal(Struct, tag=True, frozen=True):
    """Answer to a rank's `Join` request: the rank must exit, because the elastic job goes on
    without it or has ended.
    """


class Changed(Struct, tag=True, frozen=True):
    """Notification to a rank that the set of ranks of its elastic job will change. `lost` says how the first dead rank
    died; "" if none died.
    """

    change: Change
    lost: str = ""


FromRank = Join | Patience | Finished
ToRank = Formed | Dismissal | Changed
