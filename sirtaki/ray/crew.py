"""What stands for the agents of hosts where ranks are actors: Ray starts and kills them, and says how they have ended.

Each rank has a connection to the process of the executor, through which it asks for its generations.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sirtaki.engine.membership import FromRank, ToRank
from sirtaki.json_channel import JsonChannel
from sirtaki.run.elastic.agent import AgentRules, Beat, FromAgent, ToAgent
from sirtaki.run.elastic.agent_crew import DriverEndpoint, Heard, Lost, Switchboard
from sirtaki.run.elastic.job_members import RankEnd

from .elastic_rank import ElasticRank, Enrolment
from .ray_logger import Log
from .settings import Demand
from .slots import Slots

_KILLED = 137


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """What all ranks have in common.

    Attributes:
        demand: of a rank.
        environ: with which its process begins.
        interface: network interface that joins the hosts; None = any.
        call: Ray's reference to the user's function.
        log: where ranks are heard.
    """

    demand: Demand
    environ: Mapping[str, str]
    interface: str | None
    call: Any
    log: Log


class RankHandle:
    """A rank as this process has it."""

    def __init__(self, worker: int, actor: Any, answer: Future[Any]) -> None:
        self.worker, self.actor, self.answer = worker, actor, answer
        self.channel: JsonChannel[FromRank] | None = None


class HostOfActors:
    """The ranks of one host: does what its `AgentRules` decide."""

    def __init__(self, host: str, crew: RayCrew) -> None:
        self.host, self._crew = host, crew
        self.ranks: dict[int, RankHandle] = {}
        self.rules = AgentRules(self, host=host, proof=crew.proof, now_s=time.monotonic())

    def start_rank(self, worker: int, slot: int) -> None:
        """Starts an actor on the host; Ray has reserved the room, so the slot does not matter."""
        del slot
        self.ranks[worker] = self._crew.start_actor(worker, self.host)

    def ask_to_end(self, worker: int) -> None:
        """Ray's actors cannot be asked while they are at work; they are killed when their time is over."""

    def kill(self, worker: int) -> None:
        """Kills the worker's actor."""
        ray.kill(self.ranks[worker].actor)

    def tell_rank(self, worker: int, message: ToRank) -> None:
        """Sends the message to a rank, at the latest when there is room."""
        if (rank := self.ranks.get(worker)) is not None and rank.channel is not None:
            rank.channel.send(message)
            self._crew.watch(self, rank)

    def tell_driver(self, message: FromAgent) -> None:
        """Queues the message for the driver; beats are not needed within one process."""
        if not isinstance(message, Beat):
            self._crew.heard.append(Heard(self.host, message))


class RayCrew:
    """All ranks of a job.

    Attributes:
        heard: what the driver has not been told yet.
        proof: what ranks need to prove themselves to each other.
        results: what functions have returned, by worker.
        errors: what functions have raised.
    """

    def __init__(self, start: RankStart, slots: Slots, endpoint: DriverEndpoint) -> None:
        """Has none yet; listens."""
        self._start, self._slots = start, slots
        self.heard: deque[Heard | Lost] = deque()
        self.proof = endpoint.proof
        self.results: dict[int, Any] = {}
        self.errors: list[BaseException] = []
        self._hosts: dict[str, HostOfActors] = {}
        self._board: Switchboard[tuple[HostOfActors, RankHandle]] = Switchboard(endpoint)

    # ── what the driver asks of its agents ────────────────────────────────────────────────────────────────────────────

    @property
    def hosts(self) -> list[str]:
        """Hosts that the driver has started."""
        return list(self._hosts)

    def start(self, host: str) -> None:
        """Nothing has to be started; a host that is lost just now is not up, until discovery says so, too."""
        self._hosts[host] = HostOfActors(host, self)
        if self._slots.has_node(host):
            self._hosts[host].rules.meet_driver([], time.monotonic())
            self.wake()

    def stop(self, host: str) -> None:
        """Forgets the host with all its ranks."""
        if (there := self._hosts.pop(host, None)) is not None:
            for rank in list(there.ranks.values()):
                self._forget(there, rank)

    def send_to(self, hosts: Iterable[str], message: ToAgent) -> None:
        """Has the rules of each of these hosts hear the message; nothing happens where a host is not used."""
        for host in hosts:
            if (there := self._hosts.get(host)) is not None:
                there.rules.hear_driver(message, time.monotonic())

    def tell_each_other(self) -> None:
        """Nobody takes the place of this process: Ray ends its actors with it."""

    # ── for the driver ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def expected(self) -> set[int]:
        """Empty: no driver takes over a job of Ray's actors."""
        return set()

    def expect_no_more(self) -> None:
        """Nobody is expected, so there is nothing to do."""

    def wake(self) -> None:
        """From any thread: `look` returns."""
        self._board.wake()

    def look(self, timeout_s: float) -> Iterator[Heard | Lost]:
        """Waits for something to happen, at most so long, and says what."""
        for there, rank in self._board.look(0.0 if self.heard else timeout_s, self._welcome):
            self._hear(there, rank)
        for there in list(self._hosts.values()):
            for rank in [rank for rank in there.ranks.values() if rank.answer.done()]:
                self._bury(there, rank)
            there.rules.tick(time.monotonic())
        self._start.log.deliver()
        while self.heard:
            yield self.heard.popleft()

    def close(self, number: int | None = None) -> None:
        """Ends all actors, and listens no more; see `HeardCrew`."""
        del number  # the driver of actors hears no signals
        for host in self.hosts:
            self.stop(host)
        self._board.close()

    @property
    def actors(self) -> dict[int, Any]:
        """Ray's handles, by worker; from any thread."""
        return {rank.worker: rank.actor for there in list(self._hosts.values()) for rank in list(there.ranks.values())}

    def start_actor(self, worker: int, host: str) -> RankHandle:
        """Starts an actor on that host.

        Raises:
            OSError: there is no room.
        """
        group = self._slots.take(worker, host)
        start = self._start
        actor = (
            ray.remote(ElasticRank)
            .options(
                num_cpus=start.demand.cpus,
                num_gpus=start.demand.gpus,
                runtime_env={"env_vars": dict(start.environ)},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=0
                ),
            )
            .remote()
        )
        enrolment = Enrolment(
            worker=worker,
            host=host,
            places=tuple((address, port) for address, port in self._board.places),
            proof=self.proof,
            interface=start.interface,
        )
        answer = actor.train.remote(enrolment, start.call, start.log.queue).future()
        answer.add_done_callback(lambda _: self.wake())
        return RankHandle(worker, actor, answer)

    def _welcome(self, worker: int, sock: socket.socket) -> None:
        """A rank has proved itself."""
        for there in self._hosts.values():
            if (rank := there.ranks.get(worker)) is not None and rank.channel is None:
                rank.channel = JsonChannel(sock, FromRank)
                self.watch(there, rank)
                return
        sock.close()

    def watch(self, there: HostOfActors, rank: RankHandle) -> None:
        """Asks the selector for what is needed of that rank's connection just now."""
        if rank.channel is not None:
            self._board.watch(rank.channel, (there, rank))

    def _hear(self, there: HostOfActors, rank: RankHandle) -> None:
        if rank.channel is None or rank.channel.fileno() < 0:
            return
        rank.channel.flush()
        self.watch(there, rank)
        try:
            messages = rank.channel.receive()
        except ConnectionError:  # its end is found soon
            self._board.disconnect(rank.channel)
            rank.channel.close()
            return
        for message in messages:
            there.rules.hear_rank(rank.worker, message)

    def _bury(self, there: HostOfActors, rank: RankHandle) -> None:
        """Its function has returned or raised, or its process is gone."""
        if self._hosts.get(there.host) is not there or rank.worker not in there.ranks:
            return
        self._hear(there, rank)  # its last words
        end = self._end_of(rank)
        if end.exit_code == _KILLED and not self._slots.has_node(there.host):
            self.stop(there.host)
            self.heard.append(Lost(there.host, "Ray has lost its node"))
            return
        self._forget(there, rank)
        there.rules.rank_ended(rank.worker, end)

    def _end_of(self, rank: RankHandle) -> RankEnd:
        error = rank.answer.exception()
        if error is None:
            self.results[rank.worker] = rank.answer.result()
            return RankEnd(exit_code=0)
        if isinstance(error, ray.exceptions.RayActorError):
            return RankEnd(exit_code=_KILLED)
        error = error.as_instanceof_cause() if isinstance(error, ray.exceptions.RayTaskError) else error
        self.errors.append(error)
        text = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        return RankEnd(exit_code=1, reason=text)

    def _forget(self, there: HostOfActors, rank: RankHandle) -> None:
        """It is there no more; the actor, whose process may still be there, is ended."""
        del there.ranks[rank.worker]
        if rank.channel is not None:
            self._board.disconnect(rank.channel)
            rank.channel.close()
        ray.kill(rank.actor)
        self._slots.release(rank.worker)
