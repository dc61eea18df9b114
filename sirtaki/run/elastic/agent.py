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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from sirtaki.comm.control.mesh.handshake import connect, job_key
from sirtaki.errors import CommError
from sirtaki.json_channel import JsonChannel

from .rank_process import RankProcess
from .workers import RankEnd

BEAT_S = 2.0
"""How often agent and driver tell each other that they are there."""

DRIVER_SILENT_S = 60.0
"""After which a driver is given up: it may have been stopped for a while by its terminal."""

CONNECT_S = 20.0
KILL_GRACE_S = 3.0
"""Between asking a rank to end and killing it."""

_POLL_S = 0.5
_POLL_WITHOUT_PIDFD_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What an agent is told on its standard input.

    Attributes:
        host: as the job calls it.
        number: of the agent; no other one of the job has had it.
        places: where the driver listens.
        secret: of the job.
        job: names it.
        command: what a rank runs.
        environ: what is added to this process's environment for ranks.
        folder: where they run.
        hosts: "one" if there will never be another host, else "many".
    """

    host: str
    number: int
    places: tuple[tuple[str, int], ...]
    secret: str = field(repr=False)
    job: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    folder: str
    hosts: str

    @classmethod
    def decode(cls, line: bytes) -> AgentConfig:
        """From JSON; ValueError, TypeError or KeyError if it is something else."""
        values = json.loads(line)
        places = tuple((host, port) for host, port in values["places"])
        return cls(**{**values, "places": places, "command": tuple(values["command"])})


def agents_key(secret: str, job: str) -> bytes:
    """With which agents and driver prove themselves; ranks of a generation have other ones."""
    return job_key(secret, f"{job}/agents")


class Agent:
    """Starts and ends ranks as the driver says, and passes on what they ask and what they are told."""

    def __init__(self, config: AgentConfig, driver: JsonChannel, janitor: subprocess.Popen[bytes] | None) -> None:
        self._config, self._driver, self._janitor = config, driver, janitor
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
        self._driver.send({"is": "up"})
        while not self._ends or self._ranks:
            self._look()
        for rank in self._ranks.values():
            rank.kill()
        self._driver.send({"is": "gone"})

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
        if now_s - self._heard_s > DRIVER_SILENT_S:
            self._end()

    def _hear_driver(self) -> None:
        try:
            messages = self._driver.receive()
        except ConnectionError:
            self._events.unregister(self._driver)
            self._end()
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
                case {"do": "generation", "ranks": list(ranks), **generation}:
                    for worker, rank in ranks:
                        self._tell(worker, {**generation, "is": "generation", "rank": rank, **self._own})
                case {"do": "dismiss", "worker": int(worker)}:
                    self._tell(worker, {"is": "dismissed"})
                case {"do": "change", "workers": list(workers), "change": int(change), "lost": str(lost)}:
                    for worker in workers:
                        self._tell(worker, {"is": "change", "change": change, "lost": lost})
                case {"do": "end"}:
                    self._end()

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
                    asked = {"is": "joined", "worker": rank.worker, "has_state": has_state, "attendee": attendee}
                    self._driver.send(asked)
                case {"ask": "finished"}:
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
            rank = RankProcess(worker, config.command, environ, hosts=config.hosts)
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


def reach_driver(places: Sequence[tuple[str, int]], *, key: bytes, number: int) -> JsonChannel:
    """A connection to the driver, at the first of its places that answers.

    Raises:
        CommError: none does.
    """
    deadline_s, problem = time.monotonic() + CONNECT_S, "it listens nowhere"
    while time.monotonic() < deadline_s:
        for place in places:
            try:
                return JsonChannel(connect(place, key=key, own=number, other=0))
            except (OSError, CommError) as err:
                problem = str(err)
        time.sleep(0.2)
    tried = ", ".join(f"{host}:{port}" for host, port in places)
    raise CommError(f"the driver cannot be reached at {tried} ({problem}); name the interface with --network-interface")


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
    driver.close()
    if janitor is not None:
        with contextlib.suppress(OSError):
            janitor.communicate(b"done\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
