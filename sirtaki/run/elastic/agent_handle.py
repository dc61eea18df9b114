"""An agent as the driver has it: the process that starts it, its output, its connection."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from sirtaki.json_channel import JsonChannel

from .roster import AgentRecord


class AgentHandle(AgentRecord[JsonChannel]):
    """One agent from its start to its end; used once."""

    def __init__(
        self,
        host: str,
        number: int,
        words: Sequence[str],
        environ: Mapping[str, str],
        config: bytes,
        pump: Callable[[str, IO[bytes]], None],
    ) -> None:
        """Starts it.

        Args:
            host: its host.
            number: names it in the job.
            words: the command line.
            environ: of the command.
            config: what the agent is told, a line.
            pump: reads a stream ("stdout" or "stderr") to its end, in a thread.

        Raises:
            OSError: the command cannot be run.
        """
        super().__init__(host, number, program=words[0], now_s=time.monotonic())
        self._process = subprocess.Popen(
            words,
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C comes to the driver alone
        )
        self._pumps = [
            threading.Thread(target=pump, args=[name, stream], name=f"pump-{host}-{name}", daemon=True)
            for name, stream in (("stdout", self._process.stdout), ("stderr", self._process.stderr))
        ]
        for thread in self._pumps:
            thread.start()
        assert self._process.stdin is not None  # a pipe
        with contextlib.suppress(OSError):  # it has ended already, which is found soon
            self._process.stdin.write(config)
            self._process.stdin.flush()

    @property
    def exit_code(self) -> int | None:
        """Of the command; None = it runs."""
        return self._process.poll()

    def disconnect(self) -> None:
        """See `AgentRecord`."""
        super().disconnect()
        self._close_input()

    def wait(self, timeout_s: float) -> None:
        """For its end and its output, at most so long; then the command is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, timeout_s))
        self.disconnect()
        if self._process.poll() is None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1.0)
        for pump in self._pumps:
            pump.join(1.0)

    def _close_input(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.close()


class AdoptedAgent(AgentRecord[JsonChannel]):
    """One that another driver has started."""

    def __init__(self, number: int) -> None:
        """Its host is not known before it says it."""
        super().__init__("", number, program="its starter", now_s=time.monotonic())

    def wait(self, timeout_s: float) -> None:
        """Until it has closed the connection, at most so long."""
        deadline_s = time.monotonic() + timeout_s
        with contextlib.suppress(ConnectionError):
            while self.channel is not None and self.channel.fileno() >= 0 and time.monotonic() < deadline_s:
                self.channel.receive()
                time.sleep(0.05)
        self.disconnect()
