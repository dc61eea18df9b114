"""Messages wait for their receivers, in order, whole or in pieces, and those who are elsewhere are found out."""

import pytest

from sirtaki.comm.control.mesh_links import Header, Inbox, Kind, Mailbox
from sirtaki.errors import CommError, MismatchError


def arrive(inbox: Inbox, sequence: int, data: bytes) -> None:
    header = Header(Kind.DATA, 0, sequence, 5, len(data))
    payload = inbox.place(header)
    payload[:] = data
    inbox.take(header, payload)


def test_a_message_may_come_in_pieces_before_and_after_it_is_waited_for() -> None:
    inbox, target = Inbox(), bytearray(6)
    arrive(inbox, 1, b"ab")
    steps = inbox.receive(memoryview(target), 1)
    assert next(steps, True) is None
    arrive(inbox, 1, b"cdef")
    arrive(inbox, 2, b"")
    assert next(steps, True) is True
    assert target == b"abcdef"
    assert next(inbox.receive(memoryview(bytearray()), 2), True) is True


def test_a_long_message_is_read_into_its_place() -> None:
    inbox, target = Inbox(), bytearray(6)
    arrive(inbox, 3, b"ab")
    wanted = inbox.post(memoryview(target), 3)
    arrive(inbox, 3, b"cdef")
    arrive(inbox, 4, b"later")
    assert (wanted.filled, target) == (6, b"abcdef")
    later = bytearray(5)
    assert next(inbox.receive(memoryview(later), 4), True) is True
    assert later == b"later"


@pytest.mark.parametrize(("sequence", "data"), [(8, b"ab"), (7, b"too long")])
def test_ranks_at_different_operations_are_found_out(sequence: int, data: bytes) -> None:
    inbox = Inbox()
    arrive(inbox, sequence, data)
    with pytest.raises(MismatchError):
        next(inbox.receive(memoryview(bytearray(2)), 7), None)
    other = Inbox()
    other.post(memoryview(bytearray(2)), 7)
    with pytest.raises(MismatchError):
        arrive(other, sequence, data)


def test_a_communicator_takes_data_and_posts_only() -> None:
    mailbox = Mailbox()
    mailbox.take(2, Header(Kind.POST, 9, 0, 5, 3), memoryview(b"abc"))
    assert list(mailbox.posts) == [(2, 9, b"abc")]
    with pytest.raises(CommError, match="rank 2"):
        mailbox.take(2, Header(Kind.BYE, 0, 0, 5, 0), memoryview(b""))
