"""`sirtaki profile`: run a job, record some of its training steps, and print a summary.

It also prints the summary of an existing recording.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from sirtaki.analysis import recording as folders
from sirtaki.analysis.alignment import align, headlines, rank_rows, write_trace
from sirtaki.analysis.memory import highest_rank, peak_words
from sirtaki.autotune.sharded import SHARDED_FILE
from sirtaki.engine.settings import ProfileRequest
from sirtaki.errors import ConfigError, RecordingError

from .output import add_formats, print_table, printed, whole

MOST_RANKS = 16
"""Maximum number of ranks that get a line in the printed summary."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `sirtaki profile` to the parser."""
    parser.usage = "sirtaki profile [options] COMMAND ...\n       sirtaki profile --show DIR"
    parser.add_argument(
        "-o", "--output", metavar="DIR", default="sirtaki-profile", help="folder to record into (%(default)s)"
    )
    parser.add_argument(
        "--iterations",
        type=whole(1),
        default=10,
        metavar="N",
        help="training steps to record without operators; up to three more are recorded with operators (%(default)s)",
    )
    parser.add_argument(
        "--units-only", action="store_true", help="record gradients and units only, no operators; slows the job less"
    )
    parser.add_argument(
        "--edges",
        action="store_true",
        help="also record which operators read which results, for `sirtaki trace --chakra`",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a recording in the folder")
    parser.add_argument("--show", metavar="DIR", help="print the summary of an existing recording; runs no job")
    add_formats(parser)
    parser.add_argument(
        "job",
        metavar="COMMAND",
        nargs=argparse.REMAINDER,
        help="command that starts the job: sirtakirun, torchrun, srun, mpiexec or python, with its arguments",
    )


def main(options: argparse.Namespace) -> int:
    """Record a job that the user's command starts, or find a recording (`--show`), and print its summary.

    Returns:
        The exit code of the user's command; 0 with `--show`.

    Raises:
        ConfigError: options contradict each other, or the folder cannot be recorded into.
        RecordingError: nothing was recorded.
    """
    if options.show is not None:
        if options.job:
            raise ConfigError(
                f"--show only prints a recording and runs no job; remove the command {' '.join(options.job)!r} or "
                "--show"
            )
        _show(Path(options.show), options)
        return 0
    if not options.job:
        raise ConfigError(
            "the command that starts the job is missing; write it last, as in: sirtaki profile sirtakirun -np 4 python "
            "train.py; or print an existing recording with --show DIR"
        )
    if options.edges and options.units_only:
        raise ConfigError(
            "--edges records data dependencies between operators, but --units-only records no operators; remove one of "
            "the two options"
        )
    folder = Path(options.output).absolute()
    _prepare(folder, overwrite=options.overwrite)
    began_s = time.time()
    exit_code = _run(options.job, folder, options)
    sharded = folder / SHARDED_FILE
    if not folders.holds_recording(folder) and sharded.exists() and sharded.stat().st_mtime >= began_s - 1:
        print(
            f"\n{folder}\nThe job trains FSDP2 models, of which only the trace of one step is recorded. To see what "
            f"more memory would gain, run: sirtaki optimize {shlex.quote(str(folder))}"
        )
        return exit_code
    if not folders.holds_recording(folder):
        raise RecordingError(
            f"nothing was recorded: the job has failed (exit code {exit_code})"
            if exit_code
            else "nothing was recorded: no gradients of several ranks were reduced by DistributedOptimizer or "
            "ddp.attach() (FSDP2 models are not recorded), or the job ended during the warm-up "
            "(SIRTAKI_WARMUP_ITERATIONS=0 omits the warm-up)"
        )
    if not (options.json or options.csv):
        print(f"\n{folder}", flush=True)
    _show(folder, options)
    return exit_code


def _show(folder: Path, options: argparse.Namespace) -> None:
    """Print a summary of the recording, and write a trace of all ranks into the folder of the recording.

    Raises:
        RecordingError: the recording is empty, or the trace cannot be written.
    """
    recording = folders.read_folder(folder)
    alignment, rows = align(recording), rank_rows(recording)
    try:
        path = write_trace(folder, recording, alignment)
    except OSError as err:
        raise RecordingError(
            f"the trace of the recorded job cannot be written to the folder {folder}: {err}; check the folder's "
            "permissions and the free disk space"
        ) from err
    what, clocks = headlines(recording, alignment)
    if printed(options, {"recording": what, "clocks": clocks, "problems": recording.problems, "ranks": rows}, rows):
        return
    print("\n".join([what, *(f"  but: {problem}" for problem in recording.problems), clocks, ""]))
    shown = (row.values() for row in rows[:MOST_RANKS])
    cells = ([str(rank), *("-" if one is None else f"{1e3 * one:.2f}" for one in rest)] for rank, *rest in shown)
    print_table([title.removesuffix("_s") for title in rows[0]], cells)
    if len(rows) > MOST_RANKS:
        print(f"and {len(rows) - MOST_RANKS} more")
    print(
        "Times are means in ms. The column `exposed` is communication time that does not overlap with computation, "
        "`other` is the rest of the step."
    )
    if any(rank.memory is not None for rank in recording.ranks.values()):
        rank, replay = highest_rank(recording)
        print(peak_words(rank, replay, replay.peak()))
    print(f"A trace of all ranks on one clock was written to {path}; open this file at https://ui.perfetto.dev")
    print(f"To see where the time goes and what would help, run: sirtaki report {shlex.quote(str(folder))}")


def _prepare(folder: Path, *, overwrite: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folders.holds_recording(folder):
            if not overwrite:
                raise ConfigError(
                    f"the folder {folder} already contains a recording; choose another folder with -o, or replace the "
                    "recording with --overwrite"
                )
            folders.clear(folder)
        folders.write_whole(folder / ".writable", b"")
        (folder / ".writable").unlink()
    except OSError as err:
        raise ConfigError(
            f"no recording can be written to the folder {folder}: {err.strerror or err}; choose another folder with -o"
        ) from err


def _run(command: list[str], folder: Path, options: argparse.Namespace) -> int:
    if (
        command[0].endswith(".py") and shutil.which(command[0]) is None
    ):  # Run a script with Python if the command has no `python`.
        command = [sys.executable, *command]
    asked = ProfileRequest(
        folder=str(folder), iterations=options.iterations, operators=not options.units_only, edges=options.edges
    )
    environ = {**os.environ, "SIRTAKI_PROFILE": str(asked)}
    # Silence Kineto, the library of torch.profiler, because it logs its start and stop to standard error.
    environ.setdefault("KINETO_LOG_LEVEL", "99")
    # Ignore Ctrl-C, so that it ends only the job. This process can then print the summary of what was recorded.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with subprocess.Popen(command, env=environ, preexec_fn=lambda: signal.signal(signal.SIGINT, before)) as job:
            return job.wait()
    except OSError as err:
        raise ConfigError(f"the command {command[0]} of the job cannot be started: {err.strerror}") from err
    finally:
        signal.signal(signal.SIGINT, before)
