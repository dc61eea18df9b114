"""Generations of a job: how a rank learns the members of the next one, from agents or from surviving ranks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sirtaki.comm.control.communicator import Backend, Communicator
from sirtaki.comm.control.mesh_rendezvous import Attendee, Introduction, arrange, meet
from sirtaki.comm.control.mpi import Survivors, started_to_survive
from sirtaki.comm.plan import TransportKind
from sirtaki.errors import CommError, LaunchError, PeerLostError
from sirtaki.launchers import started_by_mpi
from sirtaki.settings import Settings

from .membership import (
    Change,
    Dismissed,
    Formed,
    Generation,
    Member,
    Membership,
    Proof,
    generation_of,
    load_what_training_needs,
    open_agent,
    open_membership,
)
from .tuning.plans import CarriedTuning


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


logger = logging.getLogger(__name__)


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
        membership = open_membership() or open_agent(interface=settings.gloo_interface) or open_survivors(settings)
        if membership is not None:
            leave = membership.leave if isinstance(membership, SurvivingMembership) else os._exit
            of_process = Generations(membership, leave)
    return of_process
