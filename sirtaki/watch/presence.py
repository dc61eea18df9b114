"""How jobs of this machine are found by `sirtaki top`: a socket of each in the user's run folder.

Its name holds the process's number and start time, so that what a killed process has left is known for that. Nobody
writes to it but who asks: a job that nobody looks at pays for a thread that sleeps.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sirtaki.machine import process_fields

logger = logging.getLogger(__name__)

ANSWER_S = 1.0
"""How long a job that is asked may take."""

Answer = dict[str, Any]
"""What a job says of itself; JSON."""


def run_folder() -> Path:
    """Where sockets of this user's jobs are."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    if given and os.access(given, os.W_OK):
        return Path(given) / "sirtaki"
    return Path(tempfile.gettempdir()) / f"sirtaki-{os.getuid()}"


def started(pid: int) -> str:
    """When a process began, in ticks since boot; empty if there is none, or no /proc."""
    try:
        return process_fields(pid)[19]
    except OSError:
        return ""


class Presence:
    """A socket that answers with what a job says of itself."""

    def __init__(self, answer: Callable[[], Answer], *, folder: Path | None = None) -> None:
        """Begins to listen.

        Args:
            answer: called in another thread.
            folder: where; None = the run folder.

        Raises:
            OSError: it cannot.
        """
        folder = run_folder() if folder is None else folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} is another user's")
        self._answer, self._pid = answer, os.getpid()
        self._path = folder / f"{self._pid}.{started(self._pid)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            self._socket.bind(str(self._path))
            self._socket.listen(4)
        except OSError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="sirtaki-presence", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _serve(self) -> None:
        while True:
            try:
                asking, _ = self._socket.accept()
            except OSError:
                return
            with asking, contextlib.suppress(OSError):
                asking.settimeout(ANSWER_S)
                try:
                    said = json.dumps(self._answer())
                except Exception:  # the job is at its end, or just beginning
                    logger.debug("nothing could be told", exc_info=True)
                    continue
                asking.sendall(said.encode())

    def close(self) -> None:
        """Ends it; a child that was forked has nothing to end."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):
            self._path.unlink()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._socket.close()
        self._thread.join(ANSWER_S)


def look(folder: Path | None = None) -> Iterator[Answer]:
    """What each job of this user on this machine says of itself; what dead ones have left is removed."""
    folder = run_folder() if folder is None else folder
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        pid, _, since = path.name.partition(".")
        if not pid.isdigit() or started(int(pid)) != since:
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        with contextlib.suppress(OSError, ValueError):
            yield _ask(path)


def _ask(path: Path) -> Answer:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(ANSWER_S)
        asking.connect(str(path))
        parts = []
        while part := asking.recv(65536):
            parts.append(part)
    said = json.loads(b"".join(parts))
    if not isinstance(said, dict):
        raise ValueError(said)
    return said
