"""The membership of ranks that mpiexec has started and that go on when others are lost: nobody comes, some go."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass

from sirtaki.comm.control.communicator import Backend
from sirtaki.comm.control.mesh.appointment import Appointment, Attendee, attendee, open_places
from sirtaki.comm.control.mesh.rendezvous import Meeting
from sirtaki.comm.control.ulfm import Survivors, started_to_survive
from sirtaki.comm.plan import TransportKind
from sirtaki.errors import PeerLostError
from sirtaki.launchers import started_by_mpi
from sirtaki.settings import Settings

from . import process_end
from .membership import Change, Generation, Member
from .preloading import load_what_training_needs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Introduction:
    origin: int
    after: int
    has_state: bool
    attendee: Attendee
    secret: str
    job: str


class SurvivingMembership:
    """See `Membership`: MPI says who is left, and all of these are wanted."""

    def __init__(self, survivors: Survivors, *, interface: str | None) -> None:
        """`interface`: name of the network interface that joins the hosts; None = any."""
        self._survivors, self._interface = survivors, interface

    def join(self, *, after: int, has_state: bool, timeout_s: float) -> Generation:
        """See `Membership`."""
        deadline_s = time.monotonic() + timeout_s
        if after == 0:
            load_what_training_needs()
        lost = after > 0
        while True:
            if lost:
                self._survivors.shrink(max(0.0, deadline_s - time.monotonic()))
            listeners = open_places(self._interface)
            try:
                mine = _Introduction(
                    origin=self._survivors.origin,
                    after=after,
                    has_state=has_state,
                    attendee=attendee(listeners),
                    secret=secrets.token_hex(32),
                    job=secrets.token_hex(8),
                )
                told = self._survivors.exchange(mine)
            except BaseException as err:
                for listener in listeners:
                    listener.close()
                if not isinstance(err, PeerLostError):
                    raise
                lost = True
                continue
            members = in_order(told)
            number = 1 + max(each.after for each in told)
            return Generation(
                number=number,
                members=tuple(
                    Member(host="/".join(each.attendee.host), slot=each.origin, is_new=not each.has_state)
                    for each in members
                ),
                meeting=Meeting(
                    rank=members.index(mine),
                    size=len(members),
                    name=f"{told[0].job}/{number}",
                    appointment=Appointment(
                        attendees=tuple(each.attendee for each in members),
                        secret=told[0].secret,
                        listeners=listeners,
                        in_vain=self._in_vain,
                    ),
                ),
            )

    def change(self) -> Change:
        """See `Membership`."""
        return Change.REMOVED if self._survivors.lost() else Change(0)

    def finished(self) -> None:
        """See `Membership`. Nobody restarts this job."""

    def _in_vain(self) -> str:
        return "a member of the next generation is lost" if self._survivors.lost() else ""


def in_order(told: list[_Introduction]) -> list[_Introduction]:
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
    survivors = Survivors()
    process_end.leave_by(survivors.leave)
    return SurvivingMembership(survivors, interface=settings.gloo_interface)
