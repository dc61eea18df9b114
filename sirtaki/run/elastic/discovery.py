"""Which hosts there are: the user's script, asked again and again, or a list that stays."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from sirtaki.errors import ConfigError, LaunchError

from ..hosts import parse_hosts

INTERVAL_S = 1.0
"""Between one answer and the next question."""

LIMIT_S = 20.0
"""How long the script may take."""

Hosts = Mapping[str, int]


def ask_script(script: str, slots: int, limit_s: float = LIMIT_S) -> Hosts:
    """Runs the script once: one host a line, `name` or `name:slots`; blank lines and `#` comments are ignored.

    Args:
        script: of the user, with its path; anything that can be executed.
        slots: of a host that the script gives no number for.
        limit_s: how long it may take; then it is killed, with what it has started.

    Raises:
        LaunchError: it cannot be run, fails, hangs or prints what names no host.
    """
    try:
        process = subprocess.Popen(
            [str(Path(script).resolve())] if Path(script).exists() else ["sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as err:
        raise LaunchError(f"it cannot be run ({err}); make it executable, with #!/bin/sh in its first line") from err
    try:
        out, err_text = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"it has not ended within {limit_s:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    if process.returncode != 0:
        last = (err_text.decode(errors="replace").strip().splitlines() or [""])[-1]
        raise LaunchError(f"it ended with exit code {process.returncode}{f': {last[:200]}' if last else ''}")
    return _hosts(out.decode(errors="replace"), slots)


def _hosts(text: str, slots: int) -> Hosts:
    found: dict[str, int] = {}
    for line in text.splitlines():
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        try:
            (host,) = parse_hosts(entry if ":" in entry else f"{entry}:{slots}")
        except (ConfigError, ValueError) as err:
            raise LaunchError(f"it printed {entry[:80]!r}, which is no host; write name or name:slots") from err
        found[host.name] = found.get(host.name, 0) + host.slots
    return found


class Discovery:
    """Asks in a thread, since an answer may take long."""

    def __init__(
        self, ask: Callable[[], Hosts], *, on_answer: Callable[[], None], interval_s: float = INTERVAL_S
    ) -> None:
        """Begins at once.

        Args:
            ask: for all hosts; LaunchError where there is no answer.
            on_answer: called in the thread when `take` has something.
            interval_s: between one answer and the next question.
        """
        self._ask, self._on_answer, self._interval_s = ask, on_answer, interval_s
        self._answers: queue.SimpleQueue[Hosts | LaunchError] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)
        self._thread.start()

    def take(self) -> Hosts | LaunchError | None:
        """The oldest answer that has not been taken, or why there was none; None = nothing new."""
        with contextlib.suppress(queue.Empty):
            return self._answers.get_nowait()
        return None

    def close(self) -> None:
        """Asks no more; a question that is being asked is not waited for."""
        self._closing.set()

    def _run(self) -> None:
        last: object = None
        while not self._closing.wait(self._interval_s):
            try:
                answer: Hosts | LaunchError = self._ask()
            except LaunchError as err:
                answer = err
            news = str(answer) if isinstance(answer, LaunchError) else dict(answer)
            if news != last:  # an error that stays is told once
                last = news
                self._answers.put(answer)
                self._on_answer()
