"""One job of the chaos run from launch to inspection, in namespaces where nothing but that job can leave anything.

`enter()` gives this process a mount and a network namespace of its own: /dev/shm is empty, sockets that listen are the
job's, and the small disk that is to be full exists here only. All of it ends with this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.chaos_faults import LAUNCHER_SIGNALS, RANKS, SIGNALS, STEPS, WARMUP_STEPS, Fault, Scenario, Strike

JOB_S = 120.0
"""Longer than any job takes; what is not over by then hangs."""

LEAVE_S = 12.0
"""After the launcher's end: how long processes may take that could not be told (a killed launcher's ranks)."""

STALL_WARNING_S = 10.0
STALL_SHUTDOWN_S = 20.0
STOPPED_S = 2 * STALL_SHUTDOWN_S
"""After this long a stopped rank goes on."""
DISK_BYTES = 2 << 20
SHM = Path("/dev/shm")
PROGRAM = Path(__file__).with_name("chaos_job.py")
_INSIDE = "CHAOS_INSIDE"


class SceneError(RuntimeError):
    """This machine does not allow the namespaces."""


def why_unavailable() -> str | None:
    """Why this machine does not allow the namespaces, or None if it does."""
    missing = [tool for tool in ("unshare", "ip", "mount") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (packages iproute2, mount and util-linux)"
    tried = subprocess.run([*_unshare(), "mount", "-t", "tmpfs", "tmpfs", str(SHM)], capture_output=True, text=True)
    return tried.stderr.strip() or "no namespaces" if tried.returncode != 0 else None


def enter() -> None:
    """Starts this program anew in namespaces of its own, and returns there.

    Raises:
        SceneError: this machine does not allow them.
    """
    if _INSIDE not in os.environ:
        if (reason := why_unavailable()) is not None:
            raise SceneError(reason)
        os.environ[_INSIDE] = "1"
        os.execvp("unshare", [*_unshare(), *sys.orig_argv])
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(SHM)], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def _unshare() -> list[str]:
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", "--mount", "--net", *as_root]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a job ended, and what it left.

    Attributes:
        returncode: of the launcher; None = it did not end within `JOB_S` and was killed.
        struck: what was really done, with the number of steps that the rank had then finished; a fault that came after
            the job's end is missing.
        end_s: from the first fault that ends the job to the end of the launcher; NaN without one.
        life_s: from launch to end.
        output: both of the launcher's streams.
        said: what of it came after the first fault that ends the job.
        left: processes, files and sockets that are still there.
        weights: by rank, bytes of the file that it left.
    """

    returncode: int | None = None
    struck: list[tuple[Strike, int]] = field(default_factory=list)
    end_s: float = float("nan")
    life_s: float = 0.0
    output: str = ""
    said: str = ""
    left: list[str] = field(default_factory=list)
    weights: dict[int, bytes] = field(default_factory=dict)


class Job:
    """Runs one scenario; used once."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._token = f"chaos-{os.getpid()}-{scenario.number}"
        self._outcome = Outcome()
        self._console: list[bytes] = []
        self._fatal_s: float | None = None
        self._fatal_line = 0
        self._over = threading.Event()

    def run(self) -> Outcome:
        """The job from launch to inspection; none of its processes is left when this returns."""
        with self._place() as folder:
            self._launch(folder)
            try:
                self._watch()
                self._inspect()
            finally:  # Ctrl-C, too
                self._over.set()
                self._end()
            for thread in self._readers:
                thread.join(timeout=5.0)
            self._outcome.output = b"".join(self._console).decode(errors="replace") + self._full_output()
            self._outcome.said = b"".join(self._console[self._fatal_line :]).decode(errors="replace")
            for rank in range(RANKS):
                with contextlib.suppress(OSError):
                    self._outcome.weights[rank] = (folder / f"weights.{rank}.npy").read_bytes()
        return self._outcome

    def _watch(self) -> None:
        begin_s = time.monotonic()
        strikers = [threading.Thread(target=self._strike, args=[one, begin_s]) for one in self._scenario.strikes]
        for thread in (*strikers, *self._readers):
            thread.start()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._outcome.returncode = self._launcher.wait(timeout=JOB_S)
        end_s = time.monotonic()
        self._over.set()
        for thread in strikers:
            thread.join()
        self._outcome.life_s = end_s - begin_s
        if self._fatal_s is not None:
            self._outcome.end_s = end_s - self._fatal_s

    @contextlib.contextmanager
    def _place(self) -> Iterator[Path]:
        """A folder with a small disk in it; short names, since sockets in TMPDIR have no room for long ones."""
        self._folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        self._disk, self._tmp = self._folder / "disk", self._folder / "tmp"
        self._disk.mkdir()
        self._tmp.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self._disk)], check=True)
        try:
            yield self._folder
        finally:
            subprocess.run(["umount", "--lazy", str(self._disk)], check=True)
            shutil.rmtree(self._folder, ignore_errors=True)
            for left in SHM.iterdir():  # counted already; the next job is not to blame for it
                left.unlink()

    def _launch(self, folder: Path) -> None:
        scenario = self._scenario
        plan = {
            "steps": STEPS,
            "shuts_down": scenario.shuts_down,
            "strikes": [
                {"fault": strike.fault.name, "rank": strike.rank, "exit_code": strike.exit_code}
                for strike in scenario.strikes
                if strike.fault.by_the_rank
            ],
        }
        command = [str(Path(sys.executable).with_name("sirtakirun")), "-np", str(RANKS)]
        files = any(strike.fault in (Fault.DISK_FULL, Fault.OUTPUT_FULL) for strike in scenario.strikes)
        if files:
            command += ["--output-filename", str(self._disk / "out")]
        command += [sys.executable, str(PROGRAM), str(folder), json.dumps(plan)]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("SIRTAKI_", "HOROVOD_"))}
        environ |= {
            "CHAOS_JOB": self._token,
            "TMPDIR": str(self._tmp),
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(self._disk / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),  # torch makes it even where nothing is compiled
            "SIRTAKI_REGISTRY": str(self._disk / "registry" / "registry.sqlite"),
            "SIRTAKI_TRIAL_LOG": str(self._disk / "trials.jsonl"),
            "SIRTAKI_TIMELINE": str(self._disk / "timeline.json"),
            "SIRTAKI_WARMUP_ITERATIONS": str(WARMUP_STEPS),
            "SIRTAKI_STALL_WARNING_S": str(STALL_WARNING_S),
            "SIRTAKI_STALL_SHUTDOWN_S": str(STALL_SHUTDOWN_S),
            **({"SIRTAKI_TRANSPORT": scenario.transport} if scenario.transport else {}),
        }
        (self._disk / "registry").mkdir()
        self._readers: list[threading.Thread] = []
        if any(strike.fault is Fault.OUTPUT_FULL for strike in scenario.strikes):
            with (self._disk / "stdout").open("wb") as out, (self._disk / "stderr").open("wb") as err:
                self._launcher = subprocess.Popen(
                    command, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err
                )
            return
        self._launcher = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._close_console = threading.Event()
        for stream in (self._launcher.stdout, self._launcher.stderr):
            assert stream is not None  # both are pipes
            os.set_blocking(stream.fileno(), False)
            self._readers.append(threading.Thread(target=self._read, args=[stream.fileno()], daemon=True))

    def _read(self, descriptor: int) -> None:
        while not self._close_console.is_set():
            try:
                text = os.read(descriptor, 65536)
            except BlockingIOError:
                time.sleep(0.02)
                continue
            if not text:
                return
            self._console.append(text)
        os.close(descriptor)

    def _full_output(self) -> str:
        paths = (self._disk / "stdout", self._disk / "stderr")
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _strike(self, strike: Strike, begin_s: float) -> None:
        """In a thread: waits for the moment, and strikes unless the job is over."""
        progress = self._folder / f"progress.{strike.rank}"
        at_start = strike.step is None

        def come() -> bool:
            if at_start:
                return not strike.fault.by_the_rank or progress.exists()
            return progress.exists() and progress.stat().st_size >= (strike.step or 0)

        while at_start and time.monotonic() < begin_s + strike.delay_s:
            time.sleep(0.005)
        while not come():
            if self._over.wait(0.002):
                return
        if not at_start:
            time.sleep(strike.delay_s)
        while not self._over.is_set():
            steps = progress.stat().st_size if progress.exists() else -1
            now_s, line = time.monotonic(), len(self._console)
            if self._commit(strike):
                self._outcome.struck.append((strike, steps))
                if strike.fault.ends_the_job and self._fatal_s is None:
                    self._fatal_s, self._fatal_line = now_s, line
                return
            time.sleep(0.01)

    def _commit(self, strike: Strike) -> bool:
        """Returns False if whom it is to hit is not there (yet)."""
        fault = strike.fault
        if fault is Fault.DISK_FULL or fault is Fault.OUTPUT_FULL:
            with contextlib.suppress(OSError), (self._disk / "ballast").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        elif fault is Fault.OUTPUT_CLOSED:
            if self._readers:
                self._close_console.set()
        elif fault is Fault.REGISTRY_DELETED:
            shutil.rmtree(self._disk / "registry", ignore_errors=True)
        elif fault is Fault.REGISTRY_DAMAGED:
            for path in (self._disk / "registry").iterdir():
                with contextlib.suppress(OSError), path.open("r+b") as file:
                    file.write(os.urandom(4096))
        elif fault in LAUNCHER_SIGNALS:
            return _signal(self._launcher.pid, LAUNCHER_SIGNALS[fault])
        elif fault is Fault.MPIEXEC_KILLED:
            return any(_signal(pid, signal.SIGKILL) for pid in _children(self._launcher.pid, "mpiexec", "prterun"))
        else:
            return self._hit_rank(strike)
        return True

    def _hit_rank(self, strike: Strike) -> bool:
        pid = self._rank_pid(strike.rank)
        if pid is None:
            return False
        if strike.fault.by_the_rank:
            return _signal(pid, signal.SIGUSR1)
        if strike.fault in SIGNALS:
            return _signal(pid, SIGNALS[strike.fault])
        stopped = _signal(pid, signal.SIGSTOP)
        lasts_s = strike.lasts_s if strike.fault is Fault.PAUSE else STOPPED_S
        if stopped:
            resume = threading.Timer(lasts_s, _signal, args=[pid, signal.SIGCONT])
            resume.daemon = True
            resume.start()
        return stopped

    def _rank_pid(self, rank: int) -> int | None:
        wanted = f"OMPI_COMM_WORLD_RANK={rank}".encode()
        parents = {pid: _status(pid).get("PPid") for pid, words in self._processes().items() if wanted in words}
        # Not a process that the rank has started.
        return next((pid for pid, parent in parents.items() if parent is None or int(parent) not in parents), None)

    # ── afterwards ───────────────────────────────────────────────────────────────────────────────────────────────

    def _processes(self) -> dict[int, list[bytes]]:
        """Processes of this job and their environments."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (folder / "environ").read_bytes().split(b"\0")
                if f"CHAOS_JOB={self._token}".encode() in words:
                    found[int(folder.name)] = words
        return found

    def _inspect(self) -> None:
        told = not any(strike.fault is Fault.LAUNCHER_KILLED for strike, _ in self._outcome.struck)
        deadline = time.monotonic() + (1.0 if told else LEAVE_S)
        while self._left() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._outcome.left = self._left()

    def _left(self) -> list[str]:
        processes = [f"process {_command_line(pid)}" for pid in self._processes()]
        files = [f"file {path}" for folder in (SHM, self._tmp) for path in sorted(folder.rglob("*"))]
        return [*processes, *files, *_listening()]

    def _end(self) -> None:
        self._launcher.kill()
        self._launcher.wait()
        while processes := self._processes():
            for pid in processes:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.02)


def _signal(pid: int, number: signal.Signals) -> bool:
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


def _children(pid: int, *names: str) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    with contextlib.suppress(OSError):
        return [int(word) for word in children.read_text().split() if _status(int(word)).get("Name") in names]
    return []


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    return str(pid)


def _listening() -> list[str]:
    """TCP sockets of this network namespace that listen."""
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A":
                    found.append(f"listening socket, port {int(words[1].rpartition(':')[2], 16)}")
    return found
