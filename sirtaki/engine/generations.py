"""Membership of a rank in an elastic job: after each elastic restart, the rank obtains the new set of ranks.

This set of ranks does not change until the next elastic restart. The time between two restarts is a generation. A rank
obtains the set from its agent (the process that starts the ranks of its host) or from MPI.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sirtaki.comm.control.communicator import Backend, Communicator
from sirtaki.comm.control.members import Member, introduce, listening, open_listeners
from sirtaki.comm.control.mpi import Survivors, started_to_survive
from sirtaki.comm.control.waiting import start_thread
from sirtaki.comm.plan import TransportKind
from sirtaki.engine.json_channel import JsonChannel
from sirtaki.engine.launchers import AGENT, started_by_mpi
from sirtaki.engine.settings import Settings
from sirtaki.errors import CommError, ConfigError, LaunchError, PeerLostError, ResourceLimitError
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
    MembershipSource,
    Patience,
    ToRank,
)

logger = logging.getLogger(__name__)


def load_what_training_needs() -> None:
    """Import the modules that PyTorch imports when the first optimizer is created. Idempotent.

    The import takes as long as that of PyTorch. A rank calls this function before it joins, so that other ranks do not
    wait for the import later. Does nothing if PyTorch is not imported.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))], lr=0.1)


# ── jobs with agents ─────────────────────────────────────────────────────────────────────────────────────────────────

LONG_S = 10.0
"""Time in seconds without a poll for membership changes that a rank reports to its agent (the process that started it).

The agent kills a rank that has not polled for much longer than any reported time, because the rank counts as hanging.
"""


class AgentNews:
    """What the agent (the process that started this rank) has reported about the set of ranks since the last elastic
    restart.

    Attributes:
        change: kinds of membership changes (ranks added, ranks removed) since that restart.
        lost: how the first rank of the set died. "" if none died.
    """

    def __init__(self) -> None:
        self.change, self.lost = Change(0), ""

    def update(self, messages: Sequence[ToRank]) -> Formed | Dismissal | None:
        """Record messages of the agent (the process that started this rank). If they include the answer to this rank's
        request to join, return the answer.
        """
        found = None
        for message in messages:
            if isinstance(message, Changed):
                self.change |= message.change
                self.lost = self.lost or message.lost
            else:
                found, self.change, self.lost = message, Change(0), ""
        return found


class AgentClient:
    """Obtains the ranks of an elastic job from the agent: the process on the same host that has started this rank.

    A thread receives the agent's messages, also while this rank waits in a collective operation. The driver (launcher
    process) detects that a host is lost long before heartbeats between ranks do. The agent forwards the driver's report
    to this rank.
    """

    def __init__(self, sock: socket.socket, *, interface: str | None, one_host: bool = False) -> None:
        """Take ownership of the socket.

        Args:
            sock: socket connected to the agent, the process that started this rank.
            interface: name of the network interface that connects the hosts. None for any.
            one_host: True if the job will never have another host.
        """
        self._channel: JsonChannel[ToRank] = JsonChannel(sock, ToRank)
        self._interface, self._one_host = interface, one_host
        self._looked_s, self._longest_s = time.monotonic(), LONG_S
        # This condition guards all attributes that are set after this line.
        self._changed = free_in_forked_children(threading.Condition())
        self._agent_news = AgentNews()
        self._answer: Formed | Dismissal | None = None
        self._report: Callable[[str], object] = _ignore
        self._closed = ""
        start_thread(threading.Thread(target=self._receive, name="sirtaki-agent", daemon=True))

    def join(self, *, after: int, has_state: bool, timeout_s: float) -> Generation:
        """Ask the agent (the process that started this rank) for the ranks after an elastic restart, and wait for the
        answer.
        """
        self._record_poll()
        deadline_s = time.monotonic() + timeout_s
        if after == 0:
            load_what_training_needs()
        listeners = open_listeners(self._interface, loopback_only=self._one_host)
        try:
            self._channel.send(Join(member=listening(Member(has_state=has_state), listeners)))
            answer = self._wait_for_answer(deadline_s)
            if isinstance(answer, Dismissal):
                raise Dismissed("the launcher answered that the job does not need this rank any more")
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        return Generation(
            membership=answer.membership,
            rank=answer.rank,
            listeners=listeners,
            why_in_vain=lambda: self._agent_news.lost,
        )

    def change(self) -> Change:
        """Return the membership changes that the agent (the process that started this rank) has reported since the last
        elastic restart.
        """
        self._record_poll()
        return self._agent_news.change

    def on_loss(self, report: Callable[[str], object]) -> None:
        """Set the function `report`, which is called once, with the cause, when the first rank dies before the next
        `join`. It may be called in any thread.
        """
        with self._changed:
            self._report, lost = report, self._agent_news.lost
        if lost:
            report(lost)

    def finished(self) -> None:
        """Report to the agent (the process that started this rank) that this rank has completed its work."""
        self._channel.send(Finished())

    def _record_poll(self) -> None:
        """Record the time of this poll for membership changes.

        Report the time since the last poll to the agent if it is longer than all earlier ones.
        """
        now_s = time.monotonic()
        looked_s, self._looked_s = self._looked_s, now_s
        if now_s - looked_s > self._longest_s:
            self._longest_s = now_s - looked_s
            self._channel.send(Patience(round(self._longest_s, 1)))

    def _wait_for_answer(self, deadline_s: float) -> Formed | Dismissal:
        with self._changed:
            while self._answer is None and not self._closed and time.monotonic() < deadline_s:
                self._changed.wait(min(_FLUSH_S, deadline_s - time.monotonic()))
                self._channel.flush()  # Send data that remained unsent because the agent was stopped (SIGSTOP).
            answer, self._answer = self._answer, None
        if answer is None and self._closed:
            raise CommError(
                f"the agent (launcher's process that starts this host's ranks) has exited ({self._closed}); see the "
                "launcher's output for the cause"
            )
        if answer is None:
            raise CommError(
                "the launcher did not announce the next set of ranks of the elastic job in time; increase "
                "HOROVOD_ELASTIC_TIMEOUT (seconds), or add hosts"
            )
        self._looked_s = time.monotonic()
        return answer

    def _receive(self) -> None:
        """Receive messages of the agent (the process that started this rank) until the connection is closed. Runs in a
        thread of its own.
        """
        readable = select.poll()
        readable.register(self._channel, select.POLLIN)
        while not self._closed:
            readable.poll()
            report: Callable[[str], object] = _ignore
            try:
                messages = self._channel.receive()
            except ConnectionError as err:
                messages, self._closed = [], str(err)
            with self._changed:
                was_lost = self._agent_news.lost
                if (answer := self._agent_news.update(messages)) is not None:
                    self._answer, self._report, was_lost = answer, _ignore, ""
                if (lost := self._agent_news.lost) and not was_lost:
                    report = self._report
                self._changed.notify_all()
            if lost:
                report(lost)
        self._channel.close()


_FLUSH_S = 1.0


def _ignore(lost: str) -> None:
    """Do nothing. Used as the `on_loss` callback while none is set."""


def open_agent(*, interface: str | None, environ: Mapping[str, str] = os.environ) -> AgentClient | None:
    """Open the connection to the agent that has started this process. Return None if no agent has started it.

    Raises:
        ConfigError: the environment variable `SIRTAKI_AGENT` is set, but the socket is missing. A process that a rank's
            script has started is in this state, because it inherits only the variable.
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
            f"the environment variable {AGENT}={text} names a socket that this process does not have. In an elastic "
            "job, only processes that the launcher has started may call init(), not their child processes"
        ) from err
    sock.set_inheritable(False)
    return AgentClient(sock, interface=interface, one_host=hosts == "one")


# ── jobs that mpiexec has started with fault tolerance ────────────────────────────────────────────────────────────────


class SurvivingMembership:
    """Obtains the ranks of an elastic job from MPI. For jobs that mpiexec has started with fault tolerance.

    After an elastic restart, the job has all ranks that have not died.
    """

    def __init__(self, survivors: Survivors, *, interface: str | None) -> None:
        """Create the source of memberships.

        Args:
            survivors: the ranks that have not died, as MPI reports them.
            interface: network interface that connects the hosts; None for any.
        """
        self._survivors, self._interface = survivors, interface
        self.leave = survivors.leave

    def join(self, *, after: int, has_state: bool, timeout_s: float) -> Generation:
        """Shrink MPI's world to the surviving ranks, and exchange their addresses."""
        deadline_s = time.monotonic() + timeout_s
        if after == 0:
            load_what_training_needs()
        lost, own = after > 0, self._survivors.origin
        me = Member(slot=own, number=own, has_state=has_state)
        while True:
            if lost:
                self._survivors.shrink(max(0.0, deadline_s - time.monotonic()))
            try:
                membership, listeners = introduce(
                    self._survivors.exchange, me, generation=after, interface=self._interface, secret=None
                )
            except PeerLostError:
                lost = True
                continue
            members = rank_order(membership.members)
            return Generation(
                membership=replace(membership, generation=1 + membership.generation, members=members),
                rank=[each.number for each in members].index(own),
                listeners=listeners,
                why_in_vain=self._why_in_vain,
            )

    def change(self) -> Change:
        """Return REMOVED if MPI has lost a rank, otherwise no change. Ranks are never added to such a job."""
        return Change.REMOVED if self._survivors.lost() else Change(0)

    def on_loss(self, report: Callable[[str], object]) -> None:
        """Do nothing, because MPI itself reports lost ranks to the control plane (which carries all messages except
        gradients).
        """

    def finished(self) -> None:
        """Do nothing, because an MPI job has no launcher that would start this rank again."""

    def _why_in_vain(self) -> str:
        return "a member of the next generation is lost" if self._survivors.lost() else ""


def rank_order(survivors: Sequence[Member]) -> tuple[Member, ...]:
    """Return the survivors in the order of their new ranks.

    Ranks of one host are adjacent. Under this constraint, ranks that hold the training state (such as weights) precede
    ranks without it.
    """
    hosts = dict.fromkeys(each.host for each in survivors)
    there = {host: [each for each in survivors if each.host == host] for host in hosts}
    with_state_first = sorted(there.values(), key=lambda members: not any(each.has_state for each in members))
    return tuple(each for members in with_state_first for each in sorted(members, key=lambda each: not each.has_state))


def open_survivors(settings: Settings, environ: Mapping[str, str] = os.environ) -> SurvivingMembership | None:
    """Return an object that obtains the ranks of an elastic job from MPI. Collective. Returns None if mpiexec was
    started without fault tolerance, so that it ends all ranks when one is lost.

    Raises:
        CommError: there is no usable MPI library.
    """
    over_mpi = settings.control is Backend.MPI or settings.transport is TransportKind.MPI
    if over_mpi or not (started_by_mpi(environ) and started_to_survive(environ)):
        return None
    return SurvivingMembership(Survivors(), interface=settings.gloo_interface)


# ── the generations of this process ───────────────────────────────────────────────────────────────────────────────────


class Generations:
    """Membership of this process in an elastic job. A generation is the set of ranks between two elastic restarts.

    Attributes:
        current: the generation that this process has joined last, which may have ended. None before the first one.
        has_state: this process holds the training state of the job.
        tuning: tuning results of earlier generations, in which the job had other ranks.
        leave: function that ends this process with the given exit code at once. Called if the process fails, or exits
            before other ranks.
    """

    def __init__(self, membership: MembershipSource, leave: Callable[[int], object] = os._exit) -> None:
        """Create the object before the first generation.

        Args:
            membership: source from which this process obtains the ranks after each restart. Only the main thread may
                call its methods.
            leave: function that ends this process with the given exit code at once.
        """
        self._membership, self.leave = membership, leave
        self.current: Generation | None = None
        self.has_state = self._dismissed = False
        # Import late. The module imports PyTorch, which agents (processes that only start ranks) do not need.
        from .tuning.plans import CarriedTuning

        self.tuning = CarriedTuning()

    @property
    def number(self) -> int:
        """Number of the current generation (set of ranks between two elastic restarts). The first one is 1.

        0 = none yet.
        """
        return 0 if self.current is None else self.current.membership.generation

    @property
    def in_step(self) -> bool:
        """Return whether all current ranks are at the same point of the script.

        This is so if all ranks are new, or if none is new.
        """
        return self.current is not None and len({each.has_state for each in self.current.membership.members}) == 1

    def change(self) -> Change:
        """Return the membership changes since the last elastic restart. Non-blocking."""
        return self._membership.change()

    def finished(self) -> None:
        """Report that this rank's script has completed.

        Does nothing if the job has already told this rank that it is no longer needed.
        """
        if not self._dismissed:
            self._membership.finished()

    def join_next(self, settings: Settings) -> Communicator:
        """Join the next generation (set of ranks after an elastic restart), and connect to its ranks. Collective over
        them.

        If a rank is lost before all ranks have connected, join the generation after that one.

        Raises:
            Dismissed: the job does not need this process any more.
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
                raise LaunchError(
                    f"this rank leaves the elastic job, because it could not join the next generation (set of ranks) "
                    f"after generation {self.number}: {err}"
                ) from err
            joined_s = time.monotonic()
            try:
                ranks = self.current.connect(timeout_s=settings.start_timeout_s, heartbeat_s=settings.heartbeat_s)
            except ResourceLimitError:
                raise
            except CommError as err:
                logger.info(
                    "elastic restart: while the new set of ranks (generation %d) connected, one of them was lost (%s); "
                    "this rank waits for the next set of ranks",
                    self.number,
                    err,
                )
                continue
            self._membership.on_loss(_failing(ranks))
            logger.info(
                "elastic job: generation (set of ranks) %d has %d ranks; this rank received their "
                "addresses after %.0f ms and connected to these ranks within the next %.0f ms",
                self.number,
                ranks.size,
                1000 * (joined_s - begin_s),
                1000 * (time.monotonic() - joined_s),
            )
            return ranks


def _failing(ranks: Communicator) -> Callable[[str], None]:
    return lambda lost: ranks.failures.report(PeerLostError(lost))


_opener: Callable[[], MembershipSource | None] | None = None


def register(opener: Callable[[], MembershipSource | None] | None) -> None:
    """Set the function that `init()` calls to find out which ranks an elastic job has.

    The function returns None for jobs that are not elastic. `register(None)` removes the function.
    """
    global _opener
    _opener = opener


of_process: Generations | None = None
"""This process's `Generations`, as set by `of_this_process`. None before that call, and if the job is not elastic."""


def of_this_process(settings: Settings) -> Generations | None:
    """Return this process's `Generations`, which the first call creates. None in jobs that are not elastic.

    Collective if mpiexec started the ranks with fault tolerance.

    Raises:
        ConfigError: an agent started the parent of this process, not this process.
        CommError: mpiexec started this process, but there is no usable MPI library.
    """
    global of_process
    if of_process is None:
        registered = None if _opener is None else _opener()
        membership = registered or open_agent(interface=settings.gloo_interface) or open_survivors(settings)
        if membership is not None:
            leave = membership.leave if isinstance(membership, SurvivingMembership) else os._exit
            of_process = Generations(membership, leave)
    return of_process
