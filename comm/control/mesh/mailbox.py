"""What has come for one context, by sender, until somebody of this rank takes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from sirtaki.errors import CommError, MismatchError

from .frames import Header, Kind

DIRECT_BYTES = 64 * 1024
"""Longer messages are read from the socket into their place, if somebody waits for them."""


class _Wanted:
    """A long message that somebody waits for."""

    def __init__(self, view: memoryview, filled: int, sequence: int) -> None:
        self.view, self.filled, self.sequence = view, filled, sequence
        self.in_place = False  # the frame that is being read is


class Inbox:
    """Data of one sender, in order."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[int, memoryview]] = deque()
        self._wanted: _Wanted | None = None

    def place(self, header: Header) -> memoryview:
        """Memory for the payload of a frame: where it is waited for, if it is."""
        wanted = self._wanted
        if wanted is None or len(wanted.view) - wanted.filled < header.length:
            return memoryview(bytearray(header.length))
        wanted.in_place = True
        return wanted.view[wanted.filled : wanted.filled + header.length]

    def take(self, header: Header, payload: memoryview) -> None:
        """A frame is whole."""
        wanted = self._wanted
        if wanted is None:
            self._arrived.append((header.sequence, payload))
            return
        _check(header.sequence, wanted.sequence, wanted.filled + len(payload), len(wanted.view))
        if not wanted.in_place:
            wanted.view[wanted.filled : wanted.filled + len(payload)] = payload
        wanted.in_place = False
        wanted.filled += len(payload)
        if wanted.filled == len(wanted.view):
            self._wanted = None

    def receive(self, view: memoryview, sequence: int) -> Iterator[None]:
        """Fills `view` with the next message, which has this `sequence`; yields while it has not come.

        Raises:
            MismatchError: the sender is elsewhere, or sends more.
        """
        filled = 0
        while True:
            while not self._arrived:
                yield
            found, payload = self._arrived.popleft()
            _check(found, sequence, filled + len(payload), len(view))
            view[filled : filled + len(payload)] = payload
            filled += len(payload)
            if filled == len(view):
                return

    def post(self, view: memoryview, sequence: int) -> _Wanted:
        """With nobody reading: the next message is to be read into `view`, of more than `DIRECT_BYTES`."""
        wanted = _Wanted(view, 0, sequence)
        self._wanted = wanted
        while self._arrived and wanted.filled < len(view):
            found, payload = self._arrived.popleft()
            self.take(Header(Kind.DATA, 0, found, 0, len(payload)), payload)
        return wanted


def _check(found: int, expected: int, length: int, room: int) -> None:
    if found != expected:
        raise MismatchError(f"the ranks are at different operations of a communicator: {found} and {expected}")
    if length > room:
        raise MismatchError(f"a rank sends {length} bytes or more where {room} are expected")


class Mailbox:
    """All that has come for one context.

    Attributes:
        posts: short messages: (sender, tag, message).
    """

    def __init__(self) -> None:
        self._inboxes: dict[int, Inbox] = {}
        self.posts: deque[tuple[int, int, bytes]] = deque()

    def inbox(self, source: int) -> Inbox:
        """Of this sender, by its rank in the mesh."""
        # setdefault: the thread that reads and the one that receives may come first at the same time
        return self._inboxes.get(source) or self._inboxes.setdefault(source, Inbox())

    def place(self, source: int, header: Header) -> memoryview:
        """See `Receiver`."""
        if header.kind == Kind.DATA:
            return self.inbox(source).place(header)
        return memoryview(bytearray(header.length))

    def take(self, source: int, header: Header, payload: memoryview) -> None:
        """See `Receiver`."""
        if header.kind == Kind.DATA:
            self.inbox(source).take(header, payload)
        elif header.kind == Kind.POST:
            self.posts.append((source, header.tag, bytes(payload)))
        else:
            raise CommError(f"rank {source} sends a frame of kind {header.kind} to a communicator")
