"""Run programs on ranks and in one process, and compare all values that a user may observe."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from rank_jobs import environment, found_mpiexec

from .attached import AttachedReference
from .program import Backward, BlockKind, Convert, OptimizerSpec, Program, Rewrap, Step
from .reference import Entry, Played, Reference
from .replica import DEFAULTS, DTYPES, entered

# ── Ranks that live as long as they work: MPI is started once for hundreds of programs, and again after ──────────────

START_S = 90.0
GRACE_S = 3.0
"""Time for the remaining ranks to answer after an exception on one rank."""


WORKER = Path(__file__).with_name("rank_worker.py")

Command = Callable[[Path, Sequence[object]], list[str]]


def _python(program: Path, args: Sequence[object]) -> list[str]:
    return [sys.executable, str(program), *map(str, args)]


class BrokenError(Exception):
    """The ranks did not finish a program."""


class Ranks:
    """A job of `size` ranks that runs programs of up to `size` ranks. A context manager."""

    def __init__(self, size: int, *, limit_s: float = 20.0, command: Command = _python) -> None:
        """Start nothing yet. `limit_s`: time limit of a program; `command`: starts one process of a program."""
        self._size, self._limit_s, self._command = size, limit_s, command
        self._job: subprocess.Popen[bytes] | None = None
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        self._new = True
        self.starts = 0

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="torment."))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._job is not None and kind is None:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.send(None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._job.wait(20.0)
        self.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def play(self, program: Program) -> list[list[Entry]]:
        """Run a program. Return the trace of each rank.

        Raises:
            BrokenError: a rank raised, died, or did not answer in time. The next program gets new ranks.
        """
        if self._job is None:
            self._start()
        text = program.to_json()
        with contextlib.suppress(OSError):  # because ranks may have exited
            for connection in self._connections:
                connection.send(text)
        answers: dict[int, tuple[str, object]] = {}
        deadline = time.monotonic() + self._limit_s + (START_S if self._new else 0.0)
        dead: list[int] = []
        while len(answers) + len(dead) < self._size and (left_s := deadline - time.monotonic()) > 0:
            missing = [rank for rank in range(self._size) if rank not in answers and rank not in dead]
            ready = wait([self._connections[rank] for rank in missing], left_s)
            for rank in missing:
                if self._connections[rank] in ready:
                    try:
                        answers[rank] = self._connections[rank].recv()
                    except (EOFError, OSError):
                        dead.append(rank)
            if dead or any(kind == "raised" for kind, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        self._new = False
        raised = {rank: str(what) for rank, (kind, what) in answers.items() if kind == "raised"}
        if len(answers) == self._size and not raised:
            return [answers[rank][1] for rank in range(program.ranks)]  # type: ignore[misc]  # traces
        raise BrokenError(self._describe(answers, dead, raised))

    def _describe(self, answers: dict[int, tuple[str, object]], dead: list[int], raised: dict[int, str]) -> str:
        hung = [rank for rank in range(self._size) if rank not in answers and rank not in dead]
        stacks = self._stacks(hung) if hung else ""
        self.end()
        parts = [f"rank {rank} raised: {text}" for rank, text in sorted(raised.items())]
        if dead:
            log = (self._folder / "output").read_text(errors="replace")[-3000:]
            parts.append(f"ranks {dead} died: {log}")
        if hung:
            parts.append(f"ranks {hung} hung{stacks}")
        return "\n".join(parts)

    def _stacks(self, hung: list[int]) -> str:
        for rank in hung:
            with contextlib.suppress(OSError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(0.3)
        texts = []
        for rank in hung:
            with contextlib.suppress(OSError):
                texts.append(f"\n--- rank {rank}\n" + (self._folder / f"stacks.{rank}").read_text()[-2500:])
        return "".join(texts)

    # ── the job ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        mpiexec = found_mpiexec()
        if mpiexec is None:
            raise RuntimeError("there is no mpiexec beside this Python nor on PATH")
        self.starts += 1
        address = self._folder / f"socket.{self.starts}"
        output = (self._folder / "output").open("wb")
        with Listener(str(address), family="AF_UNIX") as listener:
            self._job = subprocess.Popen(
                [*mpiexec, "-np", str(self._size), *self._command(WORKER, [address, os.getpid()])],
                # because otherwise mpi4py finalizes MPI in children that programs fork, too
                env=environment(self._folder / "cache", {"MPI4PY_RC_FINALIZE": "0"}),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            output.close()
            connections: dict[int, tuple[Connection, int]] = {}
            listener._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]  # it offers no other way
            try:
                for _ in range(self._size):
                    connection = listener.accept()
                    rank, pid = connection.recv()
                    connections[rank] = connection, pid
            except (TimeoutError, EOFError) as err:
                self.end()
                raise BrokenError(f"only ranks {sorted(connections)} have started: {err!r}") from None
        self._connections = [connections[rank][0] for rank in range(self._size)]
        self._pids = [connections[rank][1] for rank in range(self._size)]
        self._new = True

    def end(self) -> None:
        """Kill the ranks. The next program gets new ones."""
        job, self._job = self._job, None
        if job is None:
            return
        for pid in self._pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            job.wait(10.0 if self._pids else 0.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        for connection in self._connections:
            connection.close()
        self._connections, self._pids = [], []


# ── Comparing ────────────────────────────────────────────────────────────────────────────────────────────────────────

TOLERANCE = {"double": 1e-9, "compiled": 1e-7, "float": 1e-4, "half": 0.1, "bfloat16": 0.3, "fp16": 0.05, "lossy": 1e6}


Known = TypeVar("Known", bound=Played)


class WrongError(AssertionError):
    """A program has other results on ranks than in one process, or does not finish."""


def torment(program: Program, ranks: Ranks) -> Played:
    """Run the valid part of a program on ranks, and compare.

    Raises:
        WrongError: the results differ. It contains the program as JSON.
    """
    dtypes = [name for name in program.defaults if name in DTYPES]
    with entered(dtypes, DEFAULTS):  # because some states of PyTorch's optimizers have the default dtype
        reference = Reference(program) if program.attached is None else AttachedReference(program)
    return replay(reference, ranks)


def replay(reference: Known, ranks: Ranks) -> Known:
    """Run a program with known expected values."""
    played = reference.played
    try:
        found = ranks.play(played)
    except BrokenError as err:
        raise WrongError(f"{err}\nin\n{played.to_json()}") from None
    difference = compare(reference.trace, found, tolerance_of(played), _alike(played))
    if difference:
        raise WrongError(f"{difference}\nin\n{played.to_json()}")
    return reference


def tolerance_of(program: Program) -> float:
    """Return the tolerance, relative to 1 or to the tensor's largest value, by the rounding of the coarsest dtype."""
    kinds = {"double"} | {action.to for action in program.actions if isinstance(action, Convert)}
    if BlockKind.SINGLE in program.blocks:
        kinds.add("float")
    if program.attached is None and any(isinstance(action, Step) and action.compiled for action in program.actions):
        kinds.add("float")  # because PyTorch then computes with float32 step counts
    if any(isinstance(action, Backward) and action.compiled for action in program.actions):
        kinds.add("compiled")  # because PyTorch fuses operations, which rounds differently
    if any(spec.fp16 for spec in _specs(program)):
        kinds.add("fp16")
    if any(spec.lossy for spec in _specs(program)):
        kinds.add("lossy")  # compares only whether values are None, finite, and equal on all ranks
    return max(TOLERANCE.get(kind, 0.0) for kind in kinds)


def _specs(program: Program) -> list[OptimizerSpec]:
    later = [action.spec for action in program.actions if isinstance(action, Rewrap)]
    return [*program.optimizers, *(spec for spec in later if spec is not None)]


def _alike(program: Program) -> list[int]:
    """Return ranks with the same loss by compression as rank 0; all ranks without compression."""
    sets = [set(spec.process_set) for spec in _specs(program) if spec.lossy and spec.process_set]
    return [rank for rank in range(program.ranks) if all((rank in each) == (0 in each) for each in sets)]


def compare(
    wanted: Sequence[Sequence[Entry]], found: Sequence[Sequence[Entry]], tolerance: float, alike: Sequence[int]
) -> str:
    """Describe the first difference between traces; empty if there is none.

    Values that are equal on two ranks in the reference must be bit-identical on the ranks, if both are in `alike`.
    """
    for rank, (mine, theirs) in enumerate(zip(wanted, found, strict=True)):
        if [entry[:2] for entry in mine] != [entry[:2] for entry in theirs]:
            return f"rank {rank} saw {[e[:2] for e in theirs]} instead of {[e[:2] for e in mine]}"
        for (number, label, values), (_, _, others) in zip(mine, theirs, strict=True):
            for name, value in values.items():
                if trouble := _differ(value, others[name], tolerance):
                    return f"rank {rank}, action {number}, {label}, {name}: {trouble}"
    for rank in alike:
        if len(wanted[rank]) != len(wanted[0]):
            continue
        for place, (number, label, values) in enumerate(wanted[rank]):
            for name, value in values.items():
                first = wanted[0][place][2].get(name)
                same = value is not None and first is not None and np.array_equal(first, value)
                ours, zeroth = found[rank][place][2][name], found[0][place][2].get(name)
                if same and not np.array_equal(_array(ours), _array(zeroth), equal_nan=True):
                    return f"ranks 0 and {rank} differ, action {number}, {label}, {name}: {zeroth} and {ours}"
    return ""


def _array(value: np.ndarray | None) -> np.ndarray:
    assert value is not None
    return value


def _differ(wanted: np.ndarray | None, found: np.ndarray | None, tolerance: float) -> str:
    if wanted is None or found is None:
        return "" if wanted is found else f"{_brief(found)} instead of {_brief(wanted)}"
    if wanted.shape != found.shape:
        return f"shape {found.shape} instead of {wanted.shape}"
    largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=1.0)  # because the rounding of a sum depends on its terms
    if np.allclose(found, wanted, rtol=tolerance, atol=tolerance * largest, equal_nan=True):
        return ""
    return f"off by {np.nanmax(np.abs(found - wanted)):.3g}: {_brief(found)} instead of {_brief(wanted)}"


def _brief(value: np.ndarray | None) -> str:
    return "None" if value is None else str(value.ravel()[:4])
