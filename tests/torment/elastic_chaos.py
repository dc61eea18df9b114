"""Elastic jobs with random faults in every phase, and a ledger that is checked.

    elastic_chaos.py SEED STRIKES [JOB_STRIKES [KIND …]]     prints one line per job; exit status 1 after a violation

Each job has two to six ranks on one to three emulated hosts, one agent per host, and trains `ranks/elastic_member.py`.
Its log has the iterations of each rank with their samples and the hash of the parameters, the commits, and the
generations. A fault waits for a phase: a commit, a rank that leaves its generation, connects, opens the next one, or
begins to train (after another rank was killed), a checkpoint that is being written, the final rounds of a warm-up. Then
it kills or stops a process, removes the checkpoint folder, or moves a process's wall clock by hours. New ranks are
killed while they join. With root, faults also cut off hosts and links, and fill the disk. The last line has sums by
kind and phase.

The ledger (`elastic_jobs.Judge`) checks: ranks are equal at each commit. No returned commit is lost. Every sample of an
epoch is used once, except those that fill up a deal. Where the order of sums is fixed, parameters are bit-identical to
those of one process that simulates all ranks. No process and no partial checkpoint remains. The newest checkpoint is
complete and holds what was committed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]  # like pytest's path

from elastic_jobs import Judge, LaunchedJob  # noqa: E402
from rank_jobs import UNTUNED, environment  # noqa: E402
from ranks.elastic_member import Plan, hash_of, make_model  # noqa: E402

from bench.lib.cluster import CUT, WHOLE, LabShape, NetLab, why_unavailable  # noqa: E402
from sirtaki.torch.elastic.checkpoints import CheckpointFolder  # noqa: E402

PROGRAM, CLOCK = TESTS / "ranks" / "elastic_member.py", Path(__file__).parent / "wall_clock"
PHASES = ("any", "commit", "left", "joined", "met", "open", "train", "iteration", "writes")
STRIKES = (
    "rank",
    "rank",
    "rank 0",
    "two ranks",
    "all but one",
    "again",
    "newcomer",
    "agent",
    "driver",
    "pause",
    "disk",
    "clock",
)
# A host is stopped; gets and sends no packets; gets no packets; exchanges no packets with one host.
OF_HOSTS = ("host", "cut", "deaf", "link")
OF_RECOVERY = ("left", "joined", "met", "open", "train")
STEPS = ("import", "start", "joined", "met", "open")  # phases of a rank that starts
IN_LAB = ("cut", "deaf", "link", "full")
RECOVER_S, END_S = 90.0, 60.0
PAUSE_S = 0.1  # in each iteration, because ranks that start need the processor
HOST_STOPS_S = 13.0  # longer than the 10 s after which a driver drops an agent
HOSTS = ("sirtaki-n0", "sirtaki-n1", "sirtaki-n2")  # names in `NetLab`

INSIDE = "SIRTAKI_TEST_INSIDE"
"""Environment variable: `mount` in a mount namespace of its own, then the path of the lab's agent on its first node."""

DISK = Path("/mnt")
"""A disk of 2 MiB for checkpoints, in the lab."""

LAB = os.environ.get(INSIDE, "")

KEEP = os.environ.get("SIRTAKI_TEST_KEEP", "")
"""Folder that keeps the folders of failed jobs; empty = none."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of a job: slots by host, whether an agent may replace a lost driver, and further options.

    `is_apart`: hosts have separate networks, over which the transport determines the order of sums.
    """

    slots: dict[str, int]
    goes_on: bool
    is_apart: bool
    is_tuned: bool
    writes: bool
    strikes: list[tuple[str, str]] = field(default_factory=list)  # kind and phase


def draw(rng: random.Random, strikes: int, among: Sequence[str] = ()) -> Shape:
    hosts = rng.randint(1, 3)
    ranks = rng.randint(max(2, hosts), 6 if hosts > 1 else 4)
    slots = Counter(HOSTS[:hosts])
    slots.update(rng.choice(HOSTS[:hosts]) for _ in range(ranks - hosts))
    goes_on, is_tuned, writes = hosts > 1 and rng.random() < 0.4, rng.random() < 0.3, rng.random() < 0.6
    is_apart = LAB != "" and hosts > 1 and rng.random() < 0.6
    never = {*(() if LAB else IN_LAB), *(() if goes_on else ("driver",)), *(() if writes else ("disk", "full"))}
    never |= {"agent", *OF_HOSTS} if hosts == 1 else set() if is_apart else {"cut", "deaf", "link"}
    kinds = [kind for kind in among or (*STRIKES, *OF_HOSTS, "full") if kind not in never] or ["rank"]
    drawn = [(rng.choice(kinds), rng.choice(PHASES)) for _ in range(strikes)]
    if is_tuned:
        drawn[0] = drawn[0][0], "finals"
    return Shape(
        slots=dict(sorted(slots.items())),
        goes_on=goes_on,
        is_apart=is_apart,
        is_tuned=is_tuned,
        writes=writes,
        strikes=drawn,
    )


class Job(LaunchedJob):
    """One job, from its start to the check of its ledger."""

    def __init__(self, shape: Shape, folder: Path, rng: random.Random) -> None:
        self._shape, self._rng = shape, rng
        self.done: list[tuple[str, str]] = []  # kind and phase
        self._kills: list[tuple[float, int, str]] = []  # time, process, and fault
        self._gone = set[int]()  # killed, or without an agent; may still exist for a while
        self._lines: dict[int, list[dict[str, Any]]] = {}
        self._last: dict[int, dict[str, dict[str, Any]]] = {}  # last line of each kind, by process
        self._offsets: dict[int, int] = {}
        plan = {"iterations": 10**6, "until_told": True, "pause_s": PAUSE_S, "counts": False, "samples": 2000}
        self._checkpoints = (DISK / folder.name if LAB else folder) / "checkpoints"
        self._clocks, self._trials = folder / "clocks", folder / "trials"
        self._clocks.mkdir()
        env = environment(folder / "cache", UNTUNED)
        env = {**env, "PYTHONPATH": f"{CLOCK}{os.pathsep}{env['PYTHONPATH']}", "SIRTAKI_TEST_CLOCKS": str(self._clocks)}
        if shape.is_tuned:
            env |= {"SIRTAKI_WARMUP_ITERATIONS": "200", "SIRTAKI_TRIAL_LOG": str(self._trials)}
        if shape.writes:
            env |= {"SIRTAKI_CHECKPOINT_DIR": str(self._checkpoints), "SIRTAKI_CHECKPOINT_S": "0.2"}
        hosts = ",".join(f"{host}:{slots}" for host, slots in shape.slots.items())
        # With separate networks, an agent has its own session, so that it survives the end of the driver's connection.
        starts = f"{LAB} {{host}} setsid --wait {{command}}" if shape.is_apart else "{command}"
        words = ["-H", hosts, "-np", str(sum(shape.slots.values())), "--min-np", "1", "--agent-command", starts]
        words += ["--network-interface", "eth0"] if shape.is_apart else []
        words += ["--blacklist-cooldown-range", "1", "2", "--on-driver-loss", "go-on" if shape.goes_on else "end"]
        words += [sys.executable, PROGRAM, folder, json.dumps(plan)]
        super().__init__(folder, words, env)
        self._driver = self.process.pid

    # ── what is there ────────────────────────────────────────────────────────────────────────────────────────────────

    def _logs(self) -> dict[int, list[dict[str, Any]]]:
        """Read new lines of all logs, and return all lines by process."""
        for path in self.folder.glob("*.log"):
            if path.stem.isdecimal():
                pid = int(path.stem)
                offset = self._offsets.get(pid, 0)
                if path.stat().st_size == offset:
                    continue
                with path.open("rb") as file:
                    file.seek(offset)
                    whole = file.read().rpartition(b"\n")
                self._offsets[pid] = offset + len(whole[0]) + len(whole[1])
                for line in map(json.loads, whole[0].splitlines()):
                    self._lines.setdefault(pid, []).append(line)
                    self._last.setdefault(pid, {})[line["what"]] = line
        return self._lines

    def _members(self) -> dict[int, tuple[int, str]]:
        """Return rank and host of living members with the job's state, in the newest generation or about to join it.
        // Excludes the minority side of a partition, which may wait for long before it ends.
        """
        self._logs()
        last_lines = {
            pid: last for pid, last in self._last.items()
            if "train" in last and pid not in self._gone and Path(f"/proc/{pid}").exists()
        }  # fmt: skip
        trained = [
            last["joined"]["generation"] for last in last_lines.values() if last["train"]["s"] > last["joined"]["s"]
        ]
        found = dict[int, tuple[int, str]]()
        for pid, last in last_lines.items():
            if last["joined"]["generation"] >= max(trained, default=0):
                with suppress(OSError, StopIteration):  # the process has just ended
                    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    host = next(each for each in environ if each.startswith(b"HOROVOD_HOSTNAME=")).partition(b"=")[2]
                    found[pid] = last["train"]["rank"], host.decode()
        return found

    def _newcomers(self, step: str) -> list[int]:
        """Return processes that have reached `step` on their way into the job, and do not train yet."""
        self._logs()
        last_lines = self._last
        if step == "import":
            there = [pid for pid, line in self.processes().items() if "sirtaki.run.rank" in line]
        else:
            there = [pid for pid in last_lines if step in last_lines[pid] and Path(f"/proc/{pid}").exists()]
        return [pid for pid in there if pid not in self._gone and "train" not in last_lines.get(pid, {})]

    def _agents(self) -> dict[str, int]:
        """Return the agent of each host with members: the parent of its ranks."""
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

    def text(self, most: int = 6000) -> str:
        """Return the end of each output file."""
        files = [self.folder / "out", self.folder / "err", *self.folder.glob("sirtaki-*.log")]
        return f"{self._shape}\n{self.done}\n" + "\n".join(path.read_text()[-most:] for path in files)

    # ── strikes ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Apply the faults and end the job. Raise AssertionError after a violation."""
        ranks = sum(self._shape.slots.values())
        self.expect(lambda: len(self._members()) == ranks, RECOVER_S, "all train")
        for what, phase in self._shape.strikes:
            least = 3 if what in ("two ranks", "driver", "agent", *OF_HOSTS) and ranks > 2 else 2
            self.expect(lambda least=least: len(self._members()) >= least, RECOVER_S, f"{least} of {ranks} train")
            if what == "clock":
                self.expect(self._is_settled, RECOVER_S, "all train since the last kill")
            elif phase in OF_RECOVERY and len(pids := list(self._members())) > least:
                self._kill(self._rng.choice(pids))
            self._strike(what, phase if self._wait_for(phase) else "any")
        self.expect(lambda: len(self._members()) == ranks, RECOVER_S, "all train again")
        numbers = {path.name for path in self._checkpoints.glob("checkpoint-*")}
        if self._shape.writes:
            is_newer = lambda: any(path.name not in numbers for path in self._checkpoints.glob("checkpoint-*"))  # noqa: E731
            self.expect(is_newer, RECOVER_S, "a checkpoint is written again")
        (self.folder / "end").touch()
        self.expect(lambda: not self.processes(), END_S, "all have ended")
        self._check()

    def _wait_for(self, phase: str) -> bool:
        """Wait for a phase: up to 30 s for the final rounds of a warm-up, else 1 s. Return whether it has begun."""
        begin_s = time.monotonic()
        while phase != "any" and time.monotonic() < begin_s + (30.0 if phase == "finals" else 1.0):
            if phase == "finals":
                if self._trials.exists() and '"finals"' in self._trials.read_text():
                    time.sleep(self._rng.uniform(0.0, 0.2))
                    return True
            elif phase == "writes":
                if list(self._checkpoints.glob("writing-*")):
                    return True
            else:
                newest = [line for log in self._logs().values() for line in log[-3:]]
                if any(line["what"] == phase and line["s"] > begin_s for line in newest):
                    if phase == "iteration":  # otherwise it is the pause after the iteration
                        time.sleep(self._rng.uniform(PAUSE_S, PAUSE_S + 0.01))
                    return True
            time.sleep(0.002)
        time.sleep(self._rng.uniform(0.0, 0.2))
        return False

    def _strike(self, what: str, phase: str) -> None:
        rng, members = self._rng, self._members()
        pids = sorted(members, key=lambda pid: members[pid][0])
        if len(pids) < 2:
            return
        self.done.append((what, phase))
        if what in ("rank", "again"):
            self._kill(rng.choice(pids))
            if what == "again":  # while the remaining ranks recover
                time.sleep(rng.uniform(0.0, 0.3))
                if len(left := list(self._members())) >= 2:
                    self._kill(rng.choice(left))
        elif what == "newcomer":
            self._kill(rng.choice(pids))
            step = rng.choice(STEPS)
            self.expect(lambda: self._newcomers(step), RECOVER_S, f"one comes as far as to {step}")
            time.sleep(rng.uniform(0.0, 1.0) if step in ("import", "start") else 0.0)
            self._kill(*self._newcomers(step)[:1])
            self.done[-1] = what, step
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
        elif what in ("agent", *OF_HOSTS):
            self._hit_host(what, members, pids)
        elif what == "clock":
            self._move_clock(rng.choice([*pids, *self._agents().values(), self._driver]), pids)
        elif what == "full":
            self._fill_disk()
        elif what == "disk":
            folder = self._checkpoints
            with suppress(OSError):  # a file stands in the folder's place, so that writes fail
                folder.rename(aside := folder.with_name("aside"))
                folder.write_text("full")
                time.sleep(0.5)
                folder.unlink()
                aside.rename(folder)

    def _is_settled(self) -> bool:
        """Return whether all train in a generation that began after the last kill, so that none will be dismissed."""
        last_s = max((s for s, pid, _ in self._kills if pid in self._gone), default=0.0)
        members = self._members()
        is_whole = len(members) == sum(self._shape.slots.values())
        begun_s = [(self._last[pid]["joined"]["s"], self._last[pid]["train"]["s"]) for pid in members]
        return is_whole and all(last_s < joined_s < train_s for joined_s, train_s in begun_s)

    def _move_clock(self, pid: int, pids: list[int]) -> None:
        """Move the wall clock of one process by hours. All ranks must continue."""
        (self._clocks / str(pid)).write_text(str(self._rng.choice([-1, 1]) * self._rng.uniform(3600, 12 * 3600)))
        since_s = time.monotonic() + 2.0
        self.expect(lambda: self._train_since(since_s, pids), RECOVER_S, f"all go on after {pid}'s clock has jumped")

    def _train_since(self, s: float, pids: list[int]) -> bool:
        """Return whether all processes have finished an iteration after time `s`."""
        logs = self._logs()
        return all(any(line["what"] == "iteration" and line["s"] > s for line in logs[pid][-9:]) for pid in pids)

    def _fill_disk(self) -> None:
        """Fill the disk. Commits must survive, the failure must be logged, and writing must resume afterwards."""
        newest = CheckpointFolder(self._checkpoints).newest
        self.expect(newest, RECOVER_S, "there is a checkpoint")
        before = self._refusals()
        with (DISK / "filling").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        self.expect(lambda: self._refusals() > before, RECOVER_S, "a full disk is logged")
        before = newest()
        (DISK / "filling").unlink()
        assert before is not None, "no checkpoint is left"
        self.expect(lambda: (found := newest()) and found.number > before.number, RECOVER_S, "it is written again")

    def _refusals(self) -> int:
        return self.text(most=10**9).count("cannot write commit")

    def _hit_host(self, what: str, members: dict[int, tuple[int, str]], pids: list[int]) -> None:
        """Apply a fault to a host whose loss leaves most members and rank 0, and which has no driver."""
        hosts, agents = Counter(host for _, host in members.values()), self._agents()
        free = [
            host for host, count in hosts.items()
            if host in agents and 2 * count < len(pids) and host != members[pids[0]][1] and not self._has_driver(host)
        ]  # fmt: skip
        if not free:
            self.done.pop()
            return
        host = self._rng.choice(free)
        if what == "agent":
            self._kill(agents[host])
            self._gone.update(pid for pid in pids if members[pid][1] == host)
            return
        ranks = [pid for pid in pids if members[pid][1] == host]
        there = {agents[host], *ranks}
        if what == "host":
            for number, pause_s in ((signal.SIGSTOP, HOST_STOPS_S), (signal.SIGCONT, 0.0)):
                for pid in there:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(pause_s)
        else:
            other = self._rng.choice([each for each in hosts if each != host])
            hurt(what, host, other)
            time.sleep(self._rng.uniform(5.0, 20.0))
            heal(host, other)
        since_s = time.monotonic() + 3.0
        # An agent that may replace a driver searches for one, and waits two minutes for agents at its own address.
        limit_s = 240.0 if self._shape.goes_on else RECOVER_S
        self.expect(
            lambda: not there & set(self.processes()) or (what != "host" and self._train_since(since_s, ranks)),
            limit_s,
            f"{host} goes on, or those that were given up end",
        )

    def _has_driver(self, host: str) -> bool:
        """Return whether the driver runs on a host. The first one runs where jobs start, a successor at its agent."""
        first = self._shape.is_apart and host == HOSTS[0] and self._driver == self.process.pid
        agent = self._agents().get(host)
        return first or (agent is not None and self._driver_is_of(agent))

    def _driver_is_of(self, agent: int) -> bool:
        """Return whether an agent has started the current driver."""
        with suppress(OSError):
            return int(Path(f"/proc/{self._driver}/stat").read_text().rpartition(")")[2].split()[1]) == agent
        return False

    def _successor(self) -> int | None:
        there = [pid for pid, line in self.processes().items() if "sirtaki.run.elastic.driver" in line]
        says = [path.read_text() for path in self.folder.glob("sirtaki-*.log") if not path.stem.isdecimal()]
        return next((pid for pid in there if any(f"process {pid} on" in text for text in says)), None)

    def _kill(self, *pids: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self._kills.append((time.monotonic(), pid, " in ".join(self.done[-1] if self.done else ("", ""))))
                self._gone |= {pid} - {self._driver}
        if self.process.pid in pids:
            self.process.wait()

    @property
    def killed(self) -> int:
        return len(self._kills)

    def pauses_s(self) -> list[tuple[float, str]]:
        """Return the pause from each kill of a training rank until a rank trains in a new generation, and the fault."""
        begun_s = dict[int, float]()
        for line in (line for log in self._logs().values() for line in log if line["what"] == "iteration"):
            begun_s[line["generation"]] = min(line["s"], begun_s.get(line["generation"], line["s"]))
        of_ranks = [(s, strike) for s, pid, strike in self._kills if "train" in self._last.get(pid, {})]
        after = [([on_s - s for on_s in begun_s.values() if on_s > s], strike) for s, strike in of_ranks]
        return [(min(some), strike) for some, strike in after if some]

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
        if not (
            self._shape.is_tuned or self._shape.is_apart
        ):  # because with several streams or transports the order of sums varies
            judge._check_reference(history)
        if self._shape.writes:
            self._check_checkpoint(history)
        before, traceback, after = self.text(most=10**9).partition("Traceback")
        assert not traceback, f"{before[-1000:]}{traceback}{after[:5000]}"

    def _check_checkpoint(self, history: list[list[dict[str, Any]]]) -> None:
        """Check that the newest checkpoint is complete and holds what was committed, and that none is partial."""
        assert not list(self._checkpoints.glob("writing-*")), f"a part of a checkpoint is left\n{self.text()}"
        newest = CheckpointFolder(self._checkpoints).newest()
        assert newest is not None, f"no checkpoint is left\n{self.text()}"
        tree, model = newest.load(), make_model(Plan.width)
        model.load_state_dict(tree["states"]["model"])
        iteration = tree["values"]["iteration"]
        assert hash_of(model) == history[iteration - 1][0]["hash"], (
            f"{newest} is not iteration {iteration}\n{self.text()}"
        )

    def clear(self) -> None:
        """End the remaining processes."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self._checkpoints, ignore_errors=True)  # because the lab's small disk is needed by later jobs


# ── a lab ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def tc_of(host: str) -> list[list[str]]:
    """Return two commands that replace a host's queue of incoming and of outgoing packets; a queue is appended."""
    port = ["nsenter", "--target", "1", "--net", "tc", "qdisc", "replace", "dev", f"port{HOSTS.index(host)}", "root"]
    return [port, [LAB, host, "tc", "qdisc", "replace", "dev", "eth0", "root"]]


def hurt(what: str, host: str, other: str) -> None:
    """Drop packets silently until `heal`."""
    into, out_of = tc_of(host)
    if what == "link":  # redirect them to a neighbour that does not exist
        for here, there in ((host, other), (other, host)):
            neighbour = f"10.77.0.{HOSTS.index(there) + 1} lladdr 02:00:00:00:00:01 dev eth0 nud permanent"
            subprocess.run([LAB, here, "ip", "neigh", "replace", *neighbour.split()], check=True)
    for queue in {"cut": [into, out_of], "deaf": [into], "link": []}[what]:
        subprocess.run([*queue, *CUT.split()], check=True)


def heal(host: str, other: str) -> None:
    """Undo `hurt`."""
    for queue in tc_of(host):
        subprocess.run([*queue, *WHOLE.split()], check=True)
    for here in (host, other):
        subprocess.run([LAB, here, "ip", "neigh", "flush", "all", "nud", "permanent"], check=True)


def in_lab() -> int | None:
    """Run this program in a lab. Return its exit status; None inside a lab, or if this machine has none."""
    if INSIDE not in os.environ and (why := why_unavailable()):
        print(f"without {', '.join(IN_LAB)}: {why}", flush=True)
        return None
    if INSIDE not in os.environ:
        os.environ[INSIDE] = "mount"
        os.execvp("unshare", ["unshare", "--mount", sys.executable, *sys.argv])
    if LAB != "mount":
        return None
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(DISK)], check=True)
    with NetLab(LabShape(nodes=len(HOSTS), link_bits_per_s=10**9, flow_bits_per_s=10**9)) as lab:
        return lab.popen(0, [sys.executable, *sys.argv], env={INSIDE: str(lab.agent)}).wait()


def _make_touchy() -> None:
    """Define the class that checkpoints of `ranks/elastic_member.py` refer to if they contain its `Touchy`."""


def main() -> int:
    if (code := in_lab()) is not None:
        return code
    seed, strikes, each = int(sys.argv[1]), int(sys.argv[2]), int([*sys.argv, "10"][3])
    struck, pauses_s = Counter[tuple[str, str]](), list[tuple[float, str]]()
    killed = failed = number = 0
    while struck.total() < strikes and number < strikes:
        rng = random.Random(f"{seed} {number}")
        with tempfile.TemporaryDirectory(prefix="elastic-chaos-") as name:
            begin_s, shape = time.monotonic(), draw(rng, min(each, strikes - struck.total()), sys.argv[4:])
            job = Job(shape, Path(name), rng)
            wrong = ""
            try:
                job.run()
            except AssertionError as err:
                wrong = str(err)
                if KEEP:
                    shutil.copytree(name, Path(KEEP) / f"{seed}-{number}", dirs_exist_ok=True)
            finally:
                job.clear()
        killed, failed = killed + job.killed, failed + bool(wrong)
        struck.update(job.done)
        pauses_s.extend(job.pauses_s())
        traits = {"go-on": shape.goes_on, "apart": shape.is_apart, "tuned": shape.is_tuned, "writes": shape.writes}
        kind = " ".join([str([*shape.slots.values()]), *(trait for trait, there in traits.items() if there)])
        took = f"{len(job.done)} strikes, {job.killed} kills in {time.monotonic() - begin_s:.0f} s"
        print(f"{seed}/{number} {kind}: {took}: {wrong or 'right'}", flush=True)
        number += 1
        print(f"{number} jobs, {killed} kills, {failed} jobs wrong; {summary(struck, pauses_s)}", flush=True)
    return int(failed > 0)


def summary(struck: Counter[tuple[str, str]], pauses_s: list[tuple[float, str]]) -> str:
    """Describe faults by kind and phase, and the pauses after kills."""
    kinds, phases = Counter[str](), Counter[str]()
    for (what, phase), count in struck.items():
        kinds[what] += count
        phases[phase] += count
    counts = [", ".join(f"{count} {each}" for each, count in some.most_common()) for some in (kinds, phases)]
    middle_s = median(s for s, _ in pauses_s) if pauses_s else 0.0
    longest = ", ".join(f"{s:.1f} ({strike})" for s, strike in sorted(pauses_s, reverse=True)[:5])
    return f"strikes {counts[0]}; in phases {counts[1]}; on after kills in {middle_s:.1f} s, at most {longest}"


if __name__ == "__main__":
    sys.exit(main())
