"""`RayExecutor`, with Horovod's interface: calls functions on ranks that are Ray actors.

In jobs with a fixed number of ranks, all ranks share a placement group (`FixedRanks`). Elastic jobs follow the rules of
`sirtakirun --min-np`, with Ray's nodes as hosts (`ElasticRanks`). In an elastic job, each rank has its own placement
group (`WorkerSlots`). The group stays reserved while the rank is restarted. It tells Ray's autoscaler how many ranks
are wanted. If Ray moves it after a node's loss, it becomes a slot of another node. Ray starts and kills the actors, and
reports how they ended. Each actor connects to the executor's process, which sends it the ranks after each elastic
restart (`RayCrew`).
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
    AgentMessage,
    FromAgent,
    Heartbeat,
    JobMembers,
    Lost,
    Policy,
    RankEnd,
    ToAgent,
)

from .ranks import (
    Demand,
    ElasticRank,
    Rank,
    RankDismissed,
    RaySettings,
    Shape,
    actor_environ,
    elastic_policy,
    in_rank_order,
    interface_names,
    place_variables,
)
from .ray_logger import Log, receiving_log

GRACE_S = 10.0
"""Seconds from the failure of a rank until the executor ends the other ranks.

In this time, the other ranks can detect the failure and raise errors of their own.
"""


def start_actor(cls: type[Any], demand: Demand, environ: Mapping[str, str], group: Any, bundle: int) -> Any:
    """Start a Ray actor in a placement group. Return its handle.

    Args:
        cls: class of the actor.
        demand: number of CPUs and GPUs that the actor needs.
        environ: environment variables of the actor's process.
        group: placement group for the actor.
        bundle: index of the resource bundle in the placement group. -1 for any bundle.
    """
    place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
    options = {"num_cpus": demand.cpus, "num_gpus": demand.gpus, "scheduling_strategy": place}
    return ray.remote(cls).options(**options, runtime_env={"env_vars": dict(environ)}).remote()


def cause_of(errors: Sequence[BaseException]) -> BaseException:
    """Return the first of the ranks' errors that is not a consequence of another rank's failure. If all are
    consequences, return the first error.
    """
    return next((err for err in errors if not isinstance(err, CommError)), errors[0])


class FixedRanks:
    """The ranks of an executor with a fixed number of ranks, from `RayExecutor.start` to `shutdown`."""

    def __init__(self, settings: RaySettings, shape: Shape, variables: Mapping[str, str]) -> None:
        """Start all ranks, and wait until they are ready.

        Args:
            settings: time limits and network interfaces.
            shape: number and placement of the ranks.
            variables: environment variables that the user has set for the ranks.

        Raises:
            LaunchError: Ray lacks resources.
        """
        self._calls, self._lost = itertools.count(1), ""
        self._group, self._owns_group = _room(settings, shape)
        self.actors: list[Any] = []  # Ray's actor handles, in rank order.
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
        own_variables = place_variables(places)
        ray.get(
            [actor.prepare.remote({**own, **meeting}) for actor, own in zip(self.actors, own_variables, strict=True)]
        )

    def make_executables(self, make: Callable[[], Any]) -> None:
        """Create an object of the user's class on each rank by calling `make` there. `execute` passes the object to the
        user's function.
        """
        self._wait([actor.make_executable.remote(make) for actor in self.actors])

    def execute(self, fn: Callable[[Any], Any], listeners: Sequence[Callable[[Any], object]]) -> list[Any]:
        """Call `fn(executable)` on each rank, with the rank's object of the user's class.

        Args:
            fn: function of the user.
            listeners: functions to call in this process with the values that rank 0 passes to `ray_logger.log`.

        Returns:
            The results, in rank order.

        Raises:
            Exception: error of `fn` on a rank. If several ranks failed, the error that caused the others.
        """
        self._check()
        call, sent = next(self._calls), ray.put(fn)
        with receiving_log(listeners) as log:
            return self._wait([actor.execute.remote(call, sent, log.queue) for actor in self.actors], log.deliver)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call `fn(executable)` on rank 0, with this rank's object of the user's class. The function must not
        communicate.
        """
        self._check()
        return self._wait([self.actors[0].execute.remote(next(self._calls), fn)])[0]

    def run_remote(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call `fn` on each rank, with the rank's object of the user's class. Return Ray's references to the results
        without waiting.
        """
        self._check()
        call, sent = next(self._calls), ray.put(fn)
        return [actor.execute.remote(call, sent) for actor in self.actors]

    def close(self) -> None:
        """End all actors, and free their placement group. Idempotent."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
        if self._owns_group:
            ray.util.remove_placement_group(self._group)
            self._owns_group = False

    def _check(self) -> None:
        if self._lost or not self.actors:
            raise LaunchError(
                "Sirtaki has ended the ranks of this RayExecutor"
                f"{f' after a failure ({self._lost})' if self._lost else ''}; call shutdown() and start() to start "
                "new ranks"
            )

    def _wait(self, references: Sequence[Any], meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
        """Wait for the results of all ranks, and return them in rank order.

        If a rank fails, raise its error after a grace period (`GRACE_S`). If some ranks are still running then, or if a
        rank's process has exited, end all ranks first.
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
                    # Catch any error, because the user's function may raise any, and Ray raises its own.
                    except Exception as err:
                        errors.append(err)
                        failed_s = min(failed_s, time.monotonic())
                meanwhile()
        except BaseException:  # An error such as KeyboardInterrupt: end the ranks without waiting for their results.
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
    """Return the last line of an error's text, which is the most informative one in Ray's long errors."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _room(settings: RaySettings, shape: Shape) -> tuple[Any, bool]:
    """Return a placement group for the ranks, and whether this executor owns it and must remove it."""
    current = ray.util.get_current_placement_group() if shape.uses_current_group else None
    if current is not None:
        return current, False
    strategy = "PACK" if shape.hosts is None else "STRICT_SPREAD"
    group = ray.util.placement_group(shape.bundles, strategy=strategy)
    if not group.wait(settings.placement_group_timeout_s):
        ray.util.remove_placement_group(group)
        raise LaunchError(
            f"Ray lacks resources for the ranks' placement group {' + '.join(map(str, shape.bundles[:4]))}"
            f"{' + …' if len(shape.bundles) > 4 else ''} (strategy {strategy}): after "
            f"{settings.placement_group_timeout_s:g} s, {ray.available_resources()} of {ray.cluster_resources()} are "
            "free; request fewer ranks or resources, or increase placement_group_timeout_s"
        )
    return group, True


class WorkerSlots:
    """Places for the ranks of an elastic executor (slots). Thread-safe.

    Each slot is a Ray placement group for one rank.
    """

    def __init__(self, demand: Demand, *, least: int, most: int | None) -> None:
        """Request placement groups from Ray.

        Args:
            demand: number of CPUs and GPUs of a rank.
            least: minimum number of slots to request.
            most: maximum number of slots to request. None for as many as Ray's nodes could hold if they were empty.
        """
        self._demand, self._least, self._most = demand, least, most
        self._lock, self._is_closed = threading.Lock(), False
        self._groups: dict[str, Any] = {}
        self._names: dict[str, str] = {}  # {Ray's node id: host name}
        self._taken: dict[int, str] = {}  # {worker (process of a rank): id of its placement group}
        self.ask()

    def ask(self) -> Mapping[str, int]:
        """Return the current number of places for ranks (slots) of each host. Request more from Ray if there are too
        few.

        Raises:
            LaunchError: Ray does not answer.
        """
        with self._lock:
            if self._is_closed:  # Return no slots: the job has ended while its hosts were discovered.
                return {}
            try:
                wanted = self._most or max(self._least, self._capacity())
                while len(self._groups) < wanted:
                    group = ray.util.placement_group([self._demand.bundle()])
                    self._groups[group.id.hex()] = group
                found = Counter(self._names[node] for node in self._found(self._alive()).values())
            except ray.exceptions.RayError as err:
                raise LaunchError(
                    f"the Ray cluster did not list its nodes or reserve resources for ranks: {err}; check it with "
                    "`ray status`"
                ) from err
            return dict(found)

    def assign(self, worker: int, host: str) -> Any:
        """Assign a free placement group on `host` to a worker (process of a rank) until `release`, and return the
        group.

        Raises:
            OSError: the host has no free placement group.
        """
        with self._lock:
            for group, node in self._found(self._alive()).items():
                if self._names[node] == host and group not in self._taken.values():
                    self._taken[worker] = group
                    return self._groups[group]
        raise OSError(
            f"all resources that Ray has reserved for this job on host {host} are in use, so Sirtaki cannot start "
            "another rank there; add CPUs, GPUs or hosts to the Ray cluster"
        )

    def release(self, worker: int) -> None:
        """Free the placement group that is assigned to a worker (process of a rank)."""
        with self._lock:
            self._taken.pop(worker, None)

    def has_node(self, host: str) -> bool:
        """Return whether the Ray node with the name `host` is alive."""
        with self._lock:
            return any(self._names[node] == host for node in self._alive())

    def close(self) -> None:
        """Remove all placement groups of the executor from Ray. Idempotent."""
        with self._lock:
            self._is_closed = True
            for group in self._groups.values():
                ray.util.remove_placement_group(group)
            self._groups.clear()

    def _capacity(self) -> int:
        return sum(self._demand.fitting(node["Resources"]) for node in ray.nodes() if node["Alive"])

    def _alive(self) -> set[str]:
        """Return the ids of Ray's living nodes. Assign host names to new nodes."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        for node in sorted(addresses.keys() - self._names.keys()):
            self._names[node] = host_name(node, addresses[node], [self._names.get(each, "") for each in addresses])
        return set(addresses)

    def _found(self, alive: Collection[str]) -> dict[str, str]:
        """Return {id of a placement group that Ray has created: id of its node}."""
        table = ray.util.placement_group_table()
        found = {}
        for group in self._groups:
            entry = table.get(group, {})
            node = entry.get("bundles_to_node_id", {}).get(0, "")
            if entry.get("state") == "CREATED" and node in alive:
                found[group] = node
        return found


def host_name(node: str, address: str, taken: Collection[str]) -> str:
    """Return a host name for a Ray node: its address. If another node has the same address, append the node's id."""
    return f"{address}-{node[:6]}" if address in taken else address


_KILLED = 137


@dataclass(eq=False)
class RankHandle:
    """The executor's view of one elastic rank: its Ray actor, its connection, and its result."""

    worker: int
    there: HostOfActors
    actor: Any
    answer: Future[Any]
    channel: JsonChannel[FromRank] | None = None


class HostOfActors:
    """The ranks (Ray actors) of one host of an elastic job.

    Starts, kills and notifies these ranks when `AgentRules` requests it. (Without Ray, `AgentRules` runs in an agent
    process on each host.)
    """

    def __init__(self, host: str, crew: RayCrew) -> None:
        self.host, self._crew = host, crew
        self.ranks: dict[int, RankHandle] = {}
        self.rules = AgentRules(self, host=host, proof=crew.proof, now_s=time.monotonic())

    def start_rank(self, worker: int, slot: int) -> None:
        """Start the Ray actor of a worker (process of a rank) on this host. `slot` is ignored, because Ray has reserved
        the resources.
        """
        del slot
        self.ranks[worker] = self._crew.start_actor(worker, self)

    def ask_to_end(self, worker: int) -> None:
        """Do nothing, because a running Ray actor cannot be interrupted.

        The caller kills the actor after a time limit.
        """

    def kill(self, worker: int) -> None:
        """Kill the Ray actor of a worker (process of a rank)."""
        ray.kill(self.ranks[worker].actor)

    def send_to_rank(self, worker: int, message: ToRank) -> None:
        """Send a message to the rank of a worker (process). Drop the message if the rank has not connected yet."""
        if (rank := self.ranks.get(worker)) is not None and rank.channel is not None:
            rank.channel.send(message)

    def send_to_driver(self, message: FromAgent) -> None:
        """Queue a message for the driver of the elastic job, which runs in this process. Drop heartbeats, which are not
        needed within one process.
        """
        if not isinstance(message, Heartbeat):
            self._crew.events.append(AgentMessage(self.host, message))


class RayCrew:
    """All Ray actors of an elastic job. The driver, which decides when ranks start and end, controls them by this
    interface.

    Attributes:
        heard: events that `poll` has not returned to the driver yet.
        proof: credentials with which ranks authenticate to each other.
        results: return values of the user's function, by worker (process of a rank).
        errors: errors that the user's function has raised on ranks.
    """

    def __init__(
        self,
        slots: WorkerSlots,
        endpoint: DriverEndpoint,
        *,
        demand: Demand,
        environ: Mapping[str, str],
        interface: str | None,
        call: Any,
        log: Log,
    ) -> None:
        """Listen for ranks to connect. No rank is started yet.

        Args:
            slots: placement groups for ranks.
            endpoint: addresses at which this process accepts connections of ranks.
            demand: number of CPUs and GPUs of a rank.
            environ: environment variables of a rank's process.
            interface: network interface that connects the hosts. None for any.
            call: Ray's object reference to the user's function.
            log: receives the values that rank 0 logs.
        """
        self._slots, self._demand, self._environ, self._interface = slots, demand, environ, interface
        self._call, self._log = call, log
        self.events: deque[AgentMessage | Lost] = deque()
        self.proof = endpoint.proof
        self.results: dict[int, Any] = {}
        self.errors: list[BaseException] = []
        self._hosts: dict[str, HostOfActors] = {}
        self.board: Switchboard[RankHandle] = Switchboard(
            endpoint, is_wanted=lambda worker: self._awaited(worker) is not None
        )

    # ── interface to the driver ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def hosts(self) -> list[str]:
        """Return the hosts on which the driver (the part of the executor that decides about ranks) may start ranks."""
        return list(self._hosts)

    def start(self, host: str) -> None:
        """Add a host, without starting a rank.

        The host reports to the driver (the part of the executor that decides about ranks), unless Ray has lost its node
        meanwhile.
        """
        self._hosts[host] = HostOfActors(host, self)
        if self._slots.has_node(host):
            self._hosts[host].rules.meet_driver([], time.monotonic())
            self.wake()

    def stop(self, host: str) -> None:
        """Remove a host, and kill its ranks."""
        if (there := self._hosts.pop(host, None)) is not None:
            for rank in list(there.ranks.values()):
                self._forget(rank)

    def send_to(self, hosts: Iterable[str], message: ToAgent) -> None:
        """Send a message of the elastic job's driver to the `AgentRules` of each of these hosts.

        The `AgentRules` decide about the host's ranks. Hosts that were not added are skipped.
        """
        for host in hosts:
            if (there := self._hosts.get(host)) is not None:
                there.rules.driver_message(message, time.monotonic())

    def broadcast_agents(self) -> None:
        """Do nothing. Without Ray, this call informs each agent of all agents, so that one of them can replace a lost
        driver. Ray ends the actors together with this process.
        """

    def wake(self) -> None:
        """Make a waiting `poll` return immediately. Thread-safe."""
        self.board.wake()

    def poll(self, timeout_s: float) -> Iterator[AgentMessage | Lost]:
        """Wait up to `timeout_s` for messages of ranks and losses of hosts, and yield them."""
        for rank in self.board.poll(0.0 if self.events else timeout_s, self._welcome):
            self._receive(rank)
        for there in list(self._hosts.values()):
            for rank in [rank for rank in there.ranks.values() if rank.answer.done()]:
                self._reap(rank)
            there.rules.tick(time.monotonic())
        self._log.deliver()
        while self.events:
            yield self.events.popleft()

    def close(self, number: int | None = None) -> None:
        """End all actors, and stop listening."""
        del number  # number of a signal; unused, because Ray kills actors and cannot forward signals to them
        for host in self.hosts:
            self.stop(host)
        self.board.close()

    @property
    def actors(self) -> dict[int, Any]:
        """Return Ray's actor handles, by worker (process of a rank). Thread-safe."""
        return {rank.worker: rank.actor for there in list(self._hosts.values()) for rank in list(there.ranks.values())}

    def start_actor(self, worker: int, there: HostOfActors) -> RankHandle:
        """Start an actor on a host.

        Raises:
            OSError: the host has no free placement group.
        """
        actor = start_actor(ElasticRank, self._demand, self._environ, self._slots.assign(worker, there.host), 0)
        reach = partial(reach_driver, tuple(self.board.places), proof=self.proof, number=worker)
        answer = actor.train.remote(reach, there.host, self._interface, self._call, self._log.queue).future()
        answer.add_done_callback(lambda _: self.wake())
        return RankHandle(worker, there, actor, answer)

    def _awaited(self, worker: int) -> RankHandle | None:
        """Return the rank of a worker (process) if its actor was started and has not connected yet.

        Otherwise return None.
        """
        found = (there.ranks.get(worker) for there in self._hosts.values())
        return next((rank for rank in found if rank is not None and rank.channel is None), None)

    def _welcome(self, worker: int, sock: socket.socket) -> None:
        """Store the connection of a worker (process of a rank) that has authenticated."""
        if (rank := self._awaited(worker)) is not None:
            rank.channel = JsonChannel(sock, FromRank)
            rank.channel.watch(self.board.events, rank)

    def _receive(self, rank: RankHandle) -> None:
        if rank.channel is None:
            return
        try:
            for message in rank.channel.receive():
                rank.there.rules.rank_message(rank.worker, message)
        except ConnectionError:  # Ignore the error: Ray soon reports the end of the rank's process.
            rank.channel.close()

    def _reap(self, rank: RankHandle) -> None:
        """Process the end of a rank: its function returned or raised, or its process exited."""
        there = rank.there
        if self._hosts.get(there.host) is not there or rank.worker not in there.ranks:
            return
        self._receive(rank)  # Process the last messages of the rank first.
        end = self._end_of(rank)
        if end.exit_code == _KILLED and not self._slots.has_node(there.host):
            self.stop(there.host)
            self.events.append(Lost(there.host, "Ray has lost its node"))
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
        """Remove a rank, and kill its actor, whose process may still run."""
        del rank.there.ranks[rank.worker]
        if rank.channel is not None:
            rank.channel.close()
        ray.kill(rank.actor)
        self._slots.release(rank.worker)


_LATER_S = 30.0
"""Seconds for which a rank waits longer for other ranks than the executor does.

The executor must raise its error first, because only this error names the missing ranks.
"""


_NOTICE_S = 10.0
"""Seconds of waiting for Ray's resources after which the executor informs the user."""


def _print(text: str) -> None:
    """Print a line that the elastic job's driver writes, such as "1 rank was lost". Ray prints the output of ranks."""
    print(f"sirtaki: {text}", file=sys.stderr, flush=True)


class ElasticRanks:
    """The ranks of an elastic executor, from `RayExecutor.start` to `shutdown`. Each `call` starts new ranks."""

    def __init__(self, settings: RaySettings, policy: Policy, demand: Demand, variables: Mapping[str, str]) -> None:
        """Request resources from Ray.

        Args:
            settings: time limits and network interfaces.
            policy: numbers of ranks, and limits of restarts, of each elastic job.
            demand: number of CPUs and GPUs of a rank.
            variables: environment variables that the user has set for the ranks.
        """
        self._settings, self._policy, self._demand = settings, policy, demand
        self._variables = {"HOROVOD_ELASTIC_TIMEOUT": f"{policy.timeout_s + _LATER_S:g}", **variables}
        self._slots = WorkerSlots(demand, least=policy.start_ranks, most=policy.max_ranks)
        self._crew: RayCrew | None = None
        self._members: JobMembers | None = None

    @property
    def actors(self) -> list[Any]:
        """Return Ray's actor handles of the current ranks, in rank order. Thread-safe."""
        if self._crew is None or self._members is None:
            return []
        actors = self._crew.actors
        return [actors[worker] for worker in self._members.member_list.members if worker in actors]

    def call(self, fn: Callable[[], Any], listeners: Sequence[Callable[[Any], object]]) -> list[Any]:
        """Call `fn` on all ranks, including ranks that join later, until it has returned on all current ranks.

        Returns:
            The results of the ranks that were in the job at its end, in rank order.

        Raises:
            LaunchError: too few ranks are left.
            Exception: error of `fn` on a rank, if no rank is left.
        """
        settings = self._settings
        environ = actor_environ(os.environ, self._variables, self._demand, settings)
        interface = settings.interfaces or None
        with receiving_log(listeners) as log:
            self._crew = crew = RayCrew(
                self._slots,
                new_endpoint([LOOPBACK, *own_addresses(interface)]),
                demand=self._demand,
                environ=environ,
                interface=interface,
                call=ray.put(fn),
                log=log,
            )
            self._members = members = JobMembers(self._policy, crew, _print, random.Random(time.time_ns()))
            exit_code = run_job(crew, members, _print, self._slots.ask(), self._asking(members))
        if exit_code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        # Exit: this process has received the signal. The exit code is not that of a rank, because Ray kills ranks with
        # SIGKILL.
        if exit_code in (128 + signal.SIGTERM, 128 + signal.SIGHUP):
            raise SystemExit(exit_code)
        if exit_code:
            errors = crew.errors
            raise cause_of(errors) if errors else LaunchError("the job has failed; the lines above contain the reason")
        found = [crew.results.get(worker, RankDismissed()) for worker in members.member_list.members or crew.results]
        return [result for result in found if not isinstance(result, RankDismissed)]

    def _asking(self, members: JobMembers) -> Callable[[], Mapping[str, int]]:
        """Return the function by which the elastic job's driver discovers hosts and their numbers of ranks.

        The function informs the user once if the job cannot start because Ray lacks resources.
        """
        note_s = time.monotonic() + _NOTICE_S

        def ask() -> Mapping[str, int]:
            nonlocal note_s
            found, wanted = self._slots.ask(), self._policy.start_ranks
            if time.monotonic() > note_s:
                note_s = float("inf")
                if not members.member_list.generation and sum(found.values()) < wanted:
                    there = f"Ray has resources for {sum(found.values())} of {wanted} ranks"
                    _print(f"{there}; waiting up to {self._policy.timeout_s:g} s for more (elastic_timeout)")
            return found

        return ask

    def close(self) -> None:
        """Return all reserved resources to Ray. Idempotent."""
        self._slots.close()


class RayExecutor:
    """Starts ranks as Ray actors, and calls functions on them. Methods and arguments have Horovod's names."""

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 120.0,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100.0,
        nics: str | Iterable[str] | None = None,
    ) -> RaySettings:
        """Return settings for the executor. The two ssh arguments have no effect, because Ray starts the ranks.

        Args:
            timeout_s: seconds that ranks wait for each other in `init()`.
            ssh_identity_file: no effect.
            ssh_str: no effect.
            placement_group_timeout_s: seconds to wait for resources.
            nics: names of the network interfaces that connect the hosts. None for any.

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
        """Configure the executor. `start` starts the ranks.

        Args:
            settings: result of `create_settings`. None for its defaults.
            num_workers: number of ranks, packed on few hosts. In elastic jobs: initial number of ranks, None for
                `min_workers`.
            num_hosts: number of hosts, instead of `num_workers`.
            num_workers_per_host: ranks per host, with `num_hosts`.
            cpus_per_worker: CPUs of a rank. Also its `OMP_NUM_THREADS`, unless that is set.
            use_gpu: each rank has a GPU, or `gpus_per_worker` GPUs.
            gpus_per_worker: GPUs of a rank.
            use_current_placement_group: place the ranks in the placement group of this process, if it has one. Ignored
                in elastic jobs.
            min_workers: minimum number of ranks of an elastic job. None for a fixed number of ranks.
            max_workers: maximum number of ranks. None for as many as Ray's nodes can hold.
            reset_limit: maximum number of elastic restarts. None for no limit.
            cooldown_range: shortest and longest time in seconds for which a host is excluded after repeated failures.
            elastic_timeout: seconds to wait for enough ranks.
            override_discovery: no effect, because hosts are always Ray's nodes.

        Raises:
            ConfigError: arguments contradict each other.
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
                raise ConfigError(
                    "RayExecutor's num_hosts= cannot be used with min_workers=, because an elastic job has no fixed "
                    "set of hosts; pass num_workers= instead"
                )
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
                "RayExecutor's max_workers=, reset_limit= and cooldown_range= require an elastic job: pass "
                "min_workers= too, or remove these arguments"
            )
        elif (num_workers is None) == (num_hosts is None):
            raise ConfigError(
                "RayExecutor requires either num_workers or num_hosts (with num_workers_per_host); pass one of the two"
            )
        else:
            self._shape = Shape(
                ranks=num_workers_per_host if num_workers is None else num_workers,
                hosts=num_hosts,
                demand=demand,
                uses_current_group=use_current_placement_group,
            )

    @property
    def workers(self) -> list[Any]:
        """Return Ray's actor handles of the current ranks, in rank order."""
        return self._started.actors

    @property
    def _started(self) -> FixedRanks | ElasticRanks:
        if self._ranks is None:
            raise LaunchError("this RayExecutor has not started its ranks; call start() first")
        return self._ranks

    def _staying(self, what: str) -> FixedRanks:
        started = self._started
        if isinstance(started, ElasticRanks):
            raise ConfigError(
                f"RayExecutor.{what} requires a fixed number of ranks, but this job is elastic; use run() or execute()"
            )
        return started

    def start(
        self,
        executable_cls: type[Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the ranks, and wait until they are ready. Start Ray on this machine if it is not running.

        In elastic jobs, `start` only requests resources, because each call of a function starts new ranks.

        Args:
            executable_cls: class of an object to create on each rank. `execute` passes the object to its function.
            executable_args: positional arguments of the class.
            executable_kwargs: keyword arguments of the class.
            extra_env_vars: environment variables of the ranks.

        Raises:
            LaunchError: Ray lacks resources, or the ranks are running already.
            Exception: error of the class on a rank.
        """
        if self._ranks is not None:
            raise LaunchError("the ranks of this RayExecutor are running already; call shutdown() before start()")
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
        """Call `fn(executable)` on each rank, and wait for the results.

        Args:
            fn: function to call. Its argument is the rank's object, or None if `start` was called without a class.
            callbacks: functions to call in this process with the values that rank 0 passes to `ray_logger.log`.

        Returns:
            The results, in rank order. In elastic jobs, those of the ranks that were in the job at its end.

        Raises:
            Exception: error that `fn` raised on a rank, with its original class.
            LaunchError: too few ranks are left in an elastic job.
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
        """Call `fn(*args, **kwargs)` on each rank, and wait for the results. `execute` describes results and errors."""
        given, named = tuple(args or ()), dict(kwargs or {})
        return self.execute(lambda _: fn(*given, **named), callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on each rank, without waiting for the results.

        Returns:
            Ray's references to the results, for `ray.get`, in rank order.
        """
        given, named = tuple(args or ()), dict(kwargs or {})
        return self._staying("run_remote()").run_remote(lambda _: fn(*given, **named))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call `fn(executable)` on rank 0 only, with this rank's object of the user's class, and return its result. The
        function must not communicate.
        """
        return self._staying("execute_single()").execute_single(fn)

    def shutdown(self) -> None:
        """End the ranks, even if they are running a function. Idempotent. `start` may be called again."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
