"""Generations of a job: how a rank learns the members of the next one, from agents or from surviving ranks."""

from __future__ import annotations

import hashlib
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from sirtaki.comm.control.communicator import Backend, Communicator
from sirtaki.comm.control.mesh_rendezvous import (
    Appointment,
    Attendee,
    Introduction,
    Meeting,
    arrange,
    attendee,
    meet,
    open_places,
)
from sirtaki.comm.control.mpi import Survivors, started_to_survive
from sirtaki.comm.plan import TransportKind
from sirtaki.engine.json_channel import JsonChannel
from sirtaki.engine.launchers import AGENT, started_by_mpi
from sirtaki.engine.settings import Settings
from sirtaki.errors import CommError, ConfigError, LaunchError, PeerLostError
from sirtaki.machine import free_in_forked_children

from .membership import (
    Change,
    Changed,
    Dismissal,
    Dismissed,
    Finished,
    Formed,
    Generation,
    Join,
    Member,
    Membership,
    Patience,
    Proof,
    ToRank,
)

logger = logging.getLogger(__name__)


def load_what_training_needs() -> None:
    """Loads what PyTorch loads with the first optimizer only, and takes as long as PyTorch itself; again is harmless.

    Does nothing where PyTorch is not loaded.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))], lr=0.1)


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


# ── the membership that an agent keeps ───────────────────────────────────────────────────────────────────────────────

LONG_S = 10.0
"""Who computes for longer without looking for changes says so, lest it be taken for one that stands still."""


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
        self._news = free_in_forked_children(threading.Condition())  # for all below
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


# ── the membership of ranks that MPI has started to survive ───────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class _Survivor:
    origin: int
    after: int
    has_state: bool
    introduction: Introduction

    @property
    def attendee(self) -> Attendee:
        return self.introduction.attendee


class SurvivingMembership:
    """The membership of a rank that MPI has started to survive: MPI says who is left, and all of these are wanted."""

    def __init__(self, survivors: Survivors, *, interface: str | None) -> None:
        """`interface`: name of the network interface that joins the hosts; None = any."""
        self._survivors, self._interface = survivors, interface
        self.leave = survivors.leave

    def join(self, *, after: int, has_state: bool, timeout_s: float) -> Generation:
        """Shrink MPI's world to those that are left, and exchange with them where each listens."""
        deadline_s = time.monotonic() + timeout_s
        if after == 0:
            load_what_training_needs()
        lost, own = after > 0, self._survivors.origin
        told: list[_Survivor] = []

        def exchange(mine: Introduction) -> list[Introduction]:
            survivor = _Survivor(origin=own, after=after, has_state=has_state, introduction=mine)
            told[:] = self._survivors.exchange(survivor)
            return [each.introduction for each in told]

        while True:
            if lost:
                self._survivors.shrink(max(0.0, deadline_s - time.monotonic()))
            try:
                name, appointment = arrange(exchange, interface=self._interface, secret=None)
            except PeerLostError:
                lost = True
                continue
            members = in_order(told)
            formed = Formed(
                number=1 + max(each.after for each in told),
                rank=[each.origin for each in members].index(own),
                members=tuple(
                    Member(host="/".join(each.attendee.host), slot=each.origin, is_new=not each.has_state)
                    for each in members
                ),
                attendees=tuple(each.attendee for each in members),
                proof=Proof(job=name, secret=appointment.secret),
            )
            return generation_of(formed, appointment.listeners, self._in_vain)

    def change(self) -> Change:
        """REMOVED once MPI has lost a rank; nobody is added."""
        return Change.REMOVED if self._survivors.lost() else Change(0)

    def on_loss(self, report: Callable[[str], object]) -> None:
        """Nothing to do: MPI tells the control plane itself."""

    def finished(self) -> None:
        """Nothing to do: nobody restarts this job."""

    def _in_vain(self) -> str:
        return "a member of the next generation is lost" if self._survivors.lost() else ""


def in_order(told: list[_Survivor]) -> list[_Survivor]:
    """By rank: as before, but those that hold the job's state come first, as far as a host's ranks are neighbours."""
    hosts = dict.fromkeys(each.attendee.host for each in told)
    there = {host: [each for each in told if each.attendee.host == host] for host in hosts}
    with_state_first = sorted(there.values(), key=lambda members: not any(each.has_state for each in members))
    return [each for members in with_state_first for each in sorted(members, key=lambda each: not each.has_state)]


def open_survivors(settings: Settings, environ: Mapping[str, str] = os.environ) -> SurvivingMembership | None:
    """Collective over MPI's world: the membership of this process; None where mpiexec ends all when one is lost.

    Raises:
        CommError: there is no usable MPI library.
    """
    over_mpi = settings.control is Backend.MPI or settings.transport is TransportKind.MPI
    if over_mpi or not (started_by_mpi(environ) and started_to_survive(environ)):
        return None
    return SurvivingMembership(Survivors(), interface=settings.gloo_interface)


# ── the generations of this process ───────────────────────────────────────────────────────────────────────────────────


class Generations:
    """Which generation this process is in, and how it comes into the next one.

    Attributes:
        current: the one that it is in, or was in last; None = it has been in none.
        has_state: this process holds the job's state.
        tuning: what the generations before have found out.
        leave: ends this process with an exit code, where it leaves others behind or fails.
    """

    def __init__(self, membership: Membership, leave: Callable[[int], object] = os._exit) -> None:
        """Keeps the membership, which is asked by the main thread only."""
        self._membership, self.leave = membership, leave
        self.current: Generation | None = None
        self.has_state = self._dismissed = False
        from .tuning.plans import CarriedTuning  # with PyTorch, which processes that do not train do without

        self.tuning = CarriedTuning()

    @property
    def number(self) -> int:
        """Of the current generation; 0 = none."""
        return 0 if self.current is None else self.current.number

    @property
    def in_step(self) -> bool:
        """All members of the current generation are at one place of the script: all at its start, or none of them."""
        return self.current is not None and len({member.is_new for member in self.current.members}) == 1

    def change(self) -> Change:
        """What has changed since the current generation began; never blocks."""
        return self._membership.change()

    def finished(self) -> None:
        """The script has come to its end in this process, which has not been dismissed."""
        if not self._dismissed:
            self._membership.finished()

    def meet_next(self, settings: Settings) -> Communicator:
        """Collective over the members of the next generation: blocks until they have met.

        A generation that loses a member before all have met is left for the one after it.

        Raises:
            Dismissed: this process is not wanted any more.
            LaunchError: there is no next generation.
        """
        while True:
            begin_s = time.monotonic()
            try:
                self.current = self._membership.join(
                    after=self.number, has_state=self.has_state, timeout_s=settings.elastic_timeout_s
                )
            except Dismissed:
                self._dismissed = True
                raise
            except CommError as err:
                raise LaunchError(f"there is no generation after {self.number} for this rank: {err}") from err
            joined_s = time.monotonic()
            try:
                ranks = meet(
                    self.current.meeting,
                    interface=settings.gloo_interface,
                    secret=settings.secret,
                    timeout_s=settings.start_timeout_s,
                    heartbeat_s=settings.heartbeat_s,
                )
            except CommError as err:
                logger.info("generation %d has ended before all had met: %s", self.number, err)
                continue
            self._membership.on_loss(_failing(ranks))
            logger.info(
                "generation %d: %d ranks; joined in %.0f ms, met in %.0f ms",
                self.number,
                ranks.size,
                1000 * (joined_s - begin_s),
                1000 * (time.monotonic() - joined_s),
            )
            return ranks


def _failing(ranks: Communicator) -> Callable[[str], None]:
    return lambda lost: ranks.failures.report(PeerLostError(lost))


_opener: Callable[[], Membership | None] | None = None


def register(opener: Callable[[], Membership | None] | None) -> None:
    """Before `init()`: who is asked there for the membership of this process, and answers None where ranks stay."""
    global _opener
    _opener = opener


of_process: Generations | None = None
"""Where ranks come and go, and `of_this_process` has been asked: that of this process."""


def of_this_process(settings: Settings) -> Generations | None:
    """Where ranks come and go; None where they stay.

    Collective where mpiexec has started ranks that are to outlive others.

    Raises:
        ConfigError: an agent has started this process's parent, not this process.
        CommError: there is no usable MPI library, though mpiexec has started this process.
    """
    global of_process
    if of_process is None:
        registered = None if _opener is None else _opener()
        membership = registered or open_agent(interface=settings.gloo_interface) or open_survivors(settings)
        if membership is not None:
            leave = membership.leave if isinstance(membership, SurvivingMembership) else os._exit
            of_process = Generations(membership, leave)
    return of_process
