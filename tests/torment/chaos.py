"""Jobs of three ranks with one or two faults at random moments, and checks of how they end.

    chaos.py SEED JOBS          run in namespaces; prints one line per job; exit status 1 if a job ended wrongly
    chaos.py FOLDER PLAN RANK   the training script of one rank

After a fault that training cannot survive, the whole job must end in time, with the exit code of the failed rank and a
message that names the rank and the failed operation. After a fault that training can survive, weights must be right
and the exit code 0. No processes, shared memory, listening sockets or temporary files may remain. Jobs run in their own
mount and network namespaces, so that all remains are theirs.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

RANKS, STEPS, WARMUP_STEPS, STEP_S, BATCH = 3, 100, 40, 0.01, 8
EXIT_CODE = 77
FAULTS: Mapping[str, set[int]] = {
    "kill": {128 + signal.SIGKILL},
    "segmentation": {128 + signal.SIGSEGV},
    "stop": {1},  # stopped for longer than the stall limit
    "raise": {1},
    "exit": {EXIT_CODE},
    "exit in C": {EXIT_CODE},
    "out of memory": {1, 128 + signal.SIGABRT},  # C++ code may fail first
    "interrupt": {128 + signal.SIGINT},
    "terminate": {128 + signal.SIGTERM},
    "launcher killed": {-signal.SIGKILL},
    "mpiexec killed": {128 + signal.SIGKILL, 1},
    "pause": {0},
    "no descriptors": {0},
    "disk full": {0},
    "output full": {0},
    "output closed": {0},
    "registry deleted": {0},
    "registry damaged": {0},
}
"""Correct exit codes by fault."""
BY_THE_RANK = ("raise", "exit", "exit in C", "out of memory", "no descriptors")
TO_THE_LAUNCHER = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "launcher killed": signal.SIGKILL}
TOLD_BY_NOBODY = ("output closed", "output full", "launcher killed")

JOB_S = 120.0
"""Time limit of a job in seconds. A job that takes longer hangs."""
END_S = 20.0
"""Time limit from the fault to the end of the job, in addition to the stall time if the fault is a stall."""
LEAVE_S = 12.0
"""Time limit for processes that no launcher can notify, from the end of a killed launcher."""
STALL_SHUTDOWN_S = 20.0
STOPPED_S = 2 * STALL_SHUTDOWN_S
DISK_BYTES = 2 << 20
SHM = Path("/dev/shm")
UNDONE = re.compile(r"iteration \d+|has not computed|waits? for|missing: rank|has ended its script")


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A fault: its kind, the rank that it hits, and its time: after `step` steps (None = at once) and a delay."""

    fault: str
    rank: int
    step: int | None
    delay_s: float
    lasts_s: float = 1.0

    @property
    def ends_the_job(self) -> bool:
        return FAULTS[self.fault] != {0}


@dataclass
class Outcome:
    """End of a job.

    Attributes:
        returncode: exit code; None = the job did not end.
        struck: applied faults, each with the number of steps before.
    """

    returncode: int | None = None
    struck: list[tuple[Strike, int]] = field(default_factory=list)
    end_s: float = math.nan  # from the first fatal fault to the launcher's end
    output: str = ""
    message: str = ""  # output after the first fatal fault
    left: list[str] = field(default_factory=list)
    weights: dict[int, bytes] = field(default_factory=dict)


def draw(seed: int, jobs: int) -> list[list[Strike]]:
    """Draw faults for each job. All kinds are equally frequent, and pairs twice as frequent."""
    rng = random.Random(seed)
    kinds: list[str | None] = []
    while len(kinds) < jobs:
        again: list[str | None] = [*FAULTS, None, None]
        rng.shuffle(again)
        kinds += again
    return [_strikes(kind, rng) for kind in kinds[:jobs]]


def _strikes(kind: str | None, rng: random.Random) -> list[Strike]:
    if kind is not None:
        return [_strike(kind, rng)]
    first = _strike(rng.choice([fault for fault in FAULTS if fault not in TO_THE_LAUNCHER]), rng)
    second = _strike(rng.choice([fault for fault in FAULTS if fault != first.fault]), rng)
    if rng.random() < 0.3:
        return [first, second]
    other = rng.choice([rank for rank in range(RANKS) if rank != first.rank])
    soon_s = first.delay_s + rng.uniform(0.0, 1.0)
    return [first, Strike(fault=second.fault, rank=other, step=first.step, delay_s=soon_s, lasts_s=second.lasts_s)]


def _strike(fault: str, rng: random.Random) -> Strike:
    step, delay_s = rng.choices(
        [
            (None, rng.uniform(0.0, 5.0)),
            (rng.randrange(1, 20), rng.uniform(0.0, 1.0)),  # because probes run within the first steps
            (rng.randrange(WARMUP_STEPS, STEPS), rng.uniform(0.0, 0.02)),
            (STEPS, rng.uniform(0.0, 0.5)),
        ],
        weights=[
            0 if fault == "no descriptors" else 12,
            38,
            38,
            12,
        ],  # because a process without descriptors cannot import anything
    )[0]
    return Strike(fault=fault, rank=rng.randrange(RANKS), step=step, delay_s=delay_s, lasts_s=rng.uniform(0.1, 1.5))


# ── How a job must end ───────────────────────────────────────────────────────────────────────────────────────────────


def judge(outcome: Outcome, reference: np.ndarray[Any, Any]) -> list[str]:
    """Describe what is wrong with how a job ended."""
    wrong = [f"{len(outcome.left)} left: {outcome.left[0]}"] if outcome.left else []
    if outcome.returncode is None:
        return [*wrong, "did not end"]
    fatal = [(strike, steps) for strike, steps in outcome.struck if strike.ends_the_job]
    late = [
        (strike, steps) for strike, steps in fatal if strike.step == STEPS or steps >= STEPS
    ]  # perhaps after the end
    codes = {code for strike, _ in fatal for code in FAULTS[strike.fault]} | ({0} if fatal == late else set())
    if outcome.returncode not in codes:
        wrong.append(f"exit code {outcome.returncode}, not {' or '.join(map(str, sorted(codes)))}")
    if outcome.returncode == 0:
        wrong += _wrong_weights(outcome, reference)
    # A rank that has finished does not delay the others, and the job ends with it.
    stopped = [strike for strike, _ in fatal if strike.fault == "stop"]
    allowed_s = END_S + (STOPPED_S if any(one in stopped for one, _ in late) else STALL_SHUTDOWN_S if stopped else 0.0)
    if outcome.end_s > allowed_s:
        wrong.append(f"took {outcome.end_s:.1f} s to end")
    if not fatal and "Traceback" in outcome.output:
        wrong.append("a traceback though nothing ended the job")
    faults = {strike.fault for strike, _ in outcome.struck}
    if fatal and outcome.returncode != 0 and faults.isdisjoint((*TOLD_BY_NOBODY, *TO_THE_LAUNCHER, "mpiexec killed")):
        if not any(re.search(rf"\brank {strike.rank}\b", outcome.message) for strike, _ in fatal):
            wrong.append(f"rank {fatal[0][0].rank} is not named")
        if all(0 < steps < STEPS for _, steps in fatal) and not UNDONE.search(outcome.message):
            wrong.append("no word of what was not done")
    return wrong


def _wrong_weights(outcome: Outcome, reference: np.ndarray[Any, Any]) -> list[str]:
    if len(outcome.weights) < RANKS:
        return [f"exit code 0, and no weights of {RANKS - len(outcome.weights)} ranks"]
    found = [np.load(io.BytesIO(raw)) for _, raw in sorted(outcome.weights.items())]
    if any(not np.array_equal(found[0], other) for other in found[1:]):
        return ["ranks differ"]
    error = float(np.abs(found[0] - reference).max())
    return [f"weights are off by {error:.2g}"] if not error < 1e-4 else []


# ── A job from launch to inspection ──────────────────────────────────────────────────────────────────────────────────


class Job:
    """One job and its faults. Used once."""

    def __init__(self, strikes: Sequence[Strike], *, transport: str | None, shuts_down: bool) -> None:
        self._strikes, self._transport, self._shuts_down = strikes, transport, shuts_down
        self._token = f"CHAOS_JOB={random.random()}"
        self._outcome = Outcome()
        self._console: list[bytes] = []
        self._fatal_s, self._fatal_line = math.nan, 0
        self._over, self._close_console = threading.Event(), threading.Event()

    def run(self) -> Outcome:
        """Run the job and apply its faults. End all of its processes."""
        self._folder = Path(tempfile.mkdtemp(prefix="chaos-"))  # a short path, because paths of sockets are limited
        self._disk, self._tmp, self._run = (self._folder / name for name in ("disk", "tmp", "run"))
        for folder in (self._disk, self._tmp, self._run):
            folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", self._disk], check=True)
        try:
            self._launcher = self._launch()
            try:
                self._watch()
            finally:
                self._over.set()
                self._end()
        finally:
            subprocess.run(["umount", "--lazy", self._disk], check=True)
            shutil.rmtree(self._folder, ignore_errors=True)
            for left in SHM.iterdir():  # already reported; removed so that the next job is not blamed
                left.unlink()
        return self._outcome

    def _launch(self) -> subprocess.Popen[bytes]:
        faults = {strike.fault for strike in self._strikes}
        by_rank = [[strike.fault, strike.rank] for strike in self._strikes if strike.fault in BY_THE_RANK]
        command = [str(Path(sys.executable).with_name("sirtakirun")), "-np", str(RANKS)]
        if faults & {"disk full", "output full"}:
            command += ["--output-filename", str(self._disk / "out")]
        plan = json.dumps({"strikes": by_rank, "shuts_down": self._shuts_down})
        command += [sys.executable, __file__, str(self._folder), plan, "rank"]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("SIRTAKI_", "HOROVOD_"))}
        environ |= {
            **dict([self._token.split("=")]),
            "TMPDIR": str(self._tmp),
            "XDG_RUNTIME_DIR": str(self._run),
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(self._disk / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(self._folder / "torch"),  # torch creates it even without compilation
            "SIRTAKI_REGISTRY": str(self._disk / "registry" / "registry.sqlite"),
            "SIRTAKI_TRIAL_LOG": str(self._disk / "trials.jsonl"),
            "HOROVOD_TIMELINE": str(self._disk / "timeline.json"),
            "SIRTAKI_WARMUP_ITERATIONS": str(WARMUP_STEPS),
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(STALL_SHUTDOWN_S),
            **({"SIRTAKI_TRANSPORT": self._transport} if self._transport else {}),
        }
        (self._disk / "registry").mkdir()
        start = partial(subprocess.Popen, command, env=environ, stdin=subprocess.DEVNULL)
        self._readers: list[threading.Thread] = []
        if "output full" in faults:
            with (self._disk / "stdout").open("wb") as output:
                return start(stdout=output, stderr=subprocess.STDOUT)
        launcher = start(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert launcher.stdout is not None
        os.set_blocking(launcher.stdout.fileno(), False)
        self._readers.append(threading.Thread(target=self._read, args=[launcher.stdout], daemon=True))
        return launcher

    def _read(self, stream: Any) -> None:
        while not self._close_console.is_set():
            text = stream.read(65536)
            if text == b"":
                return
            if text is None:
                time.sleep(0.02)
            else:
                self._console.append(text)
        stream.close()

    def _watch(self) -> None:
        begin_s, outcome = time.monotonic(), self._outcome
        strikers = [threading.Thread(target=self._strike, args=[strike, begin_s]) for strike in self._strikes]
        for thread in (*strikers, *self._readers):
            thread.start()
        with contextlib.suppress(subprocess.TimeoutExpired):
            outcome.returncode = self._launcher.wait(timeout=JOB_S)
        outcome.end_s = time.monotonic() - self._fatal_s
        self._over.set()
        for thread in strikers:
            thread.join()
        is_notified = all(strike.fault != "launcher killed" for strike, _ in outcome.struck)
        deadline_s = time.monotonic() + (1.0 if is_notified else LEAVE_S)
        while self._left() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        outcome.left = self._left()
        for thread in self._readers:
            thread.join(timeout=5.0)
        full = self._disk / "stdout"
        outcome.output = b"".join(self._console).decode(errors="replace")
        outcome.output += full.read_text(errors="replace") if full.exists() else ""
        outcome.message = b"".join(self._console[self._fatal_line :]).decode(errors="replace")
        for rank in range(RANKS):
            with contextlib.suppress(OSError):
                outcome.weights[rank] = (self._folder / f"weights.{rank}.npy").read_bytes()

    def _strike(self, strike: Strike, begin_s: float) -> None:
        """Wait until a fault is due and apply it, unless the job has ended. Runs in a thread."""
        progress = self._folder / f"progress.{strike.rank}"

        def steps() -> int:
            return progress.stat().st_size if progress.exists() else -1

        if strike.step is None:
            self._over.wait(max(0.0, begin_s + strike.delay_s - time.monotonic()))
            least = 0 if strike.fault in BY_THE_RANK else -1
        else:
            least = strike.step
        while steps() < least:
            if self._over.wait(0.002):
                return
        if strike.step is not None:
            time.sleep(strike.delay_s)
        while not self._over.is_set():
            done, now_s, line = steps(), time.monotonic(), len(self._console)
            if self._commit(strike):
                self._outcome.struck.append((strike, done))
                if strike.ends_the_job and math.isnan(self._fatal_s):
                    self._fatal_s, self._fatal_line = now_s, line
                return
            time.sleep(0.01)

    def _commit(self, strike: Strike) -> bool:
        """Apply a fault. Return whether its victim existed."""
        match strike.fault:
            case "disk full" | "output full":
                with contextlib.suppress(OSError), (self._disk / "ballast").open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))
            case "output closed":
                self._close_console.set()
            case "registry deleted":
                shutil.rmtree(self._disk / "registry", ignore_errors=True)
            case "registry damaged":
                for path in (self._disk / "registry").iterdir():
                    with contextlib.suppress(OSError), path.open("r+b") as file:
                        file.write(os.urandom(4096))
            case "interrupt" | "terminate" | "launcher killed":
                return _signal(self._launcher.pid, TO_THE_LAUNCHER[strike.fault])
            case "mpiexec killed":
                starters = {pid for pid in self._processes() if _status(pid).get("Name") in ("mpiexec", "prterun")}
                return any(_signal(pid, signal.SIGKILL) for pid in starters)
            case _:
                return self._hit_rank(strike)
        return True

    def _hit_rank(self, strike: Strike) -> bool:
        wanted = f"OMPI_COMM_WORLD_RANK={strike.rank}".encode()
        parents = {pid: _status(pid).get("PPid") for pid, words in self._processes().items() if wanted in words}
        # Exclude processes that the rank has started.
        pid = next((pid for pid, parent in parents.items() if parent is None or int(parent) not in parents), None)
        if pid is None:
            return False
        if strike.fault in BY_THE_RANK:
            return _signal(pid, signal.SIGUSR1)
        if strike.fault in ("kill", "segmentation"):
            return _signal(pid, signal.SIGKILL if strike.fault == "kill" else signal.SIGSEGV)
        lasts_s = strike.lasts_s if strike.fault == "pause" else STOPPED_S
        resume = threading.Timer(lasts_s, _signal, args=[pid, signal.SIGCONT])
        resume.daemon = True
        resume.start()
        return _signal(pid, signal.SIGSTOP)

    def _processes(self) -> dict[int, list[bytes]]:
        """Return the processes of this job with their environments."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (folder / "environ").read_bytes().split(b"\0")
                if self._token.encode() in words:
                    found[int(folder.name)] = words
        return found

    def _left(self) -> list[str]:
        processes = [f"process {pid} {_status(pid).get('Name')}" for pid in self._processes()]
        # A killed rank's socket in the run folder is removed by the next process that opens the folder.
        runs = self._run.glob("*/*") if self._outcome.returncode == 0 else ()
        files = [f"file {path}" for path in (*SHM.rglob("*"), *self._tmp.rglob("*"), *runs)]
        sockets = []
        for table in ("tcp", "tcp6"):
            rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
            sockets += [f"listening socket {words[1]}" for words in rows if words[3] == "0A"]
        return [*processes, *files, *sockets]

    def _end(self) -> None:
        self._launcher.kill()
        self._launcher.wait()
        while processes := self._processes():
            for pid in processes:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.02)


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _status(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {}


def unshared() -> list[str]:
    """Return a command prefix that starts a program in namespaces of its own."""
    return ["unshare", "--mount", "--net", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]


def why_unavailable() -> str | None:
    """Return why this machine does not permit the namespaces, or None."""
    missing = [tool for tool in ("unshare", "ip", "mount") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    mount = [*unshared(), "mount", "-t", "tmpfs", "tmpfs", str(SHM)]
    tried = subprocess.run(mount, capture_output=True, text=True, check=False)
    return tried.stderr.strip() or "no namespaces" if tried.returncode else None


def main(seed: int, jobs: int) -> int:
    """Run the jobs one by one, in namespaces."""
    if "CHAOS_INSIDE" not in os.environ:
        os.environ["CHAOS_INSIDE"] = "1"
        os.execvp("unshare", [*unshared(), sys.executable, *sys.argv])
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(SHM)], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that `finally` blocks end the job
    expected, any_wrong, rng = reference(), False, random.Random(seed)
    for strikes in draw(seed, jobs):
        transport = rng.choice([None, None, "shared_memory", "gloo", "mpi"])
        outcome = Job(strikes, transport=transport, shuts_down=rng.random() < 0.5).run()
        wrong = judge(outcome, expected)
        struck = ", ".join(f"{strike.fault} of rank {strike.rank} at {steps}" for strike, steps in outcome.struck)
        print(f"{struck or 'not struck'}, {transport}: {outcome.returncode}; {'; '.join(wrong) or 'right'}", flush=True)
        if wrong:
            any_wrong = True
            print(strikes, outcome.output[-6000:], *outcome.left, sep="\n", flush=True)
    return int(any_wrong)


# ── A rank ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Victim:
    """Makes this rank fail when it gets SIGUSR1."""

    def __init__(self, faults: list[str]) -> None:
        self._faults = faults
        self._again: Callable[[], object] | None = None
        self._limits: dict[int, tuple[int, int]] = {}
        signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        for fault in self._faults:
            match fault:
                case "raise":
                    self._fail(self._raise)
                case "exit":
                    self._fail(partial(sys.exit, EXIT_CODE))
                case "exit in C":
                    os._exit(EXIT_CODE)
                case "out of memory":  # limit the address space, then allocate a large tensor
                    import torch

                    pages = int(Path("/proc/self/statm").read_text().split()[0])
                    self._lower(resource.RLIMIT_AS, (pages + 1024) * resource.getpagesize())
                    self._fail(lambda: print(torch.ones(1 << 29).sum()))
                case "no descriptors":
                    free = os.open(os.devnull, os.O_RDONLY)
                    os.close(free)
                    self._lower(resource.RLIMIT_NOFILE, free)

    def _raise(self) -> None:
        raise RuntimeError("a bad batch")

    def _fail(self, fail: Callable[[], object]) -> None:
        self._again = fail
        fail()

    def check(self) -> None:
        """Fail again if the exception of the signal handler was lost, for example in a destructor."""
        if self._again is not None:
            self._again()

    def _lower(self, kind: int, value: int) -> None:
        soft, hard = resource.getrlimit(kind)
        self._limits.setdefault(kind, (soft, hard))
        resource.setrlimit(kind, (value, hard))

    def release(self) -> None:
        """Remove the limits."""
        for kind, limits in self._limits.items():
            resource.setrlimit(kind, limits)


def made(dtype: str) -> Any:
    """Return a network with the same weights on every rank."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    layers = [nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)]
    return nn.Sequential(*layers).to(getattr(torch, dtype))


def batch(step: int, rank: int) -> Any:
    """Return a batch of a rank, `(BATCH, 32)`."""
    import torch

    return torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(1000 * step + rank))


def weights(network: Any) -> np.ndarray[Any, Any]:
    """Return all weights, `(n,)`."""
    return np.concatenate([parameter.detach().numpy().ravel() for parameter in network.parameters()])


def reference() -> np.ndarray[Any, Any]:
    """Return the weights after training in float64 in one process, on the joined batches."""
    import torch

    network = made("float64")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        network(torch.cat([batch(step, rank) for rank in range(RANKS)]).double()).square().mean().backward()
        optimizer.step()
    return weights(network)


def train(folder: Path, plan: Mapping[str, Any]) -> None:
    """Train. Append a byte to `progress.RANK` after each step, and write the weights to `weights.RANK.npy` at last."""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    victim = Victim([fault for fault, hit in plan["strikes"] if hit == rank])
    progress = os.open(folder / f"progress.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    import torch

    import sirtaki.torch as hvd

    hvd.init()
    network = made("float32")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.5), named_parameters=network.named_parameters()
    )
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    for step in range(STEPS):
        victim.check()
        optimizer.zero_grad()
        loss = network(batch(step, rank)).square().mean()
        loss.backward()
        optimizer.step()
        os.write(progress, b".")
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss:.4f}")
        time.sleep(STEP_S)
    victim.release()
    np.save(folder / f"weights.{rank}.npy", weights(network))
    if plan["shuts_down"]:
        hvd.shutdown()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # because Python removes its handlers before the process has ended


if __name__ == "__main__":
    if len(sys.argv) == 4:
        train(Path(sys.argv[1]), json.loads(sys.argv[2]))
    else:
        sys.exit(main(*map(int, sys.argv[1:])))
