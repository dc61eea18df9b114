"""Ranks as actors that come and go: the rules of `sirtakirun --min-np`, with Ray's nodes for hosts.

Room for each is a placement group of its own, wherever and whenever Ray has it (`Slots`). So a rank's place is its own
also while no process is there, an autoscaler knows what is wanted, and what Ray moves to another node when one is lost
is a new slot there. Ray starts and kills the actors, and says how they have ended; each has a connection to the process
of the executor, through which it asks for its rounds (`RayCrew`).
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sirtaki.engine.membership import FromRank, ToRank
from sirtaki.errors import LaunchError
from sirtaki.json_channel import JsonChannel
from sirtaki.run.elastic.agent import AgentRules, Beat, FromAgent, ToAgent
from sirtaki.run.elastic.agent_crew import DriverEndpoint, Heard, Lost, Switchboard, new_endpoint
from sirtaki.run.elastic.driver import Driver
from sirtaki.run.elastic.job_members import HostPool, JobMembers, Policy, RankEnd

from .fixed_ranks import cause_of
from .placement import Demand, RaySettings, actor_environ
from .ranks import Dismissal, ElasticRank, Enrolment
from .ray_logger import Log, heard_by


class Slots:
    """Of one executor; asked by several threads."""

    def __init__(self, demand: Demand, *, least: int, most: int | None) -> None:
        """Asks Ray for room.

        Args:
            demand: of a rank.
            least: slots to ask for in any case.
            most: slots to ask for; None = as many as Ray's nodes could hold if they were empty.
        """
        self._demand, self._least, self._most = demand, least, most
        self._lock, self._is_closed = threading.Lock(), False
        self._groups: dict[str, Any] = {}
        self._names: dict[str, str] = {}  # of hosts, by node
        self._taken: dict[int, str] = {}  # groups, by worker
        self.ask()

    def ask(self) -> Mapping[str, int]:
        """Slots by host, as of now; asks Ray for more where there are too few.

        Raises:
            LaunchError: Ray does not answer.
        """
        with self._lock:
            if self._is_closed:  # a question that was under way when the job ended
                return {}
            try:
                wanted = self._most or max(self._least, self._capacity())
                while len(self._groups) < wanted:
                    group = ray.util.placement_group([self._demand.bundle()])
                    self._groups[group.id.hex()] = group
                found = Counter(self._names[node] for node in self._found(self._alive()).values())
            except ray.exceptions.RayError as err:
                raise LaunchError(f"Ray does not answer: {err}") from err
            return dict(found)

    def take(self, worker: int, host: str) -> Any:
        """A group with room on that host, which is the worker's until `release`.

        Raises:
            OSError: there is none.
        """
        with self._lock:
            for group, node in self._found(self._alive()).items():
                if self._names[node] == host and group not in self._taken.values():
                    self._taken[worker] = group
                    return self._groups[group]
        raise OSError(f"Ray has no room on {host} any more")

    def release(self, worker: int) -> None:
        """Another worker may have its room."""
        with self._lock:
            self._taken.pop(worker, None)

    def has_node(self, host: str) -> bool:
        """Whether Ray counts it among the living."""
        with self._lock:
            return any(self._names[node] == host for node in self._alive())

    def close(self) -> None:
        """Gives all room back; again is harmless."""
        with self._lock:
            self._is_closed = True
            for group in self._groups.values():
                ray.util.remove_placement_group(group)
            self._groups.clear()

    def _capacity(self) -> int:
        return sum(self._demand.fitting(node["Resources"]) for node in ray.nodes() if node["Alive"])

    def _alive(self) -> set[str]:
        """Nodes that live; each has a name."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        for node in sorted(addresses.keys() - self._names.keys()):
            self._names[node] = host_name(node, addresses[node], [self._names.get(each, "") for each in addresses])
        return set(addresses)

    def _found(self, alive: Collection[str]) -> dict[str, str]:
        """Nodes, by the groups that have room there."""
        table = ray.util.placement_group_table()
        found = {}
        for group in self._groups:
            entry = table.get(group, {})
            node = entry.get("bundles_to_node_id", {}).get(0, "")
            if entry.get("state") == "CREATED" and node in alive:
                found[group] = node
        return found


def host_name(node: str, address: str, taken: Collection[str]) -> str:
    """Hosts are called by their addresses; further nodes at one address, as in tests, by their ids, too."""
    return f"{address}-{node[:6]}" if address in taken else address


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


_LATER_S = 30.0
"""How much longer than this process a rank waits for others: this process can say who is missing."""


_NOTICE_S = 10.0
"""A wait that lasts so long is told."""


class _Sayings:
    """What the driver tells, as `ElasticOutput` does; what ranks write Ray shows."""

    def say(self, text: str) -> None:
        """A line for the user."""
        print(f"sirtaki: {text}", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Nothing more comes."""


class ElasticRanks:
    """Those of one executor, from its start to its shutdown; each call has its own."""

    def __init__(self, settings: RaySettings, policy: Policy, demand: Demand, variables: Mapping[str, str]) -> None:
        """Asks Ray for room.

        Args:
            settings: of the executor.
            policy: of each call.
            demand: of a rank.
            variables: of the environment, from the user.
        """
        self._settings, self._policy, self._demand = settings, policy, demand
        self._variables = {"HOROVOD_ELASTIC_TIMEOUT": f"{policy.timeout_s + _LATER_S:g}", **variables}
        self._slots = Slots(demand, least=policy.start_ranks, most=policy.max_ranks)
        self._crew: RayCrew | None = None
        self._members: JobMembers | None = None

    @property
    def actors(self) -> list[Any]:
        """Ray's handles of those that are members now, by rank; from any thread."""
        if self._crew is None or self._members is None:
            return []
        actors = self._crew.actors
        return [actors[worker] for worker in self._members.member_list.members if worker in actors]

    def call(self, fn: Callable[[], Any], listeners: Sequence[Callable[[Any], object]]) -> list[Any]:
        """Calls the function on each rank that is there or comes, until those that are members have returned.

        Returns:
            The results of the last members, by rank.

        Raises:
            LaunchError: too few ranks were left.
            Exception: what the function has raised on a rank, where none is left.
        """
        settings = self._settings
        environ = actor_environ(
            os.environ,
            self._variables,
            cpus=self._demand.cpus,
            timeout_s=settings.timeout_s,
            interfaces=settings.interfaces,
        )
        interface = settings.interfaces or None
        own = new_endpoint(interface)
        with heard_by(listeners) as log:
            start = RankStart(demand=self._demand, environ=environ, interface=interface, call=ray.put(fn), log=log)
            self._crew = crew = RayCrew(start, self._slots, own)
            self._members = members = JobMembers(self._policy, HostPool(self._policy, random.Random(time.time_ns())))
            exit_code = Driver(crew, members, _Sayings()).run(self._slots.ask(), self._asking(members))
        if exit_code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        if exit_code in (128 + signal.SIGTERM, 128 + signal.SIGHUP):  # no rank ends so: Ray kills
            raise SystemExit(exit_code)
        if exit_code:
            errors = crew.errors
            raise cause_of(errors) if errors else LaunchError("the job has failed; the lines above say why")
        found = [crew.results.get(worker, Dismissal()) for worker in members.member_list.members or crew.results]
        return [result for result in found if not isinstance(result, Dismissal)]

    def _asking(self, members: JobMembers) -> Callable[[], Mapping[str, int]]:
        """For discovery; tells once where a job does not begin since Ray has too little."""
        note_s = time.monotonic() + _NOTICE_S

        def ask() -> Mapping[str, int]:
            nonlocal note_s
            found, wanted = self._slots.ask(), self._policy.start_ranks
            if time.monotonic() > note_s:
                note_s = float("inf")
                if not members.member_list.generation and sum(found.values()) < wanted:
                    there = f"Ray has room for {sum(found.values())} of {wanted} ranks"
                    _Sayings().say(f"{there}; waiting up to {self._policy.timeout_s:g} s for more (elastic_timeout)")
            return found

        return ask

    def close(self) -> None:
        """Gives the room back; again is harmless."""
        self._slots.close()
