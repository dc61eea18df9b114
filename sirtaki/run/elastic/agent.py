"""The parent of the ranks of one host: `python -m sirtaki.run.elastic.agent`, started by the driver."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import IO, Any

from sirtaki.errors import CommError
from sirtaki.json_channel import JsonChannel
from sirtaki.launchers import AGENT

from ..host_check import PROBLEM, Need, problem_here
from ..leftovers import session_members
from ..rank_channel import PATTERN, UNFINISHED, Event, Message
from .agent_rules import KILL_GRACE_S, AgentRules, end_grace_s
from .job_members import RankEnd
from .succession import AgentConfig, Succession, agents_key, reach_driver

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


ALONE_S = 3.0
"""How much longer an agent looks for its driver once its standard input has ended."""

_POLL_S = 0.5
_POLL_WITHOUT_PIDFD_S = 0.05


class Agent:
    """Starts and ends ranks as the driver says, and passes on what they ask and what they are told."""

    def __init__(self, config: AgentConfig, driver: JsonChannel, janitor: subprocess.Popen[bytes] | None) -> None:
        self._config, self._driver, self._janitor = config, driver, janitor
        self._succession = Succession(config) if config.successor_config is not None else None
        self._rules = AgentRules(self, host=config.host, now_s=time.monotonic())
        self._ranks: dict[int, RankProcess] = {}
        self._events = selectors.DefaultSelector()
        self._pidfds: dict[int, int] = {}
        self._poll_s = _POLL_S

    def run(self) -> None:
        """Returns when the driver says so, or is gone; no rank is left."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        if self._succession is not None:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of an ssh whose other end is gone
        self._meet(self._driver)
        while not self._rules.ends or self._ranks:
            self._look()
        self._driver.close()
        if self._succession is not None:
            self._succession.close()

    def _meet(self, driver: JsonChannel) -> None:
        self._driver = driver
        self._events.register(driver, selectors.EVENT_READ)
        self._rules.meet_driver([] if self._succession is None else self._succession.places, time.monotonic())

    def _lose_driver(self) -> None:
        """Finds another one, or ends."""
        with contextlib.suppress(KeyError, ValueError):
            self._events.unregister(self._driver)
        self._driver.close()
        found = None
        if not self._rules.ends and self._succession is not None:
            found = self._succession.find_driver(self._rules.agents)
        if found is None:
            self._end()
        else:
            self._meet(found)

    def _end(self, number: int | None = None, frame: FrameType | None = None) -> None:
        del frame
        environ = {**os.environ, **self._config.environ}
        self._rules.end(time.monotonic(), grace_s=end_grace_s(number, environ))

    def _look(self) -> None:
        """Waits for something to happen, and sees to it."""
        for chosen, _ in self._events.select(self._poll_s):
            if chosen.fileobj is self._driver:
                self._hear_driver()
            elif isinstance(chosen.data, RankProcess) and chosen.data.worker in self._ranks:
                self._hear_rank(chosen.data)
        for rank in [rank for rank in self._ranks.values() if rank.has_ended()]:
            self._bury(rank)
        has_driver = self._rules.tick(time.monotonic())
        self._driver.flush()
        if not has_driver and self._driver.fileno() >= 0:
            self._lose_driver()

    def _hear_driver(self) -> None:
        try:
            messages = self._driver.receive()
        except ConnectionError:
            self._lose_driver()
            return
        for message in messages:
            self._rules.hear_driver(message, time.monotonic())

    def _hear_rank(self, rank: RankProcess) -> None:
        rank.channel.flush()
        self._watch(rank)
        try:
            messages = rank.channel.receive()
        except ConnectionError:  # it has closed the socket, or is about to be found dead
            if self._events.get_map().get(rank.channel) is not None:
                self._events.unregister(rank.channel)
            return
        for message in messages:
            self._rules.hear_rank(rank.worker, message)

    def _watch(self, rank: RankProcess) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank.channel.has_unsent else 0)
        if self._events.get_map().get(rank.channel) is not None:
            self._events.modify(rank.channel, wanted, rank)

    # ── what the rules have done ──────────────────────────────────────────────────────────────────────────────────────

    def start_rank(self, worker: int, slot: int) -> None:
        """Starts the process of a worker in that slot; OSError if it cannot be started."""
        config = self._config
        environ = {
            **os.environ,
            **config.environ,
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_HOSTNAME": config.host,
            "HOROVOD_LOCAL_RANK": str(slot),
        }
        rank = RankProcess(worker, config.command, environ, hosts=config.hosts)
        self._ranks[worker] = rank
        self._tell_janitor(str(rank.pid))
        self._events.register(rank.channel, selectors.EVENT_READ, rank)
        try:
            self._pidfds[worker] = os.pidfd_open(rank.pid)
            self._events.register(self._pidfds[worker], selectors.EVENT_READ, worker)
        except (OSError, AttributeError):  # a sandbox without it
            self._poll_s = _POLL_WITHOUT_PIDFD_S

    def ask_to_end(self, worker: int) -> None:
        """Sends SIGTERM to the worker's process group."""
        self._ranks[worker].ask_to_end()

    def kill(self, worker: int) -> None:
        """Kills all processes of the worker's session."""
        self._ranks[worker].kill()

    def tell_rank(self, worker: int, message: Mapping[str, Any]) -> None:
        """Sends the message to a rank; a generation goes with the job's secret, which only its ranks may know."""
        if (rank := self._ranks.get(worker)) is not None:
            own = {"job": self._config.job, "secret": self._config.secret} if message["is"] == "generation" else {}
            rank.channel.send({**message, **own})
            self._watch(rank)

    def tell_driver(self, message: Mapping[str, Any]) -> None:
        """Sends the message to the driver."""
        self._driver.send(message)

    def _bury(self, rank: RankProcess) -> None:
        self._hear_rank(rank)  # its last words
        if self._events.get_map().get(rank.channel) is not None:
            self._events.unregister(rank.channel)
        if (pidfd := self._pidfds.pop(rank.worker, None)) is not None:
            self._events.unregister(pidfd)
            os.close(pidfd)
        end = rank.bury()
        self._tell_janitor(f"-{rank.pid}")
        del self._ranks[rank.worker]
        self._rules.rank_ended(rank.worker, end)
        if self._rules.ends:
            rank.drain(KILL_GRACE_S)

    def _tell_janitor(self, line: str) -> None:
        if self._janitor is not None and self._janitor.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # somebody has killed it
                self._janitor.stdin.write(f"{line}\n".encode())
                self._janitor.stdin.flush()


def unfit(line: bytes) -> str:
    """Why this host cannot be used for what an agent is told, "" if it can; asked before the rest is understood."""
    need = json.loads(line).get("need")
    return problem_here(Need.of(need)) if need else ""


def _leave_with_input(arrived: threading.Event) -> None:
    """Ends this process where its starter has gone before it has found the driver."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    if not arrived.wait(ALONE_S):
        os._exit(1)


def main() -> int:
    """The agent's process; its exit code says whether it has come as far as to be used."""
    line = sys.stdin.buffer.readline()
    if problem := unfit(line):
        print(f"{PROBLEM}{problem}", file=sys.stderr, flush=True)
        return 1
    config = AgentConfig.decode(line)
    with contextlib.suppress(OSError):
        os.chdir(config.folder)
    arrived = threading.Event()
    threading.Thread(target=_leave_with_input, args=[arrived], name="input-watch", daemon=True).start()
    try:
        driver = reach_driver(config.places, key=agents_key(config.secret, config.job), number=config.number)
    except CommError as err:
        print(f"{PROBLEM}{err}", file=sys.stderr)
        return 1
    arrived.set()
    janitor = None
    with contextlib.suppress(OSError):  # a machine that is full of processes has none for this
        janitor = subprocess.Popen(
            [sys.executable, "-m", "sirtaki.run.janitor", str(os.getpid()), "0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    Agent(config, driver, janitor).run()
    if janitor is not None:
        with contextlib.suppress(OSError):
            janitor.communicate(b"done\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
