"""Recovery where there are many ranks: by a model up to 16 384, the driver's own code timed, and real ranks.

    python -m bench.elastic_scale [--quick] [--save] [--sizes 64 1024 16384] [--ranks 64]

- *Model* (`bench.lib.elastic.scale_model`): one way 50 µs within a rack of 32 hosts of 8 ranks, 200 µs across; a
  message takes 10 µs of a core to send and to take, a connection's proof 100 µs; a host's link has 10 Gbit/s. The
  barrier is the shipped one, rank by rank; other phases are counted.
- *Driver*: the rules as shipped, with agents that only count what they are sent, timed here. That goes into the model.
- *Real ranks*: a job of so many under sirtakirun on four agents of this machine, far more ranks than cores. Three
  random ranks are killed at once, later one agent; each time until all survivors have made a step, then until all are
  there again. In the end SIGTERM, and nothing may be left.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.elastic import COMMIT_EVERY, ENDLESS, environment, tail
from bench.lib.elastic.history import Diaries, Event, faults
from bench.lib.elastic.scale_model import Machine, phases
from bench.lib.harness import Bar, Report, finish, parser
from sirtaki.json_channel import encoded
from sirtaki.machine import process_fields
from sirtaki.run.elastic.agent_crew import Heard
from sirtaki.run.elastic.driver import Direction
from sirtaki.run.elastic.job_members import HostPool, JobMembers, Policy

HOSTS = 4
PATIENCE_S = 240.0
MARK = "BENCH_OF_SCALE"


class Crew:
    """Agents that count what they are sent."""

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.sent_bytes = 0

    def start(self, host: str) -> None:
        """See `Crew`."""
        self.hosts.append(host)

    def stop(self, host: str) -> None:
        """See `Crew`."""

    def send(self, host: str, message: Mapping[str, Any]) -> None:
        """As an `AgentCrew` does, without sockets."""
        self.send_to([host], message)

    def send_to(self, hosts: Iterable[str], message: Mapping[str, Any]) -> None:
        """As an `AgentCrew` does, without sockets."""
        self.sent_bytes += len(encoded(message)) * len(list(hosts))

    def tell_each_other(self) -> None:
        """See `Crew`."""


def driver(size: int, machine: Machine) -> tuple[float, int]:
    """Seconds from the moment when all survivors of one rank have asked until all is written; bytes of it."""
    per_host = machine.ranks_per_host
    policy = Policy(start_ranks=size, min_ranks=1)
    crew = Crew()
    direction = Direction(JobMembers(policy, HostPool(policy, random.Random(0))), crew, lambda text: None)

    def joined(worker: int, *, has_state: bool) -> Heard:
        host = (worker - 1) // per_host
        places = [["127.0.0.1", 30000 + worker % 20000], [f"10.0.{host // 250}.{host % 250}", 30000 + worker % 20000]]
        told = {"is": "joined", "worker": worker, "has_state": has_state}
        return Heard(
            host=f"node{host}", message={**told, "attendee": {"host": [f"node{host}", "0" * 36], "places": places}}
        )

    direction.found({f"node{host}": per_host for host in range(size // per_host)}, 0.0)
    direction.answer([Heard(host=host, message={"is": "up"}) for host in crew.hosts], 0.0)
    direction.answer([joined(worker, has_state=False) for worker in range(1, size + 1)], 1.0)
    ended = {"is": "ended", "worker": 2, "exit_code": 137, "reason": ""}
    direction.answer([Heard(host="node0", message=ended)], 2.0)
    asked = [joined(worker, has_state=True) for worker in range(1, size + 1) if worker != 2]
    before = crew.sent_bytes
    begin_s = time.perf_counter()
    direction.answer(asked, 3.0)
    assert direction.members.member_list.generation == 2
    return time.perf_counter() - begin_s, crew.sent_bytes - before


def model_rows(size: int) -> list[dict[str, Any]]:
    """The phases of a recovery."""
    machine = Machine()
    decide_s, sent_bytes = driver(size, machine)
    member_bytes = sent_bytes // (size // machine.ranks_per_host) // size
    found = phases(size, machine, member_bytes=member_bytes, decide_s=decide_s)
    rows = [
        {"ranks": size, "what": phase.name, "messages": phase.messages, "busiest": phase.busiest, "s": phase.seconds}
        for phase in found
    ]
    total = {"messages": sum(phase.messages for phase in found), "busiest": sum(phase.busiest for phase in found)}
    rows.append({"ranks": size, "what": "recovery", **total, "s": sum(phase.seconds for phase in found)})
    rows.append({"ranks": size, "what": f"  of it the driver's decision, {sent_bytes / 1e6:.1f} MB", "s": decide_s})
    return rows


class Job:
    """A real one; `with` ends it."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        hosts = ",".join(f"n{host}:{ranks // HOSTS}" for host in range(HOSTS))
        words = ["-np", str(ranks), "-H", hosts, "--min-np", str(ranks // 4), "--agent-command", "{command}"]
        words += ["--blacklist-cooldown-range", "1", "2", "--start-timeout", "300"]
        training = [sys.executable, "-m", "bench.lib.elastic.training", str(folder), str(ENDLESS), str(COMMIT_EVERY)]
        self._output = (folder / "output.txt").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sirtaki.run", *words, *training],
            env={**environment(), MARK: str(folder), "SIRTAKI_TUNE": "0", "SIRTAKI_STREAMS": "1"},
            stdout=self._output,
            stderr=self._output,
        )
        self.diaries, self.dead = Diaries(folder), set[int]()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._output.close()

    def alive(self) -> dict[int, list[Event]]:
        """By process, what those have written that nobody has killed."""
        return {pid: own for pid, own in self.diaries.read().items() if pid not in self.dead}

    def processes(self) -> dict[int, str]:
        """All of the job that are there, with their command lines."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.folder}".encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def until(self, true: Callable[[], object], what: str) -> float:
        """Seconds until it is."""
        begin_s = time.monotonic()
        while not true():
            if time.monotonic() - begin_s > PATIENCE_S or self.process.poll() is not None:
                raise RuntimeError(f"{what} does not come: {tail(self.folder)}")
            time.sleep(0.1)
        return time.monotonic() - begin_s

    def all_there(self) -> float:
        """Seconds until all ranks have made a step together."""
        return self.until(
            lambda: (
                len(self.alive()) == self.ranks and all(own[-1].size == self.ranks for own in self.alive().values())
            ),
            f"a job of {self.ranks} ranks",
        )

    def kill(self, victims: set[int], more: int = 0) -> float:
        """Seconds until all that survive `victims` (and another process, whose children they are) have made a step."""
        survivors = self.alive().keys() - victims
        killed_s = time.time()
        for pid in (more,) if more else victims:
            os.kill(pid, signal.SIGKILL)
        self.dead |= victims

        end_s = partial(self.diaries.recovered_at_s, survivors, victims, killed_s=killed_s, size=self.ranks)
        self.until(lambda: end_s() is not None, "recovery")
        return (end_s() or 0.0) - killed_s


def real_rows(ranks: int, seed: int, report: Report) -> None:
    """One job, three dead ranks and a dead agent."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="sirtaki-bench-") as name, Job(Path(name), ranks) as job:
        times: dict[str, float] = {}

        def note(what: str, seconds: float) -> None:
            times[what] = seconds
            print(f"{what}: {seconds:.2f} s", file=sys.stderr, flush=True)

        note("start, until all have made a step", job.all_there())
        victims = set(rng.sample(sorted(job.alive()), 3))
        note("three ranks killed, until all others have made a step", job.kill(victims))
        note("until all are there again", job.all_there())
        agent = int(process_fields(rng.choice(sorted(job.alive())))[1])
        theirs = {pid for pid in job.alive() if int(process_fields(pid)[1]) == agent}
        note(f"an agent killed, with {len(theirs)} ranks, until all others have made a step", job.kill(theirs, agent))
        found = faults(job.diaries.read())
        job.process.send_signal(signal.SIGTERM)
        begin_s = time.monotonic()
        job.process.wait(PATIENCE_S)
        note("SIGTERM, until the job has ended", time.monotonic() - begin_s)
        left = job.processes()
    report.rows += [{"ranks": ranks, "what": f"real: {what}", "s": seconds} for what, seconds in times.items()]
    report.bars.append(Bar(claim="lost or unequal commits, real ranks", value=len(found), limit=0))
    report.bars.append(Bar(claim="processes left of the real job", value=len(left), limit=0))
    report.notes += found[:5]


def main() -> int:
    """Runs the parts."""
    flags = parser(__doc__.split("\n")[0])
    flags.add_argument("--sizes", type=int, nargs="+", help="of the model")
    flags.add_argument("--ranks", type=int, help="real ones; 0 = none")
    args = flags.parse_args()
    args.sizes = args.sizes or ([64, 1024] if args.quick else [64, 1024, 16384])
    args.ranks = args.ranks if args.ranks is not None else (8 if args.quick else 64)
    report = Report(name="elastic_scale", settings={"sizes": args.sizes, "ranks": args.ranks})
    for size in args.sizes:
        report.rows += model_rows(size)
    if args.ranks:
        real_rows(args.ranks, args.seed, report)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
