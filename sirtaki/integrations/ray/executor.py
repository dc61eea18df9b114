"""Horovod's `RayExecutor`: functions on ranks that are actors of Ray's.

Ranks that stay share a placement group and are put in order once (`FixedRanks`). For ranks that come and go the rules
are those of `sirtakirun --min-np`, with Ray's nodes for hosts (`ElasticRanks`): room for each is a placement group of
its own, wherever and whenever Ray has it (`Slots`). So a rank's place is its own also while no process is there, an
autoscaler knows what is wanted, and what Ray moves to another node when one is lost is a new slot there. Ray starts and
kills the actors, and says how they have ended; each has a connection to the process of the executor, through which it
asks for its rounds (`RayCrew`).
"""

from __future__ import annotations

import itertools
import os
import random
import secrets
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sirtaki.engine.json_channel import JsonChannel
from sirtaki.engine.membership import FromRank, ToRank
from sirtaki.errors import CommError, ConfigError, LaunchError
from sirtaki.machine import LOOPBACK, own_addresses
from sirtaki.run.elastic.agent import AgentRules, DriverEndpoint, reach_driver
from sirtaki.run.elastic.driver import Switchboard, new_endpoint, run_job
from sirtaki.run.elastic.job_members import (
    Beat,
    FromAgent,
    Heard,
    JobMembers,
    Lost,
    Policy,
    RankEnd,
    ToAgent,
)

from .ranks import (
    Demand,
    Dismissal,
    ElasticRank,
    Rank,
    RaySettings,
    Shape,
    actor_environ,
    elastic_policy,
    in_rank_order,
    interface_names,
    place_variables,
)
from .ray_logger import Log, heard_by

GRACE_S = 10.0
"""How long the others may take to notice that a rank has failed."""


def start_actor(cls: type[Any], demand: Demand, environ: Mapping[str, str], group: Any, bundle: int) -> Any:
    """Start an actor whose process begins with this environment, and return Ray's handle of it.

    Args:
        cls: of the actor.
        demand: of a rank.
        environ: with which its process begins.
        group: placement group that has room for it.
        bundle: number of the room within the group; -1 = any.
    """
    place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
    options = {"num_cpus": demand.cpus, "num_gpus": demand.gpus, "scheduling_strategy": place}
    return ray.remote(cls).options(**options, runtime_env={"env_vars": dict(environ)}).remote()


def cause_of(errors: Sequence[BaseException]) -> BaseException:
    """That which says more than that another rank has failed; of several, the first."""
    return next((err for err in errors if not isinstance(err, CommError)), errors[0])


class FixedRanks:
    """Those of one executor, from its start to its shutdown."""

    def __init__(self, settings: RaySettings, shape: Shape, variables: Mapping[str, str]) -> None:
        """Blocks until all are there.

        Args:
            settings: of the executor.
            shape: how many and where.
            variables: of the environment, from the user.

        Raises:
            LaunchError: Ray has no room for them.
        """
        self._calls, self._lost = itertools.count(1), ""
        self._group, self._owns_group = _room(settings, shape)
        self.actors: list[Any] = []  # Any: Ray's handles, by rank
        try:
            self._start(settings, shape, variables)
        except BaseException:
            self.close()
            raise

    def _start(self, settings: RaySettings, shape: Shape, variables: Mapping[str, str]) -> None:
        environ = actor_environ(os.environ, variables, shape.demand, settings)
        bundles = [number // (1 if shape.hosts is None else shape.ranks) for number in range(shape.size)]
        self.actors = [
            start_actor(Rank, shape.demand, environ, self._group, bundle if self._owns_group else -1)
            for bundle in bundles
        ]
        places = self._wait([actor.place.remote() for actor in self.actors])
        order = in_rank_order(places)
        self.actors, places = [self.actors[number] for number in order], [places[number] for number in order]
        one_host = len({place.host for place in places}) == 1
        host, port = ray.get(self.actors[0].open_store.remote(one_host=one_host, interfaces=settings.interfaces))
        secret = variables.get("SIRTAKI_SECRET") or os.environ.get("SIRTAKI_SECRET") or secrets.token_hex(32)
        meeting = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "SIRTAKI_SECRET": secret}
        told = place_variables(places)
        ray.get([actor.prepare.remote({**own, **meeting}) for actor, own in zip(self.actors, told, strict=True)])

    def make_executables(self, make: Callable[[], Any]) -> None:
        """Makes one on each rank; collective where the class's `__init__` is."""
        self._wait([actor.make_executable.remote(make) for actor in self.actors])

    def execute(self, fn: Callable[[Any], Any], listeners: Sequence[Callable[[Any], object]]) -> list[Any]:
        """Calls `fn(executable)` on each rank.

        Args:
            fn: of the user.
            listeners: called here with what rank 0 gives to `ray_logger.log`.

        Returns:
            The results, by rank.

        Raises:
            Exception: what the function has raised on a rank; of several, the one that the others failed of.
        """
        self._check()
        call, sent = next(self._calls), ray.put(fn)
        with heard_by(listeners) as log:
            return self._wait([actor.execute.remote(call, sent, log.queue) for actor in self.actors], log.deliver)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Calls `fn(executable)` on rank 0; it must not communicate."""
        self._check()
        return self._wait([self.actors[0].execute.remote(next(self._calls), fn)])[0]

    def run_remote(self, fn: Callable[[Any], Any]) -> list[Any]:
        """As `execute`, and returns Ray's references to the results at once."""
        self._check()
        call, sent = next(self._calls), ray.put(fn)
        return [actor.execute.remote(call, sent) for actor in self.actors]

    def close(self) -> None:
        """Ends all actors; again is harmless."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
        if self._owns_group:
            ray.util.remove_placement_group(self._group)
            self._owns_group = False

    def _check(self) -> None:
        if self._lost or not self.actors:
            raise LaunchError(
                f"the ranks have been ended{f' after a failure ({self._lost})' if self._lost else ''}; call shutdown() "
                "and start()"
            )

    def _wait(self, references: Sequence[Any], meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
        """The results, by rank, once all have answered; soon after one has failed its error, and all ranks are ended
        if others go on nevertheless, or a process is gone.
        """
        pending, failed_s = list(references), float("inf")
        found: dict[Any, Any] = {}
        errors: list[BaseException] = []
        try:
            while pending and time.monotonic() < failed_s + GRACE_S:
                done, pending = ray.wait(pending, timeout=0.2)
                for reference in done:
                    try:
                        found[reference] = ray.get(reference)
                    except Exception as err:  # as many kinds as users have, and Ray's own
                        errors.append(err)
                        failed_s = min(failed_s, time.monotonic())
                meanwhile()
        except BaseException:  # Ctrl-C: what runs on the ranks is not waited for
            self._end("it was interrupted")
            raise
        if not errors:
            return [found[reference] for reference in references]
        cause = cause_of(errors)
        if pending or isinstance(cause, ray.exceptions.RayActorError):
            self._end(last_line(cause))
        raise cause

    def _end(self, why: str) -> None:
        self._lost = why
        self.close()


def last_line(error: BaseException) -> str:
    """What says most of a long error of Ray's."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _room(settings: RaySettings, shape: Shape) -> tuple[Any, bool]:
    """A placement group that has room, and whether it is this executor's own."""
    current = ray.util.get_current_placement_group() if shape.uses_current_group else None
    if current is not None:
        return current, False
    strategy = "PACK" if shape.hosts is None else "STRICT_SPREAD"
    group = ray.util.placement_group(shape.bundles, strategy=strategy)
    if not group.wait(settings.placement_group_timeout_s):
        ray.util.remove_placement_group(group)
        raise LaunchError(
            f"Ray has no room for {' + '.join(map(str, shape.bundles[:4]))}{' + …' if len(shape.bundles) > 4 else ''} "
            f"({strategy}) within {settings.placement_group_timeout_s:g} s; it has {ray.available_resources()} free of "
            f"{ray.cluster_resources()}; ask for less, or for more time with placement_group_timeout_s"
        )
    return group, True


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


@dataclass(eq=False)
class RankHandle:
    """A rank as this process has it."""

    worker: int
    there: HostOfActors
    actor: Any
    answer: Future[Any]
    channel: JsonChannel[FromRank] | None = None


class HostOfActors:
    """The ranks of one host: does what its `AgentRules` decide."""

    def __init__(self, host: str, crew: RayCrew) -> None:
        self.host, self._crew = host, crew
        self.ranks: dict[int, RankHandle] = {}
        self.rules = AgentRules(self, host=host, proof=crew.proof, now_s=time.monotonic())

    def start_rank(self, worker: int, slot: int) -> None:
        """Starts an actor on the host; Ray has reserved the room, so the slot does not matter."""
        del slot
        self.ranks[worker] = self._crew.start_actor(worker, self)

    def ask_to_end(self, worker: int) -> None:
        """Ray's actors cannot be asked while they are at work; they are killed when their time is over."""

    def kill(self, worker: int) -> None:
        """Kills the worker's actor."""
        ray.kill(self.ranks[worker].actor)

    def tell_rank(self, worker: int, message: ToRank) -> None:
        """Sends the message to a rank, at the latest when there is room."""
        if (rank := self.ranks.get(worker)) is not None and rank.channel is not None:
            rank.channel.send(message)

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

    def __init__(
        self,
        slots: Slots,
        endpoint: DriverEndpoint,
        *,
        demand: Demand,
        environ: Mapping[str, str],
        interface: str | None,
        call: Any,
        log: Log,
    ) -> None:
        """Has none yet; listens.

        Args:
            slots: where there is room.
            endpoint: where ranks reach it.
            demand: of a rank.
            environ: with which its process begins.
            interface: network interface that joins the hosts; None = any.
            call: Ray's reference to the user's function.
            log: where ranks are heard.
        """
        self._slots, self._demand, self._environ, self._interface = slots, demand, environ, interface
        self._call, self._log = call, log
        self.heard: deque[Heard | Lost] = deque()
        self.proof = endpoint.proof
        self.results: dict[int, Any] = {}
        self.errors: list[BaseException] = []
        self._hosts: dict[str, HostOfActors] = {}
        self.board: Switchboard[RankHandle] = Switchboard(
            endpoint, is_wanted=lambda worker: self._awaited(worker) is not None
        )

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
                self._forget(rank)

    def send_to(self, hosts: Iterable[str], message: ToAgent) -> None:
        """Has the rules of each of these hosts hear the message; nothing happens where a host is not used."""
        for host in hosts:
            if (there := self._hosts.get(host)) is not None:
                there.rules.hear_driver(message, time.monotonic())

    def tell_each_other(self) -> None:
        """Nobody takes the place of this process: Ray ends its actors with it."""

    def wake(self) -> None:
        """From any thread: `look` returns."""
        self.board.wake()

    def look(self, timeout_s: float) -> Iterator[Heard | Lost]:
        """Waits for something to happen, at most so long, and says what."""
        for rank in self.board.look(0.0 if self.heard else timeout_s, self._welcome):
            self._hear(rank)
        for there in list(self._hosts.values()):
            for rank in [rank for rank in there.ranks.values() if rank.answer.done()]:
                self._bury(rank)
            there.rules.tick(time.monotonic())
        self._log.deliver()
        while self.heard:
            yield self.heard.popleft()

    def close(self, number: int | None = None) -> None:
        """Ends all actors, and listens no more; see `HeardCrew`."""
        del number  # the driver of actors hears no signals
        for host in self.hosts:
            self.stop(host)
        self.board.close()

    @property
    def actors(self) -> dict[int, Any]:
        """Ray's handles, by worker; from any thread."""
        return {rank.worker: rank.actor for there in list(self._hosts.values()) for rank in list(there.ranks.values())}

    def start_actor(self, worker: int, there: HostOfActors) -> RankHandle:
        """Starts an actor on that host.

        Raises:
            OSError: there is no room.
        """
        actor = start_actor(ElasticRank, self._demand, self._environ, self._slots.take(worker, there.host), 0)
        reach = partial(reach_driver, tuple(self.board.places), proof=self.proof, number=worker)
        answer = actor.train.remote(reach, there.host, self._interface, self._call, self._log.queue).future()
        answer.add_done_callback(lambda _: self.wake())
        return RankHandle(worker, there, actor, answer)

    def _awaited(self, worker: int) -> RankHandle | None:
        """The rank of that worker, which has not come yet; None = there is none."""
        found = (there.ranks.get(worker) for there in self._hosts.values())
        return next((rank for rank in found if rank is not None and rank.channel is None), None)

    def _welcome(self, worker: int, sock: socket.socket) -> None:
        """A rank has proved itself."""
        if (rank := self._awaited(worker)) is not None:
            rank.channel = JsonChannel(sock, FromRank)
            rank.channel.watch(self.board.events, rank)

    def _hear(self, rank: RankHandle) -> None:
        if rank.channel is None:
            return
        try:
            for message in rank.channel.receive():
                rank.there.rules.hear_rank(rank.worker, message)
        except ConnectionError:  # its end is found soon
            rank.channel.close()

    def _bury(self, rank: RankHandle) -> None:
        """Its function has returned or raised, or its process is gone."""
        there = rank.there
        if self._hosts.get(there.host) is not there or rank.worker not in there.ranks:
            return
        self._hear(rank)  # its last words
        end = self._end_of(rank)
        if end.exit_code == _KILLED and not self._slots.has_node(there.host):
            self.stop(there.host)
            self.heard.append(Lost(there.host, "Ray has lost its node"))
            return
        self._forget(rank)
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
        return RankEnd(exit_code=1, reason=last_line(error))

    def _forget(self, rank: RankHandle) -> None:
        """It is there no more; the actor, whose process may still be there, is ended."""
        del rank.there.ranks[rank.worker]
        if rank.channel is not None:
            rank.channel.close()
        ray.kill(rank.actor)
        self._slots.release(rank.worker)


_LATER_S = 30.0
"""How much longer than this process a rank waits for others: this process can say who is missing."""


_NOTICE_S = 10.0
"""A wait that lasts so long is told."""


def _say(text: str) -> None:
    """Show a line of the driver's; what ranks write Ray shows."""
    print(f"sirtaki: {text}", file=sys.stderr, flush=True)


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
        environ = actor_environ(os.environ, self._variables, self._demand, settings)
        interface = settings.interfaces or None
        with heard_by(listeners) as log:
            self._crew = crew = RayCrew(
                self._slots,
                new_endpoint([LOOPBACK, *own_addresses(interface)]),
                demand=self._demand,
                environ=environ,
                interface=interface,
                call=ray.put(fn),
                log=log,
            )
            self._members = members = JobMembers(self._policy, crew, _say, random.Random(time.time_ns()))
            exit_code = run_job(crew, members, _say, self._slots.ask(), self._asking(members))
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
                    _say(f"{there}; waiting up to {self._policy.timeout_s:g} s for more (elastic_timeout)")
            return found

        return ask

    def close(self) -> None:
        """Gives the room back; again is harmless."""
        self._slots.close()


class RayExecutor:
    """Starts ranks as actors, and calls functions on them. Its methods and their arguments have Horovod's names."""

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 120.0,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100.0,
        nics: str | Iterable[str] | None = None,
    ) -> RaySettings:
        """What the executor is given; no ssh is used, so two arguments have no effect.

        Args:
            timeout_s: how long ranks wait for each other in `init()`.
            ssh_identity_file: no effect.
            ssh_str: no effect.
            placement_group_timeout_s: how long to wait for Ray to find room.
            nics: names of the network interfaces that join the hosts; None = any.

        Raises:
            ConfigError: a time is not positive.
        """
        del ssh_identity_file, ssh_str
        return RaySettings(
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
            interfaces=interface_names(nics),
        )

    def __init__(
        self,
        settings: RaySettings | None = None,
        num_workers: int | None = None,
        *,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: tuple[float, float] | None = None,
        elastic_timeout: float = 600.0,
        override_discovery: bool = True,
    ) -> None:
        """Starts nothing.

        Args:
            settings: of `create_settings`; None = its defaults.
            num_workers: how many ranks, wherever Ray has room, on as few hosts as it can. Where ranks come and go:
                how many to begin with; None = `min_workers`.
            num_hosts: instead, on so many hosts.
            num_workers_per_host: ranks on each of them.
            cpus_per_worker: of a rank; also its `OMP_NUM_THREADS`, unless that is set.
            use_gpu: each rank has one, or what `gpus_per_worker` says.
            gpus_per_worker: of a rank.
            use_current_placement_group: if this process runs in a placement group, the ranks do, too; no effect where
                ranks come and go.
            min_workers: ranks come and go, and at least so many go on; None = they stay.
            max_workers: at most so many; None = as many as Ray's nodes hold.
            reset_limit: how many generations may follow the first one; None = any number.
            cooldown_range: shortest and longest time in seconds that a host is left out where ranks keep failing.
            elastic_timeout: how long to wait for enough ranks, in seconds.
            override_discovery: no effect: hosts are always Ray's nodes.

        Raises:
            ConfigError: arguments that contradict each other.
        """
        del override_discovery
        if gpus_per_worker and not use_gpu:
            raise ConfigError(f"gpus_per_worker={gpus_per_worker} without use_gpu=True")
        self.settings = settings or RaySettings()
        demand = Demand(cpus=cpus_per_worker, gpus=(gpus_per_worker or 1) if use_gpu else 0)
        self._demand = demand
        self._shape: Shape | None = None
        self._policy: Policy | None = None
        self._executable: Callable[[], Any] | None = None
        self._ranks: FixedRanks | ElasticRanks | None = None
        if min_workers is not None:
            if num_hosts is not None:
                raise ConfigError("num_hosts is for ranks that stay; leave out min_workers")
            self._policy = elastic_policy(
                num_workers,
                min_workers,
                max_workers,
                reset_limit=reset_limit,
                cooldown_s=cooldown_range,
                timeout_s=elastic_timeout,
            )
        elif max_workers is not None or reset_limit is not None or cooldown_range is not None:
            raise ConfigError(
                "max_workers, reset_limit and cooldown_range are for ranks that come and go: min_workers="
            )
        elif (num_workers is None) == (num_hosts is None):
            raise ConfigError("give either num_workers or num_hosts (with num_workers_per_host)")
        else:
            self._shape = Shape(
                ranks=num_workers_per_host if num_workers is None else num_workers,
                hosts=num_hosts,
                demand=demand,
                uses_current_group=use_current_placement_group,
            )

    @property
    def workers(self) -> list[Any]:
        """Ray's handles of the actors that are ranks now, by rank."""
        return self._started.actors

    @property
    def _started(self) -> FixedRanks | ElasticRanks:
        if self._ranks is None:
            raise LaunchError("this executor has no ranks; call start() first")
        return self._ranks

    def _staying(self, what: str) -> FixedRanks:
        started = self._started
        if isinstance(started, ElasticRanks):
            raise ConfigError(f"{what} is for ranks that stay; where they come and go use run() or execute()")
        return started

    def start(
        self,
        executable_cls: type[Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Blocks until the ranks are there; Ray is started on this machine if it has not been.

        Where ranks come and go only room is asked for: each call has ranks of its own.

        Args:
            executable_cls: of which each rank makes an object, which `execute` gives to its function.
            executable_args: for it.
            executable_kwargs: for it.
            extra_env_vars: for the ranks; they begin with them.

        Raises:
            LaunchError: Ray has no room, or the ranks are there already.
            Exception: what the class has raised on a rank.
        """
        if self._ranks is not None:
            raise LaunchError("the ranks are there already; call shutdown() first")
        variables = extra_env_vars or {}
        self._executable = None
        if executable_cls is not None:
            make: Callable[..., Any] = executable_cls
            self._executable = partial(make, *(executable_args or ()), **(executable_kwargs or {}))
        if not ray.is_initialized():
            ray.init()
        if self._policy is not None:
            self._ranks = ElasticRanks(self.settings, self._policy, self._demand, variables)
            return
        assert self._shape is not None
        self._ranks = FixedRanks(self.settings, self._shape, variables)
        if self._executable is not None:
            try:
                self._ranks.make_executables(self._executable)
            except BaseException:
                self.shutdown()
                raise

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], object]] | None = None
    ) -> list[Any]:
        """Calls `fn(executable)` on each rank, and waits.

        Args:
            fn: of the rank's object; of None, if `start` was given no class.
            callbacks: called here with what rank 0 gives to `ray_logger.log`.

        Returns:
            The results, by rank; where ranks come and go, of those that were left.

        Raises:
            Exception: what the function has raised on a rank, of its own class.
            LaunchError: where ranks come and go, too few were left.
        """
        started = self._started
        if isinstance(started, ElasticRanks):
            executable = self._executable
            return started.call(lambda: fn(None if executable is None else executable()), callbacks or ())
        return started.execute(fn, callbacks or ())

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], object]] | None = None,
    ) -> list[Any]:
        """As `execute`, of `fn(*args, **kwargs)`."""
        given, named = tuple(args or ()), dict(kwargs or {})
        return self.execute(lambda _: fn(*given, **named), callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """As `run`, but does not wait.

        Returns:
            References for `ray.get`, by rank.
        """
        given, named = tuple(args or ()), dict(kwargs or {})
        return self._staying("run_remote()").run_remote(lambda _: fn(*given, **named))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Calls `fn(executable)` on rank 0 alone, so it must not communicate; its result."""
        return self._staying("execute_single()").execute_single(fn)

    def shutdown(self) -> None:
        """Ends the ranks, whatever they do; again is harmless. `start` may follow."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
