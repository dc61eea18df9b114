"""Start the ranks of each part, enforce its time limit, and write one line of JSON with the results of each part.

The runner imports PyTorch and Sirtaki once and never calls CUDA. So it can fork ranks, which need no imports. Rank 0
rewrites its report after each check, so that checks before a hang or a crash are kept.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.gpu.place import Place, open_place
from bench.lib.harness import RAW, REPOSITORY, RESULTS, Report
from sirtaki.machine import ReservedPorts

KILL_AFTER_S = 4.0
"""Seconds from SIGINT to SIGKILL for ranks that exceed their part's limit. SIGKILL is sent at the limit."""

PORTS = ("MASTER_PORT", "BENCH_GPU_GROUP_PORT")
"""Environment variables with free ports: for Sirtaki's ranks, and for PyTorch's default process group."""


class SkippedError(Exception):
    """A part cannot run here. Raised by `RankRun.skip`."""


# ── one rank of a part ───────────────────────────────────────────────────────────────────────────────────────────────


class RankRun:
    """State of one rank while a part runs.

    Attributes:
        place: the GPU.
        rank, size: rank of this process, and number of ranks.
        ends_s: `time.monotonic()` at which the part should end, some seconds before its limit.
        report: figures and bars, filled by the part on rank 0.
    """

    def __init__(self, name: str, place: Place, *, rank: int, size: int, limit_s: float, path: Path) -> None:
        """Start the clock of the part, whose limit is `limit_s`. The report is written to `path`."""
        self.place, self.rank, self.size = place, rank, size
        self.report = Report(name=name)
        self.began_s = time.monotonic()
        self.ends_s = self.began_s + 0.85 * (limit_s - KILL_AFTER_S)
        self._checks: list[dict[str, Any]] = []
        self._path = path

    @property
    def control(self) -> Any:  # Any instead of ControlPlane, because only parts import Sirtaki.
        """Return the control plane of these ranks. The first use initialises Sirtaki. Collective."""
        import sirtaki.torch as hvd
        from sirtaki.engine import job

        hvd.init()
        return job.current().control

    def left_s(self) -> float:
        """Return the remaining seconds of this part."""
        return self.ends_s - time.monotonic()

    def until(self, share: float) -> Callable[[], bool]:
        """Return a function that returns true until `share` of the remaining time has passed.

        The returned function is collective, because rank 0's clock decides.
        """
        end_s = time.monotonic() + share * self.left_s()

        def goes_on() -> bool:
            has_time = time.monotonic() < end_s
            return has_time if self.size == 1 else bool(self.control.broadcast(has_time))

        return goes_on

    @contextmanager
    def check(self, what: str) -> Iterator[dict[str, Any]]:
        """Run the body as a check. If it raises, the check fails and the part continues.

        Yields:
            A dict of details, to be filled by the body.
        """
        begin_s, entry = time.monotonic(), {"check": what, "ok": True}
        details: dict[str, Any] = {}
        try:
            yield details
            self.place.verify()
        except SkippedError:
            raise
        except Exception as err:
            traceback.print_exc()
            entry |= {"ok": False, "error": f"{type(err).__name__}: {err}"[:2000]}
        entry |= {"seconds": round(time.monotonic() - begin_s, 3), **_plain(details)}
        self._checks.append(entry)
        print(("ok   " if entry["ok"] else "FAIL ") + json.dumps(entry), flush=True)
        self.write()

    def skip(self, reason: str) -> None:
        """End the part because a requirement is missing.

        Raises:
            SkippedError: always.
        """
        raise SkippedError(reason)

    def write(self, **more: Any) -> None:
        """Write the report of rank 0. Other ranks write only failed checks, to their own files."""
        failed = [check for check in self._checks if not check["ok"]]
        if self.rank and not failed:
            return
        found = self.report.to_json() if self.rank == 0 else {}
        found |= {"checks": self._checks if self.rank == 0 else failed, **more}
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps(_plain(found)))
        draft.replace(self._path)


def _plain(value: Any) -> Any:
    """Return the value converted to types that JSON supports."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    return value if isinstance(value, str | int | float | bool | None) else str(value)


# ── a part ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """End of a rank's process.

    Attributes:
        status: exit status; -9 = killed.
        at_s: `time.monotonic()` of the exit.
        output: standard output and standard error.
    """

    status: int
    at_s: float
    output: str


Judge = Callable[[dict[str, Any], Sequence[ProcessEnd]], None]


@dataclass(frozen=True, kw_only=True)
class BenchPart:
    """One part: a module of `bench.gpu.parts`, and how its ranks are started.

    Attributes:
        name: name of the module and value of `--only`. The module has a function `run(run: RankRun)`.
        limit_s: time limit in seconds.
        ranks: number of processes that share the GPU.
        env: environment variables of the ranks.
        mps: whether the ranks use CUDA's Multi-Process Service, if it is available.
        judged: whether a rank is meant to die. Then the module's `judge(found, ends)` decides, not exit statuses.
    """

    name: str
    limit_s: float
    ranks: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    mps: bool = False
    judged: bool = False


UNTUNED = {"SIRTAKI_WARMUP_ITERATIONS": "0", "SIRTAKI_STREAMS": "4"}
"""Environment with one fixed setting with several streams, so that all contenders run with the same setting."""

NCCL = {"SIRTAKI_TRANSPORT": "nccl"}
"""Environment that uses NCCL although ranks share a GPU."""

PARTS = (
    BenchPart(name="environment", limit_s=15),
    BenchPart(name="communicators", limit_s=20),
    BenchPart(name="order", limit_s=45),
    BenchPart(name="synchronisation", limit_s=20, env=UNTUNED),
    BenchPart(name="two_ranks", limit_s=80, ranks=2, mps=True, env=NCCL | {"SIRTAKI_WARMUP_ITERATIONS": "30"}),
    BenchPart(name="kernels", limit_s=30, ranks=2, mps=True, env=NCCL | UNTUNED),
    BenchPart(name="steps", limit_s=60, env=UNTUNED),
    BenchPart(name="memory", limit_s=20, env=UNTUNED),
    # MPS is not used: its server may die when a client is killed.
    BenchPart(name="failures", limit_s=20, ranks=2, env=NCCL | UNTUNED, judged=True),
    BenchPart(name="eager", limit_s=20, ranks=2, mps=True, env=NCCL),
)
"""All parts in the order in which they run. Their limits add up to 330 s."""

EVERY_RANK = {
    "OMP_NUM_THREADS": "1",
    "SIRTAKI_REGISTRY": "off",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
}
"""Ranks that share a GPU look like separate hosts to NCCL (`NCCL_HOSTID`), so that it uses sockets.

Loopback is enough.
"""


class Runner:
    """Runs parts in sequence.

    Attributes:
        folder: folder for results.
        lines: file with one line of JSON for each part.
    """

    def __init__(self, folder: Path, *, dry: bool, slack: float) -> None:
        """Create the folder. `slack` multiplies the parts' limits."""
        self.folder, self._dry, self._slack = folder, dry, slack
        folder.mkdir(parents=True, exist_ok=True)
        self.lines = folder / "results.jsonl"
        self._mps: MultiProcessService | None = None

    def run(self, part: BenchPart) -> dict[str, Any] | None:
        """Run a part and append its line. Return the line. In a rank's process, return None after the part."""
        with ReservedPorts(len(PORTS)) as reserved:
            ports = {name: str(reserved.first + number) for number, name in enumerate(PORTS)}
            return self._run(part, EVERY_RANK | dict(part.env) | ports)

    def _run(self, part: BenchPart, environment: dict[str, str]) -> dict[str, Any] | None:
        begin_s, limit_s = time.monotonic(), part.limit_s * self._slack
        if part.mps and not self._dry:
            self._mps = self._mps or MultiProcessService(self.folder / "mps")
            environment |= self._mps.environment
        children: dict[int, int] = {}  # {process id: rank}
        for stale in self.folder.glob(f"{part.name}.*"):
            stale.unlink()
        sys.stdout.flush()
        for rank in range(part.ranks):
            if pid := os.fork():
                children[pid] = rank
                continue
            self._become_rank(part, rank, environment)
            self._run_rank(part, rank, limit_s)
            return None
        ends, in_time = self._wait(part, children, begin_s + limit_s)
        line = self._line(part, ends, time.monotonic() - begin_s, in_time=in_time)
        if part.mps:
            line["mps"] = self._mps is not None and bool(self._mps.environment)
        with self.lines.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        (self.folder / f"{part.name}.json").write_text(json.dumps(line, indent=1) + "\n")
        return line

    def close(self) -> None:
        """End the Multi-Process Service."""
        if self._mps is not None:
            self._mps.close()

    # ── in the process of a rank ─────────────────────────────────────────────────────────────────────────────────

    def _become_rank(self, part: BenchPart, rank: int, environment: Mapping[str, str]) -> None:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        own = {"NCCL_HOSTID": f"rank{rank}"} if part.ranks > 1 else {}
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": part.ranks, "LOCAL_WORLD_SIZE": part.ranks}
        if part.ranks > 1:
            own |= {name: str(value) for name, value in places.items()}
        os.environ.update({**environment, **own})
        output = os.open(self.folder / f"{part.name}.{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv[:] = [f"bench.gpu {part.name}"]

    def _run_rank(self, part: BenchPart, rank: int, limit_s: float) -> None:
        """Run the part's function. An exception ends this process, as in a script."""
        path = self.folder / f"{part.name}.{rank}.found"
        place = open_place(self.folder, dry=self._dry)
        run = RankRun(part.name, place, rank=rank, size=part.ranks, limit_s=limit_s, path=path)
        run.report.settings = {"ranks": part.ranks, **({} if rank else place.facts())}
        run.write()
        try:
            importlib.import_module(f"bench.gpu.parts.{part.name}").run(run)
        except SkippedError as reason:
            run.write(skipped=str(reason))
            return
        run.write(ended=True)
        import torch.distributed as dist

        import sirtaki.torch as hvd

        hvd.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()

    # ── in the runner ────────────────────────────────────────────────────────────────────────────────────────────

    def _wait(
        self, part: BenchPart, children: dict[int, int], deadline_s: float
    ) -> tuple[list[ProcessEnd | None], bool]:
        """Wait for the ranks. Send SIGINT some seconds before the deadline, and SIGKILL at the deadline.

        Returns:
            The end of each rank, None if it was killed at the deadline; and whether no rank needed a signal.
        """
        ends: list[ProcessEnd | None] = [None] * len(children)
        left, interrupted = dict(children), False
        while left:
            for pid in list(left):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    rank = left.pop(pid)
                    output = (self.folder / f"{part.name}.{rank}.txt").read_text(errors="replace")
                    ends[rank] = ProcessEnd(os.waitstatus_to_exitcode(status), time.monotonic(), output)
            now_s = time.monotonic()
            if now_s > deadline_s:
                for pid in left:
                    _kill(pid)
                    os.waitpid(pid, 0)
                break
            if now_s > deadline_s - KILL_AFTER_S and not interrupted:
                interrupted = True
                for pid in left:
                    os.kill(pid, signal.SIGINT)
            time.sleep(0.02)
        return ends, not interrupted

    def _line(
        self, part: BenchPart, ends: Sequence[ProcessEnd | None], seconds: float, *, in_time: bool
    ) -> dict[str, Any]:
        """Return the part's line: the ranks' reports, and the status that follows from checks and exits."""
        reports = [self.folder / f"{part.name}.{rank}.found" for rank in range(part.ranks)]
        found = [json.loads(path.read_text()) if path.exists() else {} for path in reports]
        checks = [check for each in found for check in each.get("checks", [])]
        line = {"part": part.name, "status": "", "seconds": round(seconds, 2), "dry": self._dry, **found[0]}
        line["checks"] = checks
        known = [end for end in ends if end is not None]
        if any("skipped" in each for each in found):
            line["status"] = "skipped"
        elif not in_time:
            line["status"] = "timed out"
        elif part.judged:
            importlib.import_module(f"bench.gpu.parts.{part.name}").judge(line, known)
        if not line["status"]:
            ended = part.judged or all(end.status == 0 for end in known)
            line["status"] = "passed" if ended and all(check["ok"] for check in line["checks"]) else "failed"
        if line["status"] != "passed":
            line["exit_statuses"] = [end and end.status for end in ends]
            paths = [self.folder / f"{part.name}.{rank}.txt" for rank in range(part.ranks)]
            line["output_tails"] = [path.read_text(errors="replace")[-3000:] for path in paths if path.exists()]
        return line


def _kill(pid: int) -> None:
    """Kill a process and all its descendants."""
    try:
        process = psutil.Process(pid)
        family = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for each in family:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue


class MultiProcessService:
    """CUDA's Multi-Process Service (MPS). It lets kernels of two processes run on one GPU at the same time.

    Attributes:
        environment: variables with which a process uses MPS; empty if MPS is not installed or does not work.
    """

    def __init__(self, folder: Path) -> None:
        """Start the daemon if it is installed, and test it."""
        self.environment: dict[str, str] = {}
        self._daemon = shutil.which("nvidia-cuda-mps-control")
        if self._daemon is None:
            print("MPS: not installed; kernels of ranks that share the GPU run in turns", flush=True)
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._variables = {
            "CUDA_MPS_PIPE_DIRECTORY": str(folder.resolve()),
            "CUDA_MPS_LOG_DIRECTORY": str(folder.resolve()),
        }
        try:
            self._call([self._daemon, "-d"])
            self._probe()
        except (OSError, subprocess.SubprocessError) as err:
            print(f"MPS: does not work ({err}); kernels of ranks that share the GPU run in turns", flush=True)
            self.close()
        else:
            self.environment = self._variables
            print("MPS: started", flush=True)

    def _call(self, command: Sequence[str], **options: Any) -> None:
        variables = {**os.environ, **self._variables}
        subprocess.run(command, env=variables, check=True, timeout=12, stdout=subprocess.DEVNULL, **options)

    def _probe(self) -> None:
        """Compute a sum through the daemon in a forked process.

        Raises:
            ChildProcessError: the process failed, or took longer than 8 seconds.
        """
        if (pid := os.fork()) == 0:
            try:
                import torch

                os.environ.update(self._variables)
                os._exit(0 if torch.ones(2, device="cuda").sum().item() == 2 else 1)
            finally:
                os._exit(1)
        end_s = time.monotonic() + 8.0
        while not (done := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end_s:
            time.sleep(0.02)
        if not done[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if not done[0] or done[1]:
            raise ChildProcessError("a process that uses MPS cannot compute")

    def close(self) -> None:
        """End the daemon."""
        if self._daemon is not None:
            try:
                self._call([self._daemon], input=b"quit -t 2\n")
            except (OSError, subprocess.SubprocessError) as err:
                print(f"MPS: could not be ended: {err}", flush=True)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def main() -> int:
    """Run the selected parts. Return 0 if all passed, else 1. `bench/gpu.sh` returns 2 itself if there is no GPU."""
    flags = argparse.ArgumentParser(prog="bench/gpu.sh", description=sys.modules["bench.gpu"].__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument(
        "--only", nargs="+", metavar="PART", choices=[part.name for part in PARTS], help="run only these parts"
    )
    flags.add_argument("--dry-run", action="store_true", help="run without a GPU, on a fake one")
    flags.add_argument(
        "--out", type=Path, default=RAW / "gpu", metavar="FOLDER", help="folder for results (%(default)s)"
    )
    flags.add_argument("--slack", type=float, default=1.0, metavar="FACTOR", help="multiply all limits")
    flags.add_argument("--save", action="store_true", help="keep the results of passed parts in bench/results/gpu")
    args = flags.parse_args()
    # The conformance suites and the fakes of a dry run are in this folder.
    sys.path.insert(0, str(REPOSITORY / "tests"))
    _load()
    chosen = [part for part in PARTS if not args.only or part.name in args.only]
    runner = Runner(args.out, dry=args.dry_run, slack=args.slack)
    lines = []
    for part in chosen:
        line = runner.run(part)
        if line is None:  # This process is a rank that has finished its part.
            return 0
        lines.append(line)
        failed = [check["check"] for check in line["checks"] if not check["ok"]]
        summary = f"{part.name}: {line['status']}, {line['seconds']:.1f} s" + (f"; failed: {failed}" if failed else "")
        print(summary, flush=True)
        if args.save and line["status"] == "passed" and not args.dry_run:
            _keep(line)
        if part.name == "environment" and not (line["checks"] and line["checks"][0]["ok"]):
            print("bench/gpu.sh: skipping all further parts, because the GPU cannot compute", flush=True)
            break
    runner.close()
    seconds = sum(line["seconds"] for line in lines)
    passed = sum(line["status"] == "passed" for line in lines)
    print(f"{passed} of {len(chosen)} parts passed in {seconds:.0f} s; results: {runner.lines}", flush=True)
    return 0 if passed == len(chosen) else 1


def _load() -> None:
    """Import the modules that ranks need, so that ranks can be forked. Warn if imports started threads."""
    import torch._dynamo  # noqa: F401  # because the first optimizer of a process imports it

    import sirtaki.torch  # noqa: F401

    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        print(f"bench/gpu.sh: imports started {threads - 1} threads; forked ranks may hang", flush=True)


def _keep(line: Mapping[str, Any]) -> None:
    gpu = re.sub(r"\W+", "_", str(line["settings"].get("gpu", "gpu"))).lower()
    folder = RESULTS / "gpu" / gpu
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{line['part']}.json").write_text(json.dumps(line, indent=1) + "\n")
