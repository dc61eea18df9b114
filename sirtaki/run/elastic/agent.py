"""The parent of the ranks of one host: `python -m sirtaki.run.elastic.agent`, started by the driver.

On standard input comes one line of JSON: what to run, where the driver listens, and the job's secret, which thus stands
on no command line. What ranks write goes out on standard output and error, each line with its rank's number. All else
goes through one connection, both ends of which have proved to know the secret.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from sirtaki.errors import CommError
from sirtaki.json_channel import JsonChannel

from ..host_check import PROBLEM, Need, problem_here
from .agent_config import AgentConfig
from .agent_rules import KILL_GRACE_S, AgentRules, end_grace_s
from .rank_process import RankProcess
from .succession import Succession, agents_key, reach_driver

ALONE_S = 3.0
"""How much longer an agent looks for its driver once its standard input has ended."""

_POLL_S = 0.5
_POLL_WITHOUT_PIDFD_S = 0.05


class Agent:
    """Starts and ends ranks as the driver says, and passes on what they ask and what they are told."""

    def __init__(self, config: AgentConfig, driver: JsonChannel, janitor: subprocess.Popen[bytes] | None) -> None:
        self._config, self._driver, self._janitor = config, driver, janitor
        self._succession = Succession(config) if config.estate is not None else None
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

    # ── see Hands ────────────────────────────────────────────────────────────────────────────────────────────────

    def start_rank(self, worker: int, slot: int) -> None:
        """See `Hands`."""
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
        """See `Hands`."""
        self._ranks[worker].ask_to_end()

    def kill(self, worker: int) -> None:
        """See `Hands`."""
        self._ranks[worker].kill()

    def tell_rank(self, worker: int, message: Mapping[str, Any]) -> None:
        """See `Hands`; a generation needs what only ranks of this job may know."""
        if (rank := self._ranks.get(worker)) is not None:
            own = {"job": self._config.job, "secret": self._config.secret} if message["is"] == "generation" else {}
            rank.channel.send({**message, **own})
            self._watch(rank)

    def tell_driver(self, message: Mapping[str, Any]) -> None:
        """See `Hands`."""
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
