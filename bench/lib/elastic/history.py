"""What the processes of a job have written down: what each death has cost, and whether anything was lost.

It knows when processes were killed, and nothing of how jobs survive that.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line.

    Attributes:
        pid: who has written it.
        kind: "resume", "step", "commit" or "end".
        at_s: when, in seconds since the epoch.
        step: how many steps training has made.
        size: how many ranks there were.
        digest: of the parameters; empty if it was not written down.
    """

    pid: int
    kind: str
    at_s: float
    step: int
    size: int
    digest: str = ""


class Diaries:
    """What stands in a folder, by process; read on and on while the processes write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[int, int] = defaultdict(int)
        self.events: dict[int, list[Event]] = {}

    def read(self) -> dict[int, list[Event]]:
        """All whole lines so far, by process, in order."""
        for path in self._folder.glob("*.jsonl"):
            pid = int(path.stem)
            with path.open("rb") as file:
                file.seek(self._read[pid])
                lines, _, _ = file.read().rpartition(b"\n")
            if lines:
                self._read[pid] += len(lines) + 1
                self.events.setdefault(pid, []).extend(_event(pid, line) for line in lines.split(b"\n"))
        return self.events

    def recovered_at_s(self, survivors: Set[int], victims: Set[int], *, killed_s: float, size: int) -> float | None:
        """When the last survivor had finished an iteration without the victims; None if some has not yet.

        Args:
            survivors: their processes.
            victims: those that were killed.
            killed_s: when they were.
            size: how many ranks there were.
        """
        read = self.read()
        last_step = max((e.step for pid in victims for e in read.get(pid, ())), default=0)
        events = {pid: own for pid, own in read.items() if pid in survivors}
        return recovered_at_s(events, killed_s=killed_s, size=size, last_step=last_step)


def _event(pid: int, line: bytes) -> Event:
    fields = json.loads(line)
    return Event(
        pid=pid,
        kind=fields["event"],
        at_s=fields["at_s"],
        step=fields["step"],
        size=fields["size"],
        digest=fields.get("hash", ""),
    )


def recovered_at_s(
    events: Mapping[int, Sequence[Event]], *, killed_s: float, size: int, last_step: int
) -> float | None:
    """When the last survivor had finished an iteration without those that were killed; None if some has not yet.

    That is one among fewer ranks, or, where new ones came before the others went on, one that the killed cannot have
    had a part in: they had a part in the one after their last at most.

    Args:
        events: of the survivors.
        killed_s: when a process was killed.
        size: how many ranks there were.
        last_step: the last step that a killed process had finished.
    """
    ends_s = []
    for own in events.values():
        later = (e for e in own if e.kind == "step" and e.at_s > killed_s)
        end_s = next((e.at_s for e in later if e.size < size or e.step > last_step + 1), None)
        if end_s is None:
            return None
        ends_s.append(end_s)
    return max(ends_s, default=None)


def joins_s(events: Mapping[int, Sequence[Event]]) -> list[float]:
    """What each new member has cost those who were there: from one step to the next, where ranks had become more."""
    costs: dict[tuple[int, int], float] = defaultdict(float)
    for own in events.values():
        steps = [event for event in own if event.kind == "step"]
        for before, after in pairwise(steps):
            if after.size > before.size:
                key = after.step, after.size
                costs[key] = max(costs[key], after.at_s - before.at_s)
    return list(costs.values())


def faults(events: Mapping[int, Sequence[Event]]) -> list[str]:
    """What must not be: commits that differ between ranks, or that were returned and lost; empty if all is well."""
    found: list[str] = []
    in_order = sorted((event for own in events.values() for event in own), key=lambda event: event.at_s)
    digests: dict[int, set[str]] = defaultdict(set)
    committed = 0
    for event in in_order:
        if event.kind == "commit":
            committed = max(committed, event.step)
            digests[event.step].add(event.digest)
        elif event.kind == "resume" and event.step < committed:
            found.append(f"process {event.pid} resumes at step {event.step} after the commit of step {committed}")
    for step, different in digests.items():
        if len(different) > 1:
            found.append(f"{len(different)} different sets of parameters were committed at step {step}")
    return found
