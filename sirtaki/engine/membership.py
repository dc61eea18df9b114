"""Who belongs to a job whose ranks come and go: generations, each a list of ranks, and what ranks and agents say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Flag
from typing import Protocol

from msgspec import Struct

from sirtaki.comm.control.mesh_rendezvous import Attendee, Meeting
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

    def on_loss(self, report: Callable[[str], object]) -> None:
        """Until the next `join`, calls `report` with how the first member has died, once: from any thread, or at once.

        For ranks that wait for who is gone; it need not tell what the control plane finds out by itself.
        """
        ...

    def finished(self) -> None:
        """This rank has done its work: the job is not restarted for its sake."""
        ...


# ── messages between a rank and its agent ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """With what processes of a job prove themselves to each other: its name and its secret."""

    job: str
    secret: str = field(repr=False)


class Join(Struct, tag=True, frozen=True, kw_only=True):
    """The rank asks for the next generation, and listens at the attendee's places."""

    has_state: bool
    attendee: Attendee


class Patience(Struct, tag=True, frozen=True):
    """The rank has computed for so many seconds without looking for changes."""

    seconds: float


class Finished(Struct, tag=True, frozen=True):
    """The rank has done its work."""


class Formed(Struct, tag=True, frozen=True, kw_only=True):
    """The next generation, of which the receiver is rank `rank`; members and attendees by rank."""

    number: int
    rank: int
    members: tuple[Member, ...]
    attendees: tuple[Attendee, ...]
    proof: Proof


class Dismissal(Struct, tag=True, frozen=True):
    """There is no next generation for this rank."""


class Changed(Struct, tag=True, frozen=True):
    """The generation is to change; `lost` says which member has died first, "" = none."""

    change: Change
    lost: str = ""


FromRank = Join | Patience | Finished
ToRank = Formed | Dismissal | Changed
