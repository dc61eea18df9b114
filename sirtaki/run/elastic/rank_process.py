"""One rank as its agent has it: a process in a session of its own, its output, and a socket to talk through."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO

from sirtaki.json_channel import JsonChannel
from sirtaki.launchers import AGENT

from ..leftovers import session_members
from ..rank_channel import PATTERN, UNFINISHED, Event, Message
from .workers import RankEnd

_LONGEST_LINE = 65536
_LAST_WORDS_S = 0.3
"""How long what a failed rank has written may take to come."""

_writing = threading.Lock()


class RankProcess:
    """A process that has been started.

    Attributes:
        worker: names it in the job.
        channel: to it.
        pid: of the process, of its session, and of its first group.
    """

    def __init__(self, worker: int, command: Sequence[str], environ: Mapping[str, str], *, hosts: str) -> None:
        """Starts it.

        Args:
            worker: names it in the job.
            command: what it runs.
            environ: its whole environment.
            hosts: "one" if the job will never have another one, else "many".

        Raises:
            OSError: it cannot be started.
        """
        self.worker = worker
        own, its = socket.socketpair()
        with its:
            try:
                self._process = subprocess.Popen(
                    command,
                    env={**environ, AGENT: f"{its.fileno()},{hosts}"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    pass_fds=[its.fileno()],
                )
            except BaseException:
                own.close()
                raise
        self.channel = JsonChannel(own)
        self.pid = self._process.pid
        self._reason = ""
        assert self._process.stdout is not None  # both are pipes
        assert self._process.stderr is not None
        streams = ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        self._pumps = [
            threading.Thread(target=self._pump, args=[source, sink.fileno()], name=f"pump-{worker}", daemon=True)
            for source, sink in streams
        ]
        for pump in self._pumps:
            pump.start()

    def has_ended(self) -> bool:
        """Whether the process, not all that it has started, is gone."""
        return self._process.poll() is not None

    def ask_to_end(self) -> None:
        """SIGTERM to its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to all that is left of its session."""
        for pid in session_members({self.pid}):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def bury(self) -> RankEnd:
        """After its end: ends what it has left behind, and says how it ended itself."""
        returncode = self._process.wait()
        self.kill()
        if returncode > 0:
            self._pumps[1].join(_LAST_WORDS_S)
        self.channel.close()
        return RankEnd(exit_code=returncode if returncode >= 0 else 128 - returncode, reason=self._reason)

    def drain(self, timeout_s: float) -> None:
        """Waits until its output has been passed on."""
        for pump in self._pumps:
            pump.join(timeout_s)

    def _pump(self, source: IO[bytes], sink: int) -> None:
        """Passes lines on, each with the worker's number before it; a very long one in pieces."""
        head = b"[%d] " % self.worker
        with source:
            while line := source.readline(_LONGEST_LINE):
                line = PATTERN.sub(self._note, line)
                if line and not line.endswith(b"\n"):
                    line += UNFINISHED
                if line:
                    _write(sink, head + line)

    def _note(self, found: re.Match[bytes]) -> bytes:
        """What the rank says about itself: its reason is kept, and whose error it is is written into it."""
        message = Message.decode(found)
        if message.event is Event.FAILED:
            self._reason = message.reason
        return replace(message, rank=self.worker).encode().encode()


def _write(sink: int, data: bytes) -> None:
    """At once, so that no other rank's text comes between; nobody reads any more = it is dropped."""
    rest = memoryview(data)
    with _writing, contextlib.suppress(OSError):
        while rest:
            rest = rest[os.write(sink, rest) :]
