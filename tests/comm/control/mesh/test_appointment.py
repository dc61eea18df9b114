"""Ranks that a launcher has introduced to each other meet at once, and wait for nobody who will not come."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fakes.meshes import close, until

from sirtaki.comm.control import mesh_rendezvous
from sirtaki.comm.control.mesh_rendezvous import Appointment, Attendee, Meeting, attendee, keep, meet, open_places
from sirtaki.errors import CommError, ConfigError, PeerLostError


def appointments(size: int, in_vain: Callable[[], str] = lambda: "") -> list[Appointment]:
    listeners = [open_places(None, loopback_only=True) for _ in range(size)]
    attendees = tuple(attendee(own) for own in listeners)
    return [Appointment(attendees=attendees, secret="secret", listeners=own, in_vain=in_vain) for own in listeners]


def together(several: Sequence[Appointment | None], *, name: str = "job/1", timeout_s: float = 20.0) -> list[Any]:
    """What each rank gets, in a thread each; one that has no appointment does not come."""
    results: list[Any] = [None] * len(several)

    def come(rank: int, appointment: Appointment) -> None:
        meeting = Meeting(rank=rank, size=len(several), name=name, appointment=appointment)
        try:
            results[rank] = meet(meeting, interface=None, secret=None, timeout_s=timeout_s, heartbeat_s=None)
        except Exception as err:
            results[rank] = err

    threads = [threading.Thread(target=come, args=[*pair]) for pair in enumerate(several) if pair[1] is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_meet_and_their_ports_are_closed(size: int) -> None:
    everybody = appointments(size)
    ranks = together(everybody)
    assert [rank.size for rank in ranks] == [size] * size
    barriers = [rank.barrier() for rank in ranks]
    until(lambda: all([test() for test in barriers]))  # noqa: C419  # each moves on while it is tested
    assert all(listener.fileno() < 0 for appointment in everybody for listener in appointment.listeners)
    close([rank._links for rank in ranks])


def stay_away(everybody: list[Appointment | None], rank: int) -> None:
    for listener in everybody[rank].listeners:
        listener.close()
    everybody[rank] = None


def test_nobody_waits_for_whom_the_launcher_knows_to_be_gone() -> None:
    gone = threading.Event()
    everybody: list[Appointment | None] = [*appointments(3, lambda: "rank 1 was killed" if gone.is_set() else "")]
    stay_away(everybody, 1)
    threading.Timer(0.2, gone.set).start()
    begin_s = time.monotonic()
    results = together(everybody, timeout_s=60.0)
    assert time.monotonic() - begin_s < mesh_rendezvous.HANDSHAKE_S + 5.0
    for rank in (0, 2):
        assert isinstance(results[rank], PeerLostError)
        assert "rank 1 was killed" in str(results[rank])


def test_who_does_not_come_is_named_in_time() -> None:
    everybody: list[Appointment | None] = [*appointments(2)]
    stay_away(everybody, 1)
    results = together(everybody, timeout_s=0.3)
    assert "rank 1 did not connect to rank 0" in str(results[0])


def test_who_comes_from_another_generation_is_refused() -> None:
    first, second = appointments(2)
    outcome: list[Any] = []

    def late() -> None:
        try:
            outcome.append(keep(second, rank=1, name="job/1", timeout_s=1.0))
        except CommError as err:
            outcome.append(err)

    thread = threading.Thread(target=late)
    thread.start()
    with pytest.raises(CommError, match="did not connect"):
        keep(first, rank=0, name="job/2", timeout_s=1.0)
    thread.join()
    assert isinstance(outcome[0], CommError)


def test_another_host_is_reached_at_other_addresses_than_loopback() -> None:
    """Its own loopback is not ours."""
    own, other = appointments(2)
    elsewhere = Attendee(host=("elsewhere",), places=(("127.0.0.1", 1), ("127.0.0.2", 2)))
    with pytest.raises(CommError, match=r"rank 0 cannot be reached at 127\.0\.0\.2:2 \("):
        keep(replace(other, attendees=(elsewhere, other.attendees[1])), rank=1, name="job/1", timeout_s=0.2)
    for listener in own.listeners:
        listener.close()


def test_an_interface_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no interface nothere0 with an IPv4 address"):
        open_places("nothere0")


def test_ports_are_open_at_loopback_and_at_what_others_reach() -> None:
    listeners = open_places(None)
    hosts = [listener.getsockname()[0] for listener in listeners]
    assert hosts[0] == "127.0.0.1"
    assert [place[0] for place in attendee(listeners).places] == hosts
    for listener in listeners:
        listener.close()
