"""Who belongs to a job whose ranks come and go: generations, each a list of ranks, and what tells of the next one."""

from __future__ import annotations

import hashlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Flag
from typing import Protocol

import msgspec
from msgspec import Struct

from sirtaki.comm.control.mesh_rendezvous import Appointment, Attendee, Meeting, attendee, open_places
from sirtaki.errors import CommError, ConfigError
from sirtaki.json_channel import JsonChannel
from sirtaki.launchers import AGENT


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


_opener: Callable[[], Membership | None] | None = None


def register(opener: Callable[[], Membership | None] | None) -> None:
    """Before `init()`: who is asked there for the membership of this process, and answers None where ranks stay."""
    global _opener
    _opener = opener


def open_membership() -> Membership | None:
    """That of this process; None where ranks stay."""
    return None if _opener is None else _opener()


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


# ── the membership that an agent keeps ───────────────────────────────────────────────────────────────────────────────


def load_what_training_needs() -> None:
    """Loads what PyTorch loads with the first optimizer only, and takes as long as PyTorch itself; again is harmless.

    Does nothing where PyTorch is not loaded.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


LONG_S = 10.0
"""Who computes for longer without looking for changes says so, lest it be taken for one that stands still."""


def name_of(formed: Formed) -> str:
    """Under which the members of a generation meet: nobody else may who was told of another one of its number."""
    places = msgspec.json.encode([each.places for each in formed.attendees])
    return f"{formed.proof.job}/{formed.number}/{hashlib.sha256(places).hexdigest()[:16]}"


def generation_of(formed: Formed, listeners: tuple[socket.socket, ...], in_vain: Callable[[], str]) -> Generation:
    """The generation that has been formed, of which this process is a member; see `Appointment`."""
    appointment = Appointment(
        attendees=formed.attendees, secret=formed.proof.secret, listeners=listeners, in_vain=in_vain
    )
    size, name = len(formed.members), name_of(formed)
    meeting = Meeting(rank=formed.rank, size=size, name=name, appointment=appointment)
    return Generation(number=formed.number, members=formed.members, meeting=meeting)


class Heard:
    """What the agent has said of the present generation.

    Attributes:
        change: since it began.
        lost: which member has died first; "" = none.
    """

    def __init__(self) -> None:
        self.change, self.lost = Change(0), ""

    def hear(self, messages: Sequence[ToRank]) -> Formed | Dismissal | None:
        """Take messages in, and return the answer to a question for the next generation, if it is among them."""
        found = None
        for message in messages:
            if isinstance(message, Changed):
                self.change |= message.change
                self.lost = self.lost or message.lost
            else:
                found, self.change, self.lost = message, Change(0), ""
        return found


class AgentClient:
    """The membership of a rank, as the agent of its host knows it.

    A thread hears the agent, also while this rank waits for others in a collective operation: that a host has vanished
    the driver knows long before the rank's own heartbeat does.
    """

    def __init__(self, sock: socket.socket, *, interface: str | None, one_host: bool = False) -> None:
        """The socket becomes its own.

        Args:
            sock: connected to the agent.
            interface: name of the network interface that joins the hosts; None = any.
            one_host: the job will never have another host.
        """
        self._channel: JsonChannel[ToRank] = JsonChannel(sock, ToRank)
        self._interface, self._one_host = interface, one_host
        self._looked_s, self._longest_s = time.monotonic(), LONG_S
        self._news = threading.Condition()  # for all below
        self._heard = Heard()
        self._answer: Formed | Dismissal | None = None
        self._report: Callable[[str], object] = _nobody
        self._gone = ""
        threading.Thread(target=self._listen, name="sirtaki-agent", daemon=True).start()

    def join(self, *, after: int, has_state: bool, timeout_s: float) -> Generation:
        """Ask the agent for the next generation, and block until it answers."""
        self._look()
        deadline_s = time.monotonic() + timeout_s
        if after == 0:
            load_what_training_needs()
        listeners = open_places(self._interface, loopback_only=self._one_host)
        try:
            self._channel.send(Join(has_state=has_state, attendee=attendee(listeners)))
            answer = self._wait_for_answer(deadline_s)
            if isinstance(answer, Dismissal):
                raise Dismissed("this rank is not wanted any more")
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        return generation_of(answer, listeners, lambda: self._heard.lost)

    def change(self) -> Change:
        """What the agent has told since the present generation began."""
        self._look()
        return self._heard.change

    def on_loss(self, report: Callable[[str], object]) -> None:
        """Until the next `join`, call `report` with how the first member has died, once, from any thread."""
        with self._news:
            self._report, lost = report, self._heard.lost
        if lost:
            report(lost)

    def finished(self) -> None:
        """Tell the agent that this rank has done its work."""
        self._channel.send(Finished())

    def _look(self) -> None:
        """Says how long this rank has not looked, if it never took so long before."""
        now_s = time.monotonic()
        looked_s, self._looked_s = self._looked_s, now_s
        if now_s - looked_s > self._longest_s:
            self._longest_s = now_s - looked_s
            self._channel.send(Patience(round(self._longest_s, 1)))

    def _wait_for_answer(self, deadline_s: float) -> Formed | Dismissal:
        with self._news:
            while self._answer is None and not self._gone and time.monotonic() < deadline_s:
                self._news.wait(min(_FLUSH_S, deadline_s - time.monotonic()))
                self._channel.flush()  # an agent that stands still takes nothing for a while
            answer, self._answer = self._answer, None
        if answer is None and self._gone:
            raise CommError(f"the agent of this host is gone ({self._gone})")
        if answer is None:
            raise CommError("the other ranks of the next generation did not come in time")
        self._looked_s = time.monotonic()
        return answer

    def _listen(self) -> None:
        """The thread: hears the agent as long as it is there."""
        readable = select.poll()
        readable.register(self._channel, select.POLLIN)
        while not self._gone:
            readable.poll()
            report: Callable[[str], object] = _nobody
            try:
                messages = self._channel.receive()
            except ConnectionError as err:
                messages, self._gone = [], str(err)
            with self._news:
                was_lost = self._heard.lost
                if (answer := self._heard.hear(messages)) is not None:
                    self._answer, self._report, was_lost = answer, _nobody, ""
                if (lost := self._heard.lost) and not was_lost:
                    report = self._report
                self._news.notify_all()
            if lost:
                report(lost)
        self._channel.close()


_FLUSH_S = 1.0


def _nobody(lost: str) -> None:
    """Who hears of a loss as long as nobody has asked to."""


def open_agent(*, interface: str | None, environ: Mapping[str, str] = os.environ) -> AgentClient | None:
    """The membership of this process; None where no agent has started it.

    Raises:
        ConfigError: this process has inherited the variable, but not the socket: a script has started it.
    """
    text = environ.get(AGENT, "")
    if not text:
        return None
    descriptor, _, hosts = text.partition(",")
    try:
        sock = socket.socket(fileno=int(descriptor))
        sock.getpeername()
    except (OSError, ValueError) as err:
        raise ConfigError(
            f"{AGENT}={text}, but this process has no socket of that number: is it one that a rank has started? Only "
            "the rank itself may call init() in an elastic job"
        ) from err
    sock.set_inheritable(False)
    return AgentClient(sock, interface=interface, one_host=hosts == "one")
