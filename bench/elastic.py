"""The cost of losing a rank: processes of a running job are killed one by one.

    python -m bench.elastic [--quick] [--check] [--save] [--ranks 3 4 8] [--kills 50]

Each job trains a small network on one host (`bench.lib.elastic_training`) and commits every five steps. Whenever all
ranks are present, a random one gets SIGKILL. *Recovery* is the time from the signal until each survivor has finished an
iteration without the dead rank. *Join* is the duration of the step in which the new rank joined, on the slowest older
rank. At the end, all log lines of the processes are checked: commits must be equal on all ranks, and no commit that
returned may be lost.

Bars: median recovery ≤ 1 s, worst ≤ 2 s; a join ≤ 2 s; nothing lost.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from bench.lib.harness import REPOSITORY, Report, Spread, finish, parser
from bench.lib.ranks import RANK_ENV

# ── logs of the job's processes ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvent:
    """One line of a log.

    Attributes:
        pid: process that wrote it.
        kind: "resume", "step", "commit" or "end".
        at_s: time in seconds since the epoch.
        step: number of finished training steps.
        size: number of ranks.
        digest: digest of the parameters; empty if not logged.
    """

    pid: int
    kind: str
    at_s: float
    step: int
    size: int
    digest: str = ""


class Diaries:
    """Logs of a job's processes in a folder. Can be read while the processes write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[int, int] = defaultdict(int)
        self.events: dict[int, list[LogEvent]] = {}

    def read(self) -> dict[int, list[LogEvent]]:
        """Read new lines, and return the events of all complete lines in order, by process id."""
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
        """Return when the last survivor finished an iteration without the victims; None if a survivor has not yet done
        so.

        Args:
            survivors: process ids of the survivors.
            victims: process ids of the killed ranks.
            killed_s: time of the kill.
            size: number of ranks before the kill.
        """
        read = self.read()
        last_step = max((e.step for pid in victims for e in read.get(pid, ())), default=0)
        events = {pid: own for pid, own in read.items() if pid in survivors}
        return recovered_at_s(events, killed_s=killed_s, size=size, last_step=last_step)


def _event(pid: int, line: bytes) -> LogEvent:
    fields = json.loads(line)
    return LogEvent(
        pid=pid,
        kind=fields["event"],
        at_s=fields["at_s"],
        step=fields["step"],
        size=fields["size"],
        digest=fields.get("hash", ""),
    )


def recovered_at_s(
    events: Mapping[int, Sequence[LogEvent]], *, killed_s: float, size: int, last_step: int
) -> float | None:
    """Return when the last survivor finished an iteration without the killed ranks; None if not all survivors have.

    Such an iteration has fewer ranks. If new ranks joined before the survivors continued, the number of ranks is
    unchanged. Then an iteration counts if the killed ranks cannot have taken part: from the second iteration after
    their last step on.

    Args:
        events: events of the survivors.
        killed_s: time of a kill.
        size: number of ranks before the kill.
        last_step: last step that a killed process had finished.
    """
    ends_s = []
    for own in events.values():
        later = (e for e in own if e.kind == "step" and e.at_s > killed_s)
        end_s = next((e.at_s for e in later if e.size < size or e.step > last_step + 1), None)
        if end_s is None:
            return None
        ends_s.append(end_s)
    return max(ends_s, default=None)


def joins_s(events: Mapping[int, Sequence[LogEvent]]) -> list[float]:
    """Return the duration of each step in which the number of ranks grew, on the slowest rank, in seconds."""
    costs: dict[tuple[int, int], float] = defaultdict(float)
    for own in events.values():
        steps = [event for event in own if event.kind == "step"]
        for before, after in pairwise(steps):
            if after.size > before.size:
                key = after.step, after.size
                costs[key] = max(costs[key], after.at_s - before.at_s)
    return list(costs.values())


def faults(events: Mapping[int, Sequence[LogEvent]]) -> list[str]:
    """Describe commits that differ between ranks, and commits that were lost although the call had returned."""
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


# ── The benchmark ────────────────────────────────────────────────────────────────────────────────────────────────────

COMMIT_EVERY, ENDLESS = 5, 10**9
MEDIAN_LIMIT_S, WORST_LIMIT_S, JOIN_LIMIT_S = 1.0, 2.0, 2.0
PATIENCE_S = 90.0
"""Seconds to wait after a kill, for the survivors and for the new process."""

POLL_S, CALM_S = 0.05, 1.0

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """Results of one job whose ranks were killed.

    Attributes:
        recoveries_s: one per kill; infinite if survivors did not continue.
        joins_s: one per new process.
        faults: descriptions of unequal or lost commits, and of timeouts.
    """

    recoveries_s: list[float] = field(default_factory=list)
    joins_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def environment() -> dict[str, str]:
    """Return the environment of all processes of a job."""
    places = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return os.environ | RANK_ENV | {"PYTHONPATH": os.pathsep.join(filter(None, places))}


@contextmanager
def running_job(folder: Path, ranks: int) -> Iterator[None]:
    """Run a training job with `ranks` ranks inside the context. The ranks log to `folder`."""
    command = [sys.executable, "-m", "sirtaki.run", "-np", str(ranks), "--min-np", "1", "--max-np", str(ranks)]
    training = [sys.executable, "-m", "bench.lib.elastic_training", str(folder), str(ENDLESS), str(COMMIT_EVERY)]
    with (folder / "output.txt").open("w") as output:
        job = subprocess.Popen([*command, *training], env=environment(), stdout=output, stderr=output)
        try:
            yield
        finally:
            job.send_signal(signal.SIGTERM)
            try:
                job.wait(20)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()


def complete(alive: Mapping[int, Sequence[LogEvent]], ranks: int) -> bool:
    """Return whether all ranks have been present for `CALM_S` seconds."""
    if len(alive) != ranks or any(own[-1].size != ranks or own[-1].kind == "end" for own in alive.values()):
        return False
    began_s = [next((e.at_s for e in reversed(own) if e.size != ranks), own[0].at_s) for own in alive.values()]
    return time.time() - max(began_s) > CALM_S


def wait_until(poll: Callable[[], _Answer]) -> _Answer | None:
    """Poll until the answer is true, and return the answer. Return None after `PATIENCE_S` seconds."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        if found := poll():
            return found
        time.sleep(POLL_S)
    return None


def kill_one_by_one(ranks: int, kills: int, *, seed: int) -> Killed:
    """Run one job and kill `kills` ranks, one after the other."""
    rng, found, dead = random.Random(seed), Killed(), set[int]()
    with tempfile.TemporaryDirectory(prefix="sirtaki-bench-") as name:
        folder = Path(name)
        diaries = Diaries(folder)

        def alive() -> dict[int, list[LogEvent]]:
            return {pid: events for pid, events in diaries.read().items() if pid not in dead}

        with running_job(folder, ranks):
            for number in range(kills + 1):
                if not wait_until(lambda: complete(alive(), ranks)):
                    found.faults.append(f"{ranks} ranks were not complete after {PATIENCE_S:.0f} s: {tail(folder)}")
                    break
                if number == kills:
                    break
                time.sleep(rng.uniform(0.0, 0.3))
                victim = rng.choice(sorted(alive()))
                survivors = alive().keys() - {victim}
                killed_s = time.time()
                os.kill(victim, signal.SIGKILL)
                dead.add(victim)
                poll = partial(diaries.recovered_at_s, survivors, {victim}, killed_s=killed_s, size=ranks)
                recovered_s = wait_until(poll)
                if recovered_s is None:
                    found.recoveries_s.append(float("inf"))
                    found.faults.append(f"survivors did not continue within {PATIENCE_S:.0f} s: {tail(folder)}")
                    break
                found.recoveries_s.append(recovered_s - killed_s)
        found.joins_s.extend(joins_s(diaries.read()))
        found.faults.extend(faults(diaries.events))
    return found


def tail(folder: Path) -> str:
    """Return the last three lines of a job's output."""
    return " / ".join((folder / "output.txt").read_text(errors="replace").splitlines()[-3:])


def main() -> int:
    """Run one job per number of ranks."""
    flags = parser(__doc__)
    flags.add_argument("--ranks", type=int, nargs="+", default=[3, 4, 8])
    flags.add_argument("--kills", type=int, help="number of kills in each job")
    args = flags.parse_args()
    args.kills = args.kills or (5 if args.quick else 50)
    report = Report(name="elastic", settings={"ranks": args.ranks, "kills": args.kills})
    for ranks in args.ranks:
        found = kill_one_by_one(ranks, args.kills, seed=args.seed)
        report.rows.append(
            {
                "ranks": ranks,
                "kills": len(found.recoveries_s),
                "recovery_s": spread(found.recoveries_s),
                "worst_s": spread(found.recoveries_s).maximum,
                "join_s": spread(found.joins_s),
                "faults": len(found.faults),
            }
        )
        times = ", ".join(f"{recovery_s:.2f}" for recovery_s in found.recoveries_s)
        print(f"{ranks} ranks: recovered in {times} s", file=sys.stderr, flush=True)
        report.notes += [f"{ranks} ranks: {fault}" for fault in found.faults[:5]]
        judge(report, found, ranks)
    return finish(report, args)


def judge(report: Report, found: Killed, ranks: int) -> None:
    """Add the bars of a job."""
    recovery, join = spread(found.recoveries_s), spread(found.joins_s)
    report.bar(f"median recovery, {ranks} ranks", recovery.median, MEDIAN_LIMIT_S, "s ")
    report.bar(f"worst recovery, {ranks} ranks", recovery.maximum, WORST_LIMIT_S, "s ")
    report.bar(f"worst join, {ranks} ranks", join.maximum, JOIN_LIMIT_S, "s ")
    report.bar(f"lost or unequal commits, {ranks} ranks", len(found.faults), 0)


def spread(times_s: list[float]) -> Spread:
    """Return the spread of the times; NaN if there are none."""
    return Spread.of(times_s or [float("nan")])


if __name__ == "__main__":
    sys.exit(main())
