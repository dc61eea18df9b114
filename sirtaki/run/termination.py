"""How a rank ends when mpiexec ends it, or its parent dies: it says where it was and cleans up, or is killed."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from .leftovers import mapped_segments, remove_segments


def answer_termination(tell: Callable[[str], None]) -> None:
    """From now on SIGTERM calls `tell` with what this rank does, in words, before it ends the process.

    Only Python code can be interrupted so: who hangs in C says nothing, and is killed a little later. A script may put
    a handler of its own there; processes that it forks have none.
    """

    def on_terminate(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_DFL)
        remove_segments(mapped_segments("self"))
        tell(doing())
        os.kill(os.getpid(), number)

    def forget() -> None:
        if signal.getsignal(signal.SIGTERM) is on_terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, on_terminate)
    os.register_at_fork(after_in_child=forget)


def doing() -> str:
    """What this rank does and how far it is, in words; "" if its script has no job of Sirtaki's."""
    process_end = sys.modules.get("sirtaki.engine.process_end")
    return "" if process_end is None else str(process_end.describe())


def end_with_parent(number: signal.Signals) -> Callable[[], None]:
    """For a child: what it calls so that the kernel sends it this signal when its parent dies. Linux only."""
    libc = ctypes.CDLL(None)  # looked up before a fork, after which no lock may be taken
    pr_set_pdeathsig = 1

    def set_signal() -> None:
        libc.prctl(pr_set_pdeathsig, number)

    return set_signal
