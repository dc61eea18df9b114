"""What an mpiexec says about the end of ranks, in boxes of its own: understood, and kept from the user.

The launcher says the same in one line that names the rank. Boxes about anything else are shown as they are.
"""

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

_RULE = re.compile(r"(-{40,}|={40,})")
_LONGEST_BOX = 60  # lines; more is no box

_KILLED = re.compile(r"noticed that process rank (\d+) with PID \d+ on node (\S+) exited on signal (\d+)")
_EXITED = re.compile(r"exited with non-zero status.*,(\d+)\] Exit code: (\d+)")
_ABORTED = re.compile(r"MPI_ABORT was invoked on rank (\d+).* Errorcode: (-?\d+)")
_UNREACHED = re.compile(r"daemon failed to report back.*Remote host: (\S+)")
_SILENT = re.compile(r"lost communication with a remote daemon.*Remote daemon: \S+ on node (\S+)")
_STOPPED = re.compile(r"has exited due to process rank (\d+) with PID \d+ on node (\S+) (calling|exiting)")
_HYDRA = re.compile(r"BAD TERMINATION OF ONE OF YOUR.* PID (\d+) RUNNING AT (\S+).* EXIT CODE: (\d+)")
_SAID_ALREADY = re.compile(r"Primary job terminated normally, but")
# What Hydra adds below its box.
_BELOW = (
    "YOUR APPLICATION TERMINATED WITH THE EXIT STRING", "This typically refers to a problem with your application",
    "Please see the FAQ page for debugging suggestions",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A rank that ended badly, as mpiexec saw it.

    Attributes:
        rank: None where mpiexec tells the process, or the host, only.
        host: where, "" if mpiexec does not tell.
        reason: in words.
        pid: of the rank's process, 0 if unknown.
    """

    rank: int | None
    host: str
    exit_code: int
    reason: str
    pid: int = 0


class NoticeFilter:
    """Takes the lines that are mpiexec's own, gives back what is to be shown of them."""

    def __init__(self, on_ending: Callable[[Ending], None], on_unreached: Callable[[str], None]) -> None:
        """`on_ending` hears how a rank ended, `on_unreached` of a host whose daemon did not start."""
        self._on_ending, self._on_unreached = on_ending, on_unreached
        self._box: list[bytes] = []

    def take(self, line: bytes) -> bytes:
        """The bytes to show now, none while a box is not complete."""
        text = line.decode(errors="replace").strip()
        is_rule = _RULE.fullmatch(text) is not None
        if not self._box and not is_rule:
            return b"" if text.startswith(_BELOW) else line
        self._box.append(line)
        if len(self._box) > 1 and (is_rule or len(self._box) > _LONGEST_BOX):
            return self.rest()
        return b""

    def rest(self) -> bytes:
        """The box as far as it has come, unless it says what the launcher says."""
        box, self._box = b"".join(self._box), []
        return b"" if self._understood(" ".join(box.decode(errors="replace").split())) else box

    def _understood(self, text: str) -> bool:
        if found := _KILLED.search(text):
            rank, host, number = found.groups()
            self._on_ending(killed(int(rank), host, int(number)))
        elif found := _EXITED.search(text):
            rank, code = found.groups()
            self._on_ending(Ending(rank=int(rank), host="", exit_code=int(code), reason=f"exit code {code}"))
        elif found := _ABORTED.search(text):
            rank, code = found.groups()
            reason = f"it called MPI_Abort with {code}"
            self._on_ending(Ending(rank=int(rank), host="", exit_code=int(code) & 0xFF or 1, reason=reason))
        elif found := _STOPPED.search(text):
            rank, host, how = found.groups()
            reason = "it called MPI_Abort" if how == "calling" else "it ended without MPI_Finalize"
            self._on_ending(Ending(rank=int(rank), host=host, exit_code=1, reason=reason))
        elif found := _HYDRA.search(text):
            pid, host, code = found.groups()
            self._on_ending(Ending(rank=None, host=host, exit_code=int(code), reason=f"exit code {code}", pid=int(pid)))
        elif found := _UNREACHED.search(text):
            self._on_unreached(found[1])
        elif found := _SILENT.search(text):  # mpiexec ends with exit code 0 then
            self._on_ending(Ending(rank=None, host=found[1], exit_code=1, reason="its host cannot be reached any more"))
        else:
            return _SAID_ALREADY.search(text) is not None
        return True


def killed(rank: int, host: str, number: int) -> Ending:
    """The end of a rank by signal `number`."""
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    reason = f"killed by {name}{', as the system does where memory runs out' if number == signal.SIGKILL else ''}"
    return Ending(rank=rank, host=host, exit_code=128 + number, reason=reason)
