"""The parent of the ranks of one host: `python -m sirtaki.run.elastic.agent`, started by the driver.

On standard input comes one line of JSON: what to run, where the driver listens, and the job's secret, which thus stands
on no command line. What ranks write goes out on standard output and error, each line with its rank's number. All else
goes through one connection, both ends of which have proved to know the secret.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

from sirtaki.errors import CommError
from sirtaki.json_channel import JsonChannel

from .agent_config import AgentConfig
from .rank_process import RankProcess
from .succession import Succession, agents_key, reach_driver
from .workers import Phase, RankEnd

BEAT_S = 2.0
"""How often agent and driver tell each other that they are there."""

DRIVER_SILENT_S = 60.0
"""After which a driver is given up: it may have been stopped for a while by its terminal."""

KILL_GRACE_S = 3.0
"""Between asking a rank to end and killing it."""

_POLL_S = 0.5
_POLL_WITHOUT_PIDFD_S = 0.05


class Agent:
    """Starts and ends ranks as the driver says, and passes on what they ask and what they are told."""

    def __init__(self, config: AgentConfig, driver: JsonChannel, janitor: subprocess.Popen[bytes] | None) -> None:
        self._config, self._driver, self._janitor = config, driver, janitor
        self._succession = Succession(config) if config.estate is not None else None
        self._generation: Mapping[str, Any] = {"number": 0, "workers": []}
        self._ranks: dict[int, RankProcess] = {}
        self._kill_at_s: dict[int, float] = {}
        self._events = selectors.DefaultSelector()
        self._events.register(driver, selectors.EVENT_READ)
        self._pidfds: dict[int, int] = {}
        self._poll_s = _POLL_S
        self._ends = False
        self._heard_s = self._beat_s = self._looked_s = time.monotonic()

    def run(self) -> None:
        """Returns when the driver says so, or is gone; no rank is left."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        if self._succession is not None:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of an ssh whose other end is gone
        self._driver.send({"is": "up", **self._report()})
        while not self._ends or self._ranks:
            self._look()
        self._driver.close()
        if self._succession is not None:
            self._succession.close()

    def _report(self) -> dict[str, Any]:
        """What a driver that knows nothing of this agent has to know."""
        ranks = [[rank.worker, rank.slot, *rank.progress.told] for rank in self._ranks.values()]
        places = [] if self._succession is None else self._succession.places
        return {"host": self._config.host, "places": places, "ranks": ranks, "generation": self._generation}

    def _lose_driver(self) -> None:
        """Finds another one, or ends."""
        with contextlib.suppress(KeyError, ValueError):
            self._events.unregister(self._driver)
        self._driver.close()
        found = None if self._ends or self._succession is None else self._succession.find_driver()
        if found is None:
            self._end()
            return
        self._driver, self._heard_s = found, time.monotonic()
        self._events.register(found, selectors.EVENT_READ)
        found.send({"is": "up", **self._report()})

    def _end(self, number: int | None = None, frame: FrameType | None = None) -> None:
        del number, frame
        self._ends = True
        for worker, rank in self._ranks.items():
            if worker not in self._kill_at_s:
                self._kill_at_s[worker] = time.monotonic() + KILL_GRACE_S
                rank.ask_to_end()

    def _look(self) -> None:
        """Waits for something to happen, and sees to it."""
        for chosen, _ in self._events.select(self._poll_s):
            if chosen.fileobj is self._driver:
                self._hear_driver()
            elif isinstance(chosen.data, RankProcess) and chosen.data.worker in self._ranks:
                self._hear_rank(chosen.data)
        for rank in [rank for rank in self._ranks.values() if rank.has_ended()]:
            self._bury(rank)
        now_s = time.monotonic()
        for worker, at_s in list(self._kill_at_s.items()):
            if now_s >= at_s and worker in self._ranks:
                self._ranks[worker].kill()
        if now_s - self._looked_s > DRIVER_SILENT_S / 2:
            self._heard_s = now_s  # this process was stopped, or the machine slept
        self._looked_s = now_s
        if now_s - self._beat_s > BEAT_S:
            self._beat_s = now_s
            self._driver.send({"is": "beat"})
        self._driver.flush()
        if now_s - self._heard_s > DRIVER_SILENT_S and self._driver.fileno() >= 0:
            self._lose_driver()

    def _hear_driver(self) -> None:
        try:
            messages = self._driver.receive()
        except ConnectionError:
            self._lose_driver()
            return
        self._heard_s = time.monotonic()
        for message in messages:
            match message:
                case {"do": "start", "worker": int(worker), "slot": int(slot)}:
                    self._start(worker, slot)
                case {"do": "kill", "worker": int(worker), "at_once": bool(at_once)} if worker in self._ranks:
                    self._kill_at_s[worker] = time.monotonic() + (0.0 if at_once else KILL_GRACE_S)
                    if not at_once:
                        self._ranks[worker].ask_to_end()
                case {"do": "agents", "agents": list(agents)} if self._succession is not None:
                    self._succession.agents = [(number, [(*place,) for place in places]) for number, places in agents]
                case {"do": "generation", "ranks": list(ranks), "workers": list(workers), **generation}:
                    self._generation = {"number": generation["number"], "workers": workers}
                    for worker, rank in ranks:
                        self._note(worker, phase=Phase.MEMBER, generation=generation["number"], rank=rank)
                        self._tell(worker, {**generation, "is": "generation", "rank": rank, **self._own})
                case {"do": "dismiss", "worker": int(worker)}:
                    self._note(worker, phase=Phase.DISMISSED)
                    self._tell(worker, {"is": "dismissed"})
                case {"do": "change", "workers": list(workers), "change": int(change), "lost": str(lost)}:
                    for worker in workers:
                        self._tell(worker, {"is": "change", "change": change, "lost": lost})
                case {"do": "end"}:
                    self._end()

    def _note(self, worker: int, **progress: Any) -> None:
        if (rank := self._ranks.get(worker)) is not None:
            rank.progress = replace(rank.progress, **progress)

    @property
    def _own(self) -> dict[str, Any]:
        return {"job": self._config.job, "secret": self._config.secret}

    def _tell(self, worker: int, message: Mapping[str, Any]) -> None:
        if (rank := self._ranks.get(worker)) is not None:
            rank.channel.send(message)
            self._watch(rank)

    def _watch(self, rank: RankProcess) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank.channel.has_unsent else 0)
        if self._events.get_map().get(rank.channel) is not None:
            self._events.modify(rank.channel, wanted, rank)

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
            match message:
                case {"ask": "join", "has_state": bool(has_state), "attendee": dict(attendee)}:
                    self._note(rank.worker, phase=Phase.WAITING, has_state=has_state, attendee=attendee)
                    asked = {"is": "joined", "worker": rank.worker, "has_state": has_state, "attendee": attendee}
                    self._driver.send(asked)
                case {"ask": "finished"}:
                    self._note(rank.worker, phase=Phase.FINISHED)
                    self._driver.send({"is": "finished", "worker": rank.worker})

    def _start(self, worker: int, slot: int) -> None:
        config = self._config
        environ = {
            **os.environ,
            **config.environ,
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_HOSTNAME": config.host,
            "HOROVOD_LOCAL_RANK": str(slot),
        }
        try:
            rank = RankProcess(worker, slot, config.command, environ, hosts=config.hosts)
        except OSError as err:
            self._tell_ended(worker, RankEnd(exit_code=127, reason=str(err)))
            return
        self._ranks[worker] = rank
        self._tell_janitor(str(rank.pid))
        self._events.register(rank.channel, selectors.EVENT_READ, rank)
        try:
            self._pidfds[worker] = os.pidfd_open(rank.pid)
            self._events.register(self._pidfds[worker], selectors.EVENT_READ, worker)
        except (OSError, AttributeError):  # a sandbox without it
            self._poll_s = _POLL_WITHOUT_PIDFD_S

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
        self._kill_at_s.pop(rank.worker, None)
        self._tell_ended(rank.worker, end)
        if self._ends:
            rank.drain(KILL_GRACE_S)

    def _tell_ended(self, worker: int, end: RankEnd) -> None:
        self._driver.send({"is": "ended", "worker": worker, "exit_code": end.exit_code, "reason": end.reason})

    def _tell_janitor(self, line: str) -> None:
        if self._janitor is not None and self._janitor.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # somebody has killed it
                self._janitor.stdin.write(f"{line}\n".encode())
                self._janitor.stdin.flush()


def main() -> int:
    """The agent's process; its exit code says whether it has come as far as to be used."""
    config = AgentConfig.decode(sys.stdin.buffer.readline())
    with contextlib.suppress(OSError):
        os.chdir(config.folder)
    try:
        driver = reach_driver(config.places, key=agents_key(config.secret, config.job), number=config.number)
    except CommError as err:
        print(f"host {config.host}: {err}", file=sys.stderr)
        return 1
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
