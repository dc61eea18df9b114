"""Judge a history by the notes of its processes, without knowledge of the faults."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any


@dataclass(frozen=True, slots=True)
class Note:
    """One note of a process: time, event, process, and details."""

    at_s: float
    what: str
    who: int | str
    more: Mapping[str, Any]

    def __str__(self) -> str:
        details = " ".join(f"{name}={value}" for name, value in self.more.items())
        return f"{self.at_s:9.3f} {self.who!s:>10} {self.what} {details}"


class History:
    """All notes in order of time."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.now_s = lambda: 0.0

    def note(self, what: str, who: int | str, **more: Any) -> None:
        self.notes.append(Note(self.now_s(), what, who, more))

    def of(self, *kinds: str) -> list[Note]:
        return [note for note in self.notes if note.what in kinds]

    def __str__(self) -> str:
        return "\n".join(map(str, self.notes))


def wrongs(history: History) -> list[str]:
    """Describe the violations in a history."""
    return [*_orders(history), *_generations(history), *_membership(history), *_commits(history)]


def _orders(history: History) -> list[str]:
    """Check that ranks of a host are adjacent, that ranks with state are first and keep their order, and the limits."""
    found, before = [], ()
    for note in history.of("formed"):
        workers, places, (least, most) = note.more["workers"], note.more["places"], note.more["limits"]
        hosts = [host for host, _ in places]
        if len([host for host, _ in groupby(hosts)]) != len(set(hosts)):
            found.append(f"ranks of a host are apart: {hosts}")
        if not least <= len(workers) <= (most or len(workers)):
            found.append(f"{len(workers)} ranks, not {least} to {most}")
        if places[0][1] and not all(is_new for _, is_new in places):
            found.append(f"rank 0 is new, and others are not: {places}")
        for host in set(hosts):
            old = [worker for worker, place in zip(workers, places, strict=True) if place == (host, False)]
            if old != sorted(old, key=lambda worker: before.index(worker) if worker in before else len(before)):
                found.append(f"workers {old} of {host} have changed their order of {before}")
        before = workers
    return found


def _generations(history: History) -> list[str]:
    """Check that all members of a generation have the same list of members, and their own ranks in it."""
    lists: dict[int, tuple[int, ...]] = {}
    found = []
    for note in history.of("met"):
        members = lists.setdefault(note.more["number"], note.more["members"])
        if members != note.more["members"]:
            found.append(f"generation {note.more['number']} has members {members} and {note.more['members']}")
        if note.more["members"][note.more["rank"]] != note.who:
            found.append(f"worker {note.who} is not rank {note.more['rank']} of {note.more['members']}")
    return found


def _membership(history: History) -> list[str]:
    """Check that a worker is in one generation at a time, and never returns to an earlier one."""
    inside: dict[int | str, int] = {}
    newest: dict[int | str, int] = defaultdict(int)
    found = []
    for note in history.of("met", "left", "gone"):
        if note.what != "met":
            inside.pop(note.who, None)
            continue
        number = note.more["number"]
        if note.who in inside:
            found.append(f"worker {note.who} is in generations {inside[note.who]} and {number}")
        if number <= newest[note.who]:
            found.append(f"worker {note.who} is in generation {number} after {newest[note.who]}")
        inside[note.who] = newest[note.who] = number
    return found


def _commits(history: History) -> list[str]:
    """Check that commits are never lost: every later step descends from all commits that have returned."""
    parents: dict[int, int] = {}
    last, found = 0, []

    def stems_from(value: int, ancestor: int) -> bool:
        seen = 0
        while value != ancestor:
            if value not in parents or seen > len(parents):
                return False
            value, seen = parents[value], seen + 1
        return True

    for note in history.of("train", "step", "commit"):
        value = note.more["value"]
        if note.what == "step":
            parents[value] = note.more["parent"]
        elif note.what == "train":
            if not stems_from(value, last):
                found.append(f"worker {note.who} goes on at {note.at_s:.3f} s without a commit that had returned")
        elif not stems_from(value, last):
            if not stems_from(last, value):
                found.append(f"worker {note.who} commits at {note.at_s:.3f} s what does not stem from all before it")
        else:
            last = value
    return found
