"""Elastic jobs whose ranks, agents, drivers and hosts are hit at random in every phase, with a ledger that is checked.

    elastic_chaos.py SEED STRIKES [JOB_STRIKES]     a line a job; exit status 1 if one has lost or repeated anything

Each job has two to six ranks on one to three emulated hosts, an agent each, and trains `ranks/elastic_member.py`, whose
log says what each rank has done: iterations with their samples and the hash of the parameters, commits, generations.
A strike waits for a phase (a commit, a rank that leaves its generation, meets the others, opens the next one, begins
to train; a checkpoint that is being written; a trial of the warm-up) and then kills or stops. The ledger
(`elastic_jobs.Judge`) holds: ranks are equal at each commit, no commit that has returned is lost, no sample of an epoch
is seen twice but for those that fill up a deal, none is left out, and, where sums are added in one order, the bits are
those of one process that plays all ranks. Nothing may be left: no process, no file of a checkpoint half written.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]  # as pytest has it

from elastic_jobs import Judge, LaunchedJob  # noqa: E402
from rank_jobs import UNTUNED, environment  # noqa: E402
from ranks.elastic_member import Plan  # noqa: E402

PROGRAM = TESTS / "ranks" / "elastic_member.py"
PHASES = ("any", "commit", "left", "joined", "met", "open", "train", "iteration", "writes")
STRIKES = ("rank", "rank", "rank 0", "two ranks", "all but one", "again", "agent", "driver", "pause", "host", "disk")
RECOVER_S, END_S, LEFT_S = 90.0, 60.0, 15.0
HOST_STOPS_S = 13.0  # a driver gives its agent up after 10


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a job is made: slots by host, whether an agent may take a lost driver's place, and what varies besides."""

    slots: dict[str, int]
    goes_on: bool
    is_tuned: bool
    writes: bool
    strikes: list[tuple[str, str]] = field(default_factory=list)  # what, and in which phase


def draw(rng: random.Random, strikes: int) -> Shape:
    hosts = rng.randint(1, 3)
    ranks = rng.randint(max(2, hosts), 6 if hosts > 1 else 4)
    slots = Counter({"abc"[number]: 1 for number in range(hosts)})
    slots.update(rng.choice("abc"[:hosts]) for _ in range(ranks - hosts))
    goes_on = hosts > 1 and rng.random() < 0.4
    kinds = [kind for kind in STRIKES if (goes_on or kind != "driver") and (hosts > 1 or kind not in ("agent", "host"))]
    return Shape(
        slots=dict(sorted(slots.items())),
        goes_on=goes_on,
        is_tuned=rng.random() < 0.3,
        writes=rng.random() < 0.6,
        strikes=[(rng.choice(kinds), rng.choice(PHASES)) for _ in range(strikes)],
    )


class Job(LaunchedJob):
    """One job from its start to the check of its ledger."""

    def __init__(self, shape: Shape, folder: Path, rng: random.Random) -> None:
        self._shape, self._rng = shape, rng
        self.killed = 0
        self.done: list[str] = []
        self._lines: dict[int, list[dict[str, Any]]] = {}
        self._offsets: dict[int, int] = {}
        plan = {"iterations": 10**6, "until_told": True, "pause_s": 0.005, "samples": 2000}
        env = UNTUNED
        if shape.is_tuned:
            env = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "200"}
        if shape.writes:
            env = {**env, "SIRTAKI_CHECKPOINT_DIR": str(folder / "checkpoints"), "SIRTAKI_CHECKPOINT_S": "0.2"}
        hosts = ",".join(f"{host}:{slots}" for host, slots in shape.slots.items())
        words = ["-H", hosts, "-np", str(sum(shape.slots.values())), "--min-np", "1", "--agent-command", "{command}"]
        words += ["--blacklist-cooldown-range", "1", "2", "--on-driver-loss", "go-on" if shape.goes_on else "end"]
        words += [sys.executable, PROGRAM, folder, json.dumps(plan)]
        super().__init__(folder, words, environment(folder / "cache", env))
        self._driver = self.process.pid

    # ── what is there ────────────────────────────────────────────────────────────────────────────────────────────────

    def _logs(self) -> dict[int, list[dict[str, Any]]]:
        """What each rank has logged, by its process; read as far as it has grown."""
        for path in self.folder.glob("*.log"):
            if path.stem.isdecimal():
                pid = int(path.stem)
                with path.open("rb") as file:
                    file.seek(self._offsets.get(pid, 0))
                    whole = file.read().rpartition(b"\n")
                self._offsets[pid] = self._offsets.get(pid, 0) + len(whole[0]) + len(whole[1])
                self._lines.setdefault(pid, []).extend(json.loads(line) for line in whole[0].splitlines())
        return self._lines

    def _members(self) -> dict[int, tuple[int, str]]:
        """Rank and host of each living member that holds the job's state, in the newest generation."""
        newest, found = 0, dict[int, tuple[int, str]]()
        for pid, lines in self._logs().items():
            begun = next((line for line in reversed(lines) if line["what"] == "train"), None)
            if begun is None or not Path(f"/proc/{pid}").exists():
                continue
            generation = next(line["generation"] for line in reversed(lines) if line["what"] == "joined")
            if lines[-1]["what"] in ("left", "joined", "met", "open"):  # it holds the state, and is on its way
                generation = newest
            if generation > newest:
                newest, found = generation, {}
            if generation == newest:
                with suppress(OSError):
                    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    host = next(each for each in environ if each.startswith(b"HOROVOD_HOSTNAME=")).partition(b"=")[2]
                    found[pid] = begun["rank"], host.decode()
        return found

    def _agents(self) -> dict[str, int]:
        """The agent of each host that has members: the parent of its ranks."""
        found = {}
        for pid, (_, host) in self._members().items():
            with suppress(OSError):
                found[host] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return found

    def expect(self, true: Callable[[], object], limit_s: float, what: str) -> None:
        deadline_s = time.monotonic() + limit_s
        while not true():
            assert self.process.poll() is None or self._shape.goes_on, f"{what}: the job has ended\n{self.text()}"
            assert time.monotonic() < deadline_s, f"{what} within {limit_s:g} s: no\n{self.text()}"
            time.sleep(0.02)

    def text(self) -> str:
        files = [self.folder / "out", self.folder / "err", *self.folder.glob("sirtaki-*.log")]
        return f"{self._shape}\n{self.done}\n" + "\n".join(path.read_text()[-6000:] for path in files)

    # ── strikes ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Strikes, and ends the job; AssertionError where something is wrong."""
        ranks = sum(self._shape.slots.values())
        self.expect(lambda: len(self._members()) == ranks, RECOVER_S, "all train")
        for what, phase in self._shape.strikes:
            least = 3 if what in ("two ranks", "driver", "agent", "host") and ranks > 2 else 2
            self.expect(lambda least=least: len(self._members()) >= least, RECOVER_S, f"{least} of {ranks} train")
            self._wait_for(phase)
            self._strike(what, phase)
        self.expect(lambda: len(self._members()) == ranks, RECOVER_S, "all train again")
        (self.folder / "end").touch()
        self.expect(lambda: not self.processes(), END_S, "all have ended")
        self._check()

    def _wait_for(self, phase: str) -> None:
        """Something happens in that phase from now on, or does not within a second."""
        begin_s = time.monotonic()
        while time.monotonic() < begin_s + 1.0:
            if phase == "any":
                break
            if phase == "writes":
                if list(self.folder.glob("checkpoints/writing-*")):
                    return
            else:
                newest = [line for log in self._logs().values() for line in log[-3:]]
                if any(line["what"] == phase and line["s"] > begin_s for line in newest):
                    return
            time.sleep(0.002)
        time.sleep(self._rng.uniform(0.0, 0.2))

    def _strike(self, what: str, phase: str) -> None:
        rng, members = self._rng, self._members()
        pids = sorted(members, key=lambda pid: members[pid][0])
        if len(pids) < 2:
            return
        self.done.append(f"{what} in {phase}")
        if what in ("rank", "again"):
            self._kill(rng.choice(pids))
            if what == "again":  # while the others recover
                time.sleep(rng.uniform(0.0, 0.3))
                if len(left := list(self._members())) >= 2:
                    self._kill(rng.choice(left))
        elif what == "rank 0":
            self._kill(pids[0])
        elif what == "two ranks":
            self._kill(*rng.sample(pids, min(2, len(pids) - 1)))
        elif what == "all but one":
            keep = pids[0] if self._shape.goes_on else rng.choice(pids)
            self._kill(*(pid for pid in pids if pid != keep))
        elif what == "pause":
            os.kill(pid := rng.choice(pids), signal.SIGSTOP)
            time.sleep(1.0)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        elif what == "driver":
            self._kill(self._driver)
            self.expect(lambda: self._successor() is not None, RECOVER_S, "another driver takes over")
            self._driver = self._successor() or 0
        elif what in ("agent", "host"):
            self._hit_host(what, members, pids)
        elif what == "disk" and self._shape.writes:
            folder = self.folder / "checkpoints"
            with suppress(OSError):  # nothing can be written where a file is in a folder's place
                folder.rename(aside := self.folder / "aside")
                folder.write_text("full")
                time.sleep(0.5)
                folder.unlink()
                aside.rename(folder)

    def _hit_host(self, what: str, members: dict[int, tuple[int, str]], pids: list[int]) -> None:
        """One that the others can do without: a driver must know most members, or half of them with rank 0."""
        hosts = Counter(host for _, host in members.values())
        agents = self._agents()
        free = [
            host for host, count in hosts.items()
            if host in agents and 2 * count < len(pids) and host != members[pids[0]][1]
        ]  # fmt: skip
        if not free or (what == "host" and self._driver_is_of(agents[free[0]])):
            return
        host = self._rng.choice(free)
        if self._driver_is_of(agents[host]):
            return
        if what == "agent":
            self._kill(agents[host])
            return
        there = [agents[host], *(pid for pid in pids if members[pid][1] == host)]
        for number, pause_s in ((signal.SIGSTOP, HOST_STOPS_S), (signal.SIGCONT, 0.0)):
            for pid in there:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(pause_s)
        # An agent that may take a driver's place looks for one, and waits two minutes for others to come to its own.
        limit_s = 240.0 if self._shape.goes_on else RECOVER_S
        self.expect(lambda: not set(there) & set(self.processes()), limit_s, "those that were given up end")

    def _driver_is_of(self, agent: int) -> bool:
        """That agent has started the driver."""
        with suppress(OSError):
            return int(Path(f"/proc/{self._driver}/stat").read_text().rpartition(")")[2].split()[1]) == agent
        return False

    def _successor(self) -> int | None:
        there = [pid for pid, line in self.processes().items() if "sirtaki.run.elastic.launch" in line]
        says = [path.read_text() for path in self.folder.glob("sirtaki-*.log") if not path.stem.isdecimal()]
        return next((pid for pid in there if any(f"process {pid} on" in text for text in says)), None)

    def _kill(self, *pids: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.killed += 1
        if self.process.pid in pids:
            self.process.wait()

    # ── the ledger ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _check(self) -> None:
        ranks = sum(self._shape.slots.values())
        judge = Judge(logs=self._logs(), codes={}, plan=Plan(samples=2000), output=self.text())
        ends = judge.lines("end")
        assert len(ends) == ranks, f"{len(ends)} of {ranks} have come to the end\n{self.text()}"
        assert len({(line["iteration"], line["hash"]) for line in ends}) == 1, ends
        if self.process.wait(END_S) != -signal.SIGKILL:
            assert self.process.returncode == 0, f"exit code {self.process.returncode}\n{self.text()}"
        judge.iterations = 1 + max(line["number"] for line in judge.lines("iteration"))
        judge._check_commits()
        history = judge.effective()
        judge._check_samples(history)
        if not self._shape.is_tuned:  # whose streams add in other orders
            judge._check_reference(history)
        assert not list(self.folder.glob("checkpoints/writing-*")) or self.killed, self.text()
        assert "Traceback" not in self.text().replace("PeerLostError", ""), self.text()

    def clear(self) -> None:
        """Ends what is left."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def main() -> int:
    seed, strikes = int(sys.argv[1]), int(sys.argv[2])
    each = int(sys.argv[3]) if len(sys.argv) > 3 else 10
    done = killed = failed = number = 0
    while done < strikes:
        rng = random.Random(f"{seed} {number}")
        with tempfile.TemporaryDirectory(prefix="elastic-chaos-") as name:
            begin_s, shape = time.monotonic(), draw(rng, min(each, strikes - done))
            job = Job(shape, Path(name), rng)
            wrong = ""
            try:
                job.run()
            except AssertionError as err:
                wrong = str(err)
            finally:
                job.clear()
        done, killed, failed = done + len(job.done), killed + job.killed, failed + bool(wrong)
        kind = f"{shape.slots} {'go-on ' * shape.goes_on}{'tuned ' * shape.is_tuned}{'writes' * shape.writes}"
        took = f"{len(job.done)} strikes, {job.killed} kills in {time.monotonic() - begin_s:.0f} s"
        print(f"{seed}/{number} {kind}: {took}: {wrong or 'right'}", flush=True)
        if not job.done:
            break
        number += 1
    print(f"{number} jobs, {done} strikes, {killed} kills, {failed} jobs wrong", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
