"""Opens streams on all ranks or on none: what fails on one of them is closed again on the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from sirtaki.errors import CommError, TransportError

from .contract import StreamSpec

Stream = TypeVar("Stream")
Opened = TypeVar("Opened")

Agree = Callable[[str], None]
"""`ControlPlane.agree_on_success` of all ranks that open streams at the same time."""


def open_up_to(
    streams: list[Stream],
    wanted: Sequence[StreamSpec],
    open_one: Callable[[int], Stream],
    close: Callable[[Stream], object],
) -> None:
    """Collective: adds to `streams` until all that are wanted are there.

    Args:
        streams: those that are open, by number.
        wanted: what is to be open then.
        open_one: collective; opens the stream of that number, or raises `TransportError` on all ranks.
        close: closes one.

    Raises:
        TransportError: on all ranks, after what was opened here has been closed again.
    """
    before = len(streams)
    try:
        while len(streams) <= max(stream.number for stream in wanted):
            streams.append(open_one(len(streams)))
    except TransportError:
        while len(streams) > before:
            close(streams.pop())
        raise


def open_together(
    what: str, open_mine: Callable[[], Opened], *, agree: Agree, close: Callable[[Opened], object] = lambda _: None
) -> Opened:
    """Collective: what `open_mine` gives, if it succeeds on every rank.

    Args:
        what: is opened, for messages.
        open_mine: opens it on this rank.
        agree: tells the ranks whether it is open on all of them.
        close: undoes `open_mine` where another rank has failed.

    Raises:
        TransportError: on all ranks, if one of them cannot open it.
        CommError: the job has failed.
    """
    opened: list[Opened] = []
    problem = ""
    try:
        opened.append(open_mine())
    except (RuntimeError, MemoryError) as err:  # as torch, MPI and threads raise them
        problem = f"{what}: {err}"
    try:
        agree(problem)
    except CommError:
        for each in opened:
            close(each)
        raise
    return opened[0]
