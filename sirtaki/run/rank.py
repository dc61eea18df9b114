"""Run a user's script as one rank: `python -c RUN_RANK [--as-horovod] script.py …`, started by the launcher.

A plain `mpiexec python script.py` hangs if one rank raises: the failed rank waits in MPI_Finalize for all ranks, and
the other ranks wait for a message of the failed rank. Here, a failed rank reports to the launcher and exits without
MPI_Finalize.
"""

import argparse
import atexit
import contextlib
import importlib
import os
import runpy
import signal
import socket
import sys
import threading
import time
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from sirtaki import attach
from sirtaki.engine import console
from sirtaki.engine.launchers import AGENT, BAR, HOROVOD_NAMES, TORCH_NAMES, place
from sirtaki.errors import ConfigError, PeerLostError, StallError
from sirtaki.machine import explained
from sirtaki.run.launch import unescape

from .as_horovod import SHIM
from .leftovers import mapped_segments, remove_segments, remove_session_folder
from .rank_channel import ChannelLine, RankEvent, answer_termination, doing, end_with_parent, mark_unfinished_lines

EXIT_GRACE_S = 3.0
"""Maximum seconds for the exit handlers of a failed rank, which may otherwise wait forever for other ranks."""

_ORPHAN_POLL_S = 2.0
_FROZEN_RUNPY = "<frozen runpy>"  # File name of the module runpy in tracebacks, if runpy is built into the interpreter.


def main() -> None:
    """Run the user's command as a rank, and exit with the exit code of the script."""
    parser = argparse.ArgumentParser(
        prog="sirtaki.run.rank", description="Runs a script as one rank.", allow_abbrev=False
    )
    parser.add_argument("--as-horovod", action="store_true", help="`import horovod` imports Sirtaki")
    parser.add_argument("--exec", action="store_true", help="the command is a program, not Python")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="script.py …, -m module … or -c code …")
    options = parser.parse_args()
    command = [unescape(word) for word in options.command]
    del command[: command[:1] == ["--"]]
    _set_place_variables()
    if AGENT in os.environ:
        end_with_parent(signal.SIGKILL)()
    if options.exec:
        _send(RankEvent.HANDED_OVER)
        os.execvp(command[0], command)
    _send(RankEvent.STARTED)
    pid = os.getpid()
    try:
        threading.Thread(target=_end_with_parent, args=[os.getppid()], name="orphan-watch", daemon=True).start()
    except (RuntimeError, MemoryError) as err:
        _end(1, reason=explained(err))
    mark_unfinished_lines()
    if BAR in os.environ:
        console.to_launcher = lambda text: _send(RankEvent.PROGRESS, reason=text)
    answer_termination(lambda what: _send(RankEvent.TERMINATED, reason=what))
    if options.as_horovod:
        _import_shim()
    if attach.is_wanted():
        attach.install_with_torch()
    try:
        run_python(command)
    except BaseException as err:
        if os.getpid() != pid:  # Re-raise in a process that the script has forked: it is not the rank.
            raise
        _fail(err)
    if os.getpid() == pid:
        _send(RankEvent.FINISHED)


def _fail(err: BaseException) -> None:
    """End this rank as `err` requires. Returns only if `err` is a normal exit of the script."""
    match err:
        case SystemExit():
            if (code := _exit_code(err)) == 0:
                return
            reason = "; it ".join(filter(None, [f"exit code {code}", doing()]))
            with contextlib.suppress(SystemExit):
                # Call `sys.exit` once more: some libraries replace it by a function that records the exit code.
                sys.exit(code)
            _end(code, reason=reason)
        case KeyboardInterrupt():
            _end(130, reason="KeyboardInterrupt")
        case _:
            trace = err.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename in {__file__, runpy.__file__, _FROZEN_RUNPY}:
                # Skip Sirtaki's frames, so that the traceback begins in the user's script.
                trace = trace.tb_next
            by_another = isinstance(err, PeerLostError | StallError)
            _send(RankEvent.RAISES, reason=f"{type(err).__name__}: {err}" if by_another else "")
            if isinstance(err, ConfigError) and trace is not None:
                # Print the line of the script instead of a traceback: the message says what to change.
                err.add_note(f"raised by line {trace.tb_lineno} of {trace.tb_frame.f_code.co_filename}")
                err.__cause__ = trace = None
            sys.last_value = err  # Set it as the interpreter does after an uncaught exception, because mpi4py reads it.
            sys.excepthook(type(err), err.with_traceback(trace), trace)
            _end(1, reason=f"{type(err).__name__}: {explained(err)}".splitlines()[0] + _hint(err))


def _hint(err: BaseException) -> str:
    """Return a remedy for the error `err`. "" if no remedy is known."""
    if isinstance(err, ModuleNotFoundError) and str(err.name).partition(".")[0] == "horovod":
        return "; with --as-horovod `import horovod` imports Sirtaki"
    return ""


def _import_shim() -> None:
    """Import Sirtaki's package named `horovod` (the shim), even if the script's folder contains another `horovod`."""
    sys.path.insert(0, str(SHIM))
    importlib.import_module("horovod")
    sys.path.remove(str(SHIM))  # Remove the folder only here. PYTHONPATH still contains it, for child processes.


def run_python(command: Sequence[str]) -> None:
    """Run `script.py args`, `-m module args` or `-c code args` as the interpreter would.

    The folder that the interpreter would search first, such as the folder of the script, is put first in `sys.path`.
    """
    match command:
        case ["-m", module, *_]:
            sys.argv = list(command[1:])
            _search_first(os.getcwd())
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *_]:
            sys.argv = ["-c", *command[2:]]
            _search_first("")
            _execute(code, "<string>", main_file=None)
        case [script, *_] if Path(script).is_dir() or zipfile.is_zipfile(script):
            sys.argv = list(command)
            runpy.run_path(script, run_name="__main__")
        case [script, *_]:
            sys.argv = list(command)
            _search_first(str(Path(script).resolve().parent))
            path = os.path.abspath(script)
            _execute(Path(script).read_bytes(), path, main_file=path)


def _search_first(folder: str) -> None:
    if not sys.flags.safe_path:  # Not if the user has set `-P`, with which Python does not search the script's folder.
        sys.path.insert(0, folder)


def _execute(code: str | bytes, name: str, *, main_file: str | None) -> None:
    """Run code as the module `__main__`.

    The module stays in `sys.modules`, because pickle and multiprocessing use it later.
    """
    module = types.ModuleType("__main__")
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]  # as in the interpreter's own __main__
    if main_file is not None:
        module.__file__ = main_file
    sys.modules["__main__"] = module
    exec(compile(code, name, "exec"), module.__dict__)


def _exit_code(stop: SystemExit) -> int:
    match stop.code:
        case None:
            return 0
        case int(code):
            return code & 0xFF
        case message:
            print(message, file=sys.stderr)
            return 1


def _end(exit_code: int, *, reason: str) -> NoReturn:
    """Report the failure of this rank to the launcher, which prints the reason and ends all ranks. Then exit."""
    _send(RankEvent.FAILED, exit_code, reason)
    _leave(exit_code)


def _leave(exit_code: int) -> NoReturn:
    """Run the exit handlers, then end this process without MPI_Finalize."""
    give_up = threading.Timer(EXIT_GRACE_S, os._exit, args=[exit_code])
    give_up.daemon = True
    # Ignore that no thread can be started. The exit handlers then run without a time limit.
    with contextlib.suppress(RuntimeError, MemoryError):
        give_up.start()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # Catch any error, because the script may have replaced the stream.
            stream.flush()
    os._exit(exit_code)


def _end_with_parent(parent: int) -> None:
    """End this process when its parent, the local daemon of mpiexec, has exited, so that a killed launcher leaves no
    ranks behind.
    """
    while os.getppid() == parent:
        time.sleep(_ORPHAN_POLL_S)
    if os.getpgrp() == os.getpid():  # Only if the rank leads its process group, as under mpiexec.
        remove_segments(mapped_segments("self"))
        remove_session_folder(parent)
        # Kill this process and its children immediately. They need not wait for other ranks: all ranks of the job end.
        os.killpg(0, signal.SIGKILL)


def _set_place_variables() -> None:
    """Set the environment variables with rank and size that horovodrun and torchrun set.

    Scripts may read them before `init()`.
    """
    for names in (HOROVOD_NAMES, TORCH_NAMES):
        for quantity, name in names.items():
            if (value := place(quantity)) is not None:
                os.environ[name] = str(value)


def _send(event: RankEvent, exit_code: int = 0, reason: str = "") -> None:
    message = ChannelLine(
        event=event, rank=place("RANK") or 0, pid=os.getpid(), host=socket.gethostname(), exit_code=exit_code,
        reason=reason,
    )  # fmt: skip
    with contextlib.suppress(Exception):  # Catch any error, because the script may have replaced the stream.
        sys.stderr.flush()
    os.write(2, message.encode().encode())  # Write once, so that the output of other threads is not mixed in.
