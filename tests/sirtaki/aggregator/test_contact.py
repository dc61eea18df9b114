"""An aggregator as a rank knows it."""

from typing import cast

import pytest

from sirtaki.aggregator.client import REGISTER_EVERY_S, Contact
from sirtaki.aggregator.wire import Kind, Registration, Summation, Welcome, Wire
from sirtaki.errors import AggregatorError

REGISTRATION = Registration(
    job=b"j" * 16, entry=1, ranks=2, summation=Summation.FLOAT32, packets=3, floats=4, registers=4, width=1
)


class FakeWire:
    def __init__(self) -> None:
        self.kinds: list[int] = []
        self.refused = self.closed = False

    def send(self, data: bytes) -> None:
        self.kinds.append(data[3])

    def close(self) -> None:
        self.closed = True


def contact() -> tuple[Contact, FakeWire]:
    wire = FakeWire()
    found = Contact(("host", 5), lambda address: cast(Wire, wire))
    found.enter(10.0)
    return found, wire


def test_it_says_who_it_is_from_time_to_time_until_it_is_welcome() -> None:
    found, wire = contact()
    for now_s in (10.0, 10.0 + REGISTER_EVERY_S / 2, 10.0 + 1.5 * REGISTER_EVERY_S):
        found.register(REGISTRATION, 1, 0, now_s)
    assert wire.kinds == [Kind.REGISTER] * 2
    assert not found.is_open
    found.open(Welcome(session=9, first_step=0, window=4, standby=""))
    assert found.is_open
    assert (found.session, found.window) == (9, 4)


def test_it_asks_for_a_sign_of_life_where_there_was_none_for_long() -> None:
    found, wire = contact()
    for now_s in (10.1, 10.3, 10.4, 10.6):
        found.ping(0, now_s, 0.2)
    assert wire.kinds == [Kind.PING] * 2
    found.heard_s = 10.7
    found.ping(0, 10.85, 0.2)
    assert wire.kinds == [Kind.PING] * 2


def test_coming_anew_forgets_the_session_and_draws_another_number() -> None:
    found, wire = contact()
    found.open(Welcome(session=9, first_step=0, window=4, standby=""))
    number, wire.refused = found.entry, True
    found.enter(11.0)
    assert not found.is_open
    assert not wire.refused
    assert found.entry != number


def test_it_says_that_it_leaves_where_it_was_welcome() -> None:
    found, wire = contact()
    found.leave(0)
    assert wire.kinds == []
    found.open(Welcome(session=9, first_step=0, window=4, standby=""))
    found.leave(0)
    assert wire.kinds == [Kind.BYE] * 3
    found.close()
    found.close()
    assert wire.closed
    assert found.name == "host:5"


def test_a_host_that_is_not_known_is_an_aggregator_that_is_not_there() -> None:
    unknown = Contact(("256.1.1.1", 5), Wire.connected)
    with pytest.raises(AggregatorError, match=r"no aggregator can be reached at 256\.1\.1\.1:5"):
        unknown.enter(10.0)
