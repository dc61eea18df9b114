"""An agent as the driver has it: the process that starts it, its output, its connection."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from sirtaki.json_channel import JsonChannel

from ..host_check import PROBLEM
from ..ssh import remedy
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
        assert self._process.stdout is not None  # pipes
        assert self._process.stderr is not None
        self._told = _Told(self._process.stderr, self, by_ssh=os.path.basename(words[0]) == "ssh")
        self._pumps = [
            threading.Thread(target=pump, args=[name, stream], name=f"pump-{host}-{name}", daemon=True)
            for name, stream in (("stdout", self._process.stdout), ("stderr", self._told))
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

    def why_ended(self, code: int) -> str:
        """See `AgentRecord`."""
        self._pumps[1].join(1.0)  # its last words
        return self._told.problem or super().why_ended(code)

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


class _Told:
    """An agent's standard error without those lines that say why it does not come.

    Attributes:
        problem: what they say, and what to do; "" = nothing.
    """

    def __init__(self, stream: IO[bytes], agent: AgentRecord[JsonChannel], *, by_ssh: bool) -> None:
        self._stream, self._agent, self._by_ssh = stream, agent, by_ssh
        self.problem = ""

    def __enter__(self) -> Iterator[bytes]:
        return iter(self)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """As of a file."""
        self._stream.close()

    def __iter__(self) -> Iterator[bytes]:
        for line in self._stream:
            problem = self._read(line.decode(errors="replace")) if self._agent.channel is None else ""
            self.problem = problem or self.problem
            if not problem:
                yield line

    def _read(self, line: str) -> str:
        if line.startswith(PROBLEM):
            return line.removeprefix(PROBLEM).strip()
        found = remedy(line, host=self._agent.host, python=sys.executable) if self._by_ssh else ""
        return f"{line.strip().rstrip('.')}: {found}" if found else ""


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
