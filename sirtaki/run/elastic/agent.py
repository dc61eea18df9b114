"""The agent of an elastic job: a process that starts and ends the ranks on one host. The driver starts it on each host
by `python -m sirtaki.run.elastic.agent`.

If the driver (the launcher process, `sirtakirun`) is lost, an agent starts a new driver. The other agents connect to
the new driver.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import IO, Protocol

import msgspec

from sirtaki.comm.control.handshake import connect, job_key, listen
from sirtaki.comm.control.members import Membership
from sirtaki.comm.control.waiting import Deadline, retry
from sirtaki.engine.json_channel import JsonChannel
from sirtaki.engine.launchers import AGENT
from sirtaki.engine.membership import Dismissal, Finished, Formed, FromRank, Join, Patience, Proof, ToRank
from sirtaki.errors import CommError
from sirtaki.machine import LOOPBACK, own_addresses

from ..host_check import PROBLEM, Need, problem_here
from ..leftovers import Janitor, kill, session_members
from ..rank_channel import PATTERN, UNFINISHED, ChannelLine, RankEvent
from .job_members import (
    KILL_GRACE_S,
    NO_GENERATION,
    AgentAddress,
    Agents,
    EndAll,
    FormGeneration,
    FromAgent,
    GenerationAck,
    Heartbeat,
    KeepGenerations,
    KillRank,
    KnownAgents,
    Policy,
    ProcessPhase,
    RankEnd,
    RankEnded,
    RankRecord,
    RegisterAgent,
    Relay,
    Relayed,
    StartRank,
    ToAgent,
)

BEAT_S = 2.0
"""Seconds between two heartbeats of an agent (process that starts ranks on a host) and of the driver (launcher
process).
"""

DRIVER_SILENT_S = 60.0
"""Seconds without a message after which an agent (process that starts ranks on a host) looks for another driver.

The driver is the launcher process. The limit is long, because Ctrl-Z may stop the driver for a while.
"""

DRIVER_WANTED_S = 30.0
"""Seconds without a message after which an agent looks for another driver while ranks wait for an elastic restart.

An agent is a process that starts the ranks of a host. The driver is the launcher process. The limit is short, because
the driver's host may be lost together with some ranks.
"""

LEAVE_GRACE_S = 30.0
"""Seconds between SIGTERM and SIGKILL for ranks that write a checkpoint after SIGTERM.

Such ranks train until their next commit, at which they write the checkpoint. For other ranks, `KILL_GRACE_S` applies.
"""


def end_grace_s(number: int | None, environ: Mapping[str, str]) -> float:
    """Return how many seconds ranks may take to end.

    Args:
        number: signal that ends the job. None if no signal ends it.
        environ: environment of the ranks, which determines whether ranks write checkpoints.
    """
    writes = number == signal.SIGTERM and environ.get("SIRTAKI_CHECKPOINT_DIR")
    return LEAVE_GRACE_S if writes else KILL_GRACE_S


# ── rules of an agent, without sockets, processes or clocks ───────────────────────────────────────────────────────────


class AgentActions(Protocol):
    """Actions on the ranks of one host that `AgentRules` requests. Implemented with real processes, with simulated
    processes, and with Ray.
    """

    def start_rank(self, worker: int, slot: int) -> None:
        """Start the process of a rank.

        Args:
            worker: id of the process in the job.
            slot: number of the place for a rank on this host.

        Raises:
            OSError: the process cannot be started.
        """
        ...

    def ask_to_end(self, worker: int) -> None:
        """Send SIGTERM to the rank whose process has the number `worker`."""
        ...

    def kill(self, worker: int) -> None:
        """Kill the rank whose process has the number `worker`.

        `AgentRules.rank_ended` is then called as for any rank.
        """
        ...

    def send_to_rank(self, worker: int, message: ToRank) -> None:
        """Send a message to a rank. Ignored if the rank has exited."""
        ...

    def send_to_driver(self, message: FromAgent) -> None:
        """Send a message to the driver (launcher process). Ignored if the driver has exited."""
        ...


class AgentRules:
    """Rules by which the agent (process that starts the ranks of one host) reacts to messages and to exits of ranks.

    Attributes:
        ranks: running ranks, by worker number (id of the process in the job).
        agents: newest list of all agents of the job, as received from the driver (launcher process).
        ends: True if all ranks and this agent must end.
    """

    def __init__(self, actions: AgentActions, *, host: str, proof: Proof, now_s: float) -> None:
        self._actions, self._host, self._proof = actions, host, proof
        self.ranks: dict[int, RankRecord] = {}
        self._kill_at_s: dict[int, float] = {}
        self._patience_s = 0.0
        self.agents: Agents = []
        self.ends = False
        self._generation = NO_GENERATION
        self._heard_s = self._beat_s = self._looked_s = now_s

    def meet_driver(self, places: Sequence[AgentAddress], now_s: float) -> None:
        """Send the complete state of this agent (its ranks, and what it has received) to a new driver (launcher
        process).

        Args:
            places: addresses at which a driver would listen if this agent started one.
            now_s: current time.
        """
        self._heard_s = now_s
        up = RegisterAgent(
            host=self._host,
            places=places,
            # Copy the records of ranks: they may change before the message is sent.
            ranks=[*map(replace, self.ranks.values())],
            patience_s=self._patience_s,
            generation=self._generation,
        )
        self._actions.send_to_driver(up)

    def end(self, now_s: float, *, grace_s: float = KILL_GRACE_S) -> None:
        """Ask all ranks of this host to end, and later kill those that do not. The agent process must exit afterwards.

        Args:
            now_s: current time.
            grace_s: seconds after which training ranks are killed if they have not ended.
        """
        self.ends = True
        for worker, there in self.ranks.items():
            if worker not in self._kill_at_s:
                self._kill_at_s[worker] = now_s + (grace_s if there.phase is ProcessPhase.MEMBER else KILL_GRACE_S)
                self._actions.ask_to_end(worker)

    def tick(self, now_s: float) -> bool:
        """Check the time limits of this host's ranks and of the driver (launcher process). Call at least twice a
        second.

        Returns:
            False if the driver has been silent for too long, so that the agent must look for another driver.
        """
        for worker, at_s in list(self._kill_at_s.items()):
            if now_s >= at_s:
                self._actions.kill(worker)
        if now_s - self._looked_s > DRIVER_SILENT_S / 2:
            # Restart the driver's (launcher process's) time limit after a long gap, in which this process was stopped
            # or the machine was suspended.
            self._heard_s = now_s
        self._looked_s = now_s
        if now_s - self._beat_s > BEAT_S:
            self._beat_s = now_s
            self._actions.send_to_driver(Heartbeat())
        is_wanted = any(there.phase is ProcessPhase.WAITING and there.generation for there in self.ranks.values())
        return now_s - self._heard_s <= (DRIVER_WANTED_S if is_wanted else DRIVER_SILENT_S)

    def driver_message(self, message: ToAgent, now_s: float) -> None:
        """Carry out an order of the driver (launcher process). Ignore orders for ranks on other hosts."""
        self._heard_s, act = now_s, self._actions
        match message:
            case StartRank(worker=worker, slot=slot):
                try:
                    act.start_rank(worker, slot)
                except OSError as err:
                    act.send_to_driver(RankEnded(worker=worker, end=RankEnd(exit_code=127, reason=str(err))))
                else:
                    self.ranks[worker] = RankRecord(number=worker, host=self._host, slot=slot)
            case KillRank(worker=worker, at_once=at_once) if worker in self.ranks:
                self._kill_at_s[worker] = now_s + (0.0 if at_once else KILL_GRACE_S)
                (act.kill if at_once else act.ask_to_end)(worker)
            case KnownAgents(agents):
                self.agents = agents
            case FormGeneration():
                self._generation = msgspec.structs.replace(message, members=(), older=message.older or ())
                membership = Membership(
                    generation=message.number,
                    members=message.members,
                    name=self._proof.job,
                    secret=self._proof.secret,
                )
                for rank, worker in enumerate(message.workers):
                    if (there := self.ranks.get(worker)) is not None:
                        there.phase, there.generation, there.rank = ProcessPhase.MEMBER, message.number, rank
                        act.send_to_rank(worker, Formed(rank=rank, membership=membership))
                if message.older is not None:
                    act.send_to_driver(GenerationAck(message.number))
            case KeepGenerations(number=number, older=older) if number == self._generation.number:
                self._generation = msgspec.structs.replace(self._generation, older=older)
            case Relay(workers, told):
                for worker in self.ranks.keys() & set(workers):
                    if isinstance(told, Dismissal):
                        self.ranks[worker].phase = ProcessPhase.DISMISSED
                    act.send_to_rank(worker, told)
            case EndAll(grace_s):
                self.end(now_s, grace_s=grace_s)

    def rank_message(self, worker: int, message: FromRank) -> None:
        """Process a message of a rank on this host, and forward it to the driver (launcher process)."""
        there = self.ranks[worker]
        match message:
            case Join(member=member):
                there.phase, there.has_state, there.member = ProcessPhase.WAITING, member.has_state, member
                if self.ends:  # Tell the rank to exit: the job ends.
                    self._actions.kill(worker)
            case Patience(seconds):
                self._patience_s = max(self._patience_s, seconds)
            case Finished():
                there.phase = ProcessPhase.FINISHED
        self._actions.send_to_driver(Relayed(worker, message))

    def rank_ended(self, worker: int, end: RankEnd) -> None:
        """Report to the driver (launcher process) that a rank's process has exited."""
        del self.ranks[worker]
        self._kill_at_s.pop(worker, None)
        self._actions.send_to_driver(RankEnded(worker=worker, end=end))


# ── how agents find a driver ──────────────────────────────────────────────────────────────────────────────────────────

CONNECT_S = 20.0
"""Seconds for which an agent (process that starts ranks on a host) tries to connect to a driver that runs or starts.

The driver is the launcher process.
"""

CANDIDATE_S = 6.0
"""Seconds for which an agent (process that starts ranks on a host) tries to reach another agent.

The other agent may have started a new driver (launcher process).
"""

DRIVER = 0
"""Id of the driver (launcher process) in the authentication of a job's processes. Ids of agents start at 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticJob:
    """Description of an elastic job. Every agent (process that starts ranks on a host) has it, because it may have to
    start a new driver (launcher process).

    Attributes:
        command: command line of each rank.
        script: script file in `command`, which must exist on every host. "" if `command` runs no script.
        carried: environment variables of the launcher that ranks on other hosts get.
        interface: network interface that connects the hosts. None for any.
        one_host: True if the job will never use a second host.
        agent_command: the user's command that starts an agent, with placeholders `{host}` and `{command}`. "" to use
            ssh or srun.
        slurm_hosts: hosts of the allocation in which the launcher runs.
        ssh: arguments for ssh.
        agent_start_s: seconds that an agent may take to connect.
        policy: rules for starting, replacing and excluding ranks and hosts.
        discovery: host discovery script. "" if the hosts are fixed.
        slots: slots (number of ranks) of hosts for which the discovery script prints no number.
        hosts: names and slots of the hosts, if they are fixed.
        prefix: True if console lines begin with the rank.
        timestamps: True if console lines begin with the time.
        folder: folder for one output file per process slot and stream. None to print output only on the console.
    """

    command: tuple[str, ...]
    policy: Policy
    script: str = ""
    carried: Mapping[str, str] = field(default_factory=dict)
    interface: str | None = None
    one_host: bool = False
    agent_command: str = ""
    slurm_hosts: frozenset[str] = frozenset()
    ssh: tuple[str, ...] = ()
    agent_start_s: float = 60.0
    discovery: str = ""
    slots: int = 1
    hosts: Mapping[str, int] = field(default_factory=dict)
    prefix: bool = True
    timestamps: bool = False
    folder: str | None = None

    @property
    def addresses(self) -> list[str]:
        """Return the addresses of this host at which a driver (launcher process) of the job listens."""
        return [LOOPBACK, *([] if self.one_host else own_addresses(self.interface))]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Configuration of an agent (process that starts ranks on a host), which it reads from standard input as a line of
    JSON.

    Attributes:
        need: requirements that the host must meet. `need.folder` is the working directory of ranks.
        host: name of the agent's host, as the user or the discovery script wrote it.
        number: id of the agent, unique in the job.
        places: addresses at which the driver (launcher process) listens. proof: id and secret of the job, with which
            the agent authenticates.
        environ: variables that the agent adds to its own environment for ranks.
        job: description of the job.
    """

    need: Need
    host: str
    number: int
    places: tuple[AgentAddress, ...]
    proof: Proof
    environ: Mapping[str, str]
    job: ElasticJob


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverEndpoint:
    """Addresses and credentials with which agents reach the driver (launcher process). The job's first driver creates
    them. A driver that replaces a lost one gets them from the agent that starts it.

    Attributes:
        proof: id and secret of the job, with which peers authenticate.
        listeners: descriptors of listening sockets.
        agents: ids of agents that are expected to connect.
        numbers: highest agent id that the job has assigned.
    """

    proof: Proof
    listeners: tuple[int, ...]
    agents: tuple[int, ...] = ()
    numbers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """State that an agent passes to a new driver (launcher process), which it starts after the old one was lost. The
    new driver reads it from standard input as JSON.

    Attributes:
        job: description of the job that the lost driver ran.
        environ: variables that are added to the agent's environment for ranks.
        endpoint: sockets and credentials with which the new driver accepts agents.
    """

    job: ElasticJob
    environ: Mapping[str, str]
    endpoint: DriverEndpoint


def agents_key(proof: Proof) -> bytes:
    """Return the key with which the processes that start ranks (agents) and the launcher (driver) authenticate. Ranks
    use other keys among themselves.
    """
    return job_key(proof.secret, f"{proof.job}/agents")


def reach_driver(
    places: Sequence[AgentAddress], *, proof: Proof, number: int, timeout_s: float = CONNECT_S
) -> socket.socket:
    """Connect to the driver (launcher process) of the job at the first address that answers, and return the socket.

    Raises:
        CommError: no address answers.
    """

    def reach() -> socket.socket:
        problem = "it has no address"
        for place in places:
            try:
                return connect(place, key=agents_key(proof), own=number, other=DRIVER)
            except (OSError, CommError) as err:
                problem = str(err)
        raise OSError(problem)

    try:
        sock = retry(reach, OSError, Deadline.after(timeout_s))
    except OSError as err:
        tried = ", ".join(f"{host}:{port}" for host, port in places)
        raise CommError(
            f"this host cannot reach the driver (launcher process) at {tried}: {err}; choose the network interface "
            "with --network-interface"
        ) from err
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def candidates(agents: Agents, own: int) -> Iterator[tuple[int, Sequence[AgentAddress], float]]:
    """Yield (id, addresses, seconds to try to connect) of each agent that may start a new driver (launcher process)
    after a loss, in order of priority.

    Args:
        agents: newest list of agents, as received from the lost driver.
        own: id of this agent. When `own` is yielded, this agent must start the driver itself.
    """
    for number, places in sorted(agents):
        yield number, places, CONNECT_S if number == own else CANDIDATE_S


def expected_by_successor(agents: Agents, own: int) -> tuple[int, ...]:
    """Return the ids of the agents that connect if agent `own` starts a new driver (launcher process).

    They are `own` and all higher ids.
    """
    return tuple(number for number, _ in agents if number >= own)


class Succession:
    """Search for a new driver (launcher process) after an agent has lost its driver.

    When it is this agent's turn, the agent starts a new driver itself.
    """

    def __init__(self, config: AgentConfig) -> None:
        """Open the port at which a driver (launcher process) would listen if this agent started one.

        Raises:
            OSError: the port cannot be opened.
        """
        self._config = config
        self._listeners = listen(config.job.addresses)
        self._driver: subprocess.Popen[bytes] | None = None

    @property
    def places(self) -> list[AgentAddress]:
        """Return the addresses at which a driver (launcher process) would listen if this agent started one."""
        return [listener.getsockname()[:2] for listener in self._listeners]

    def find_driver(self, agents: Agents) -> socket.socket | None:
        """Connect to a new driver (launcher process) after the loss of the old one. Return the socket, or None if no
        driver can be reached.

        Blocks for some seconds per unreachable agent.

        Args:
            agents: newest list of agents, as received from the driver.
        """
        own = self._config.number
        for number, places, timeout_s in candidates(agents, own):
            if number == own:
                self._start_driver(agents)
                places = self.places
            with contextlib.suppress(CommError):
                return reach_driver(places, proof=self._config.proof, number=own, timeout_s=timeout_s)
        return None

    def close(self) -> None:
        """Close the port for a new driver. If this agent has started a driver (launcher process), wait until it ends by
        itself.
        """
        for listener in self._listeners:
            listener.close()
        if self._driver is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._driver.wait(10.0)

    def _start_driver(self, agents: Agents) -> None:
        if self._driver is not None and self._driver.poll() is None:
            # Start no second driver (launcher process): the driver that this agent started still runs. It gave up this
            # agent, because the agent was stopped for a while.
            return
        config = self._config
        descriptors = tuple(listener.fileno() for listener in self._listeners)
        endpoint = DriverEndpoint(
            proof=config.proof,
            listeners=descriptors,
            agents=expected_by_successor(agents, config.number),
            numbers=max(number for number, _ in agents),
        )
        inheritance = Inheritance(job=config.job, environ=config.environ, endpoint=endpoint)
        self._driver = subprocess.Popen(
            [sys.executable, "-P", "-m", "sirtaki.run.elastic.driver"],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=descriptors,
        )
        assert self._driver.stdin is not None  # This is never None, because standard input is a pipe.
        with contextlib.suppress(OSError), self._driver.stdin as stdin:
            stdin.write(msgspec.json.encode(inheritance))


# ── the process ───────────────────────────────────────────────────────────────────────────────────────────────────────

_LONGEST_LINE = 65536
_LAST_WORDS_S = 1.0
"""Maximum seconds that an agent (process that starts ranks) waits for the remaining output of a failed rank."""

_writing = threading.Lock()


class RankProcess:
    """Process of a rank, as seen by its agent.

    Attributes:
        worker: id of the process in the job.
        channel: socket for messages between agent and rank.
        pid: process id, which is also the id of the session and of its first process group.
    """

    def __init__(self, worker: int, command: Sequence[str], environ: Mapping[str, str], *, hosts: str) -> None:
        """Start the process.

        Args:
            worker: id of the process in the job.
            command: command line.
            environ: complete environment of the process.
            hosts: "one" if the job will never use a second host, otherwise "many".

        Raises:
            OSError: the process cannot be started.
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
        self.channel: JsonChannel[FromRank] = JsonChannel(own, FromRank)
        self.pid = self._process.pid
        self._reason = ""
        assert self._process.stdout is not None  # This is never None, because stdout and stderr are pipes.
        assert self._process.stderr is not None
        streams = ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        self._pumps = [
            threading.Thread(target=self._pump, args=[source, sink.fileno()], name=f"pump-{worker}", daemon=True)
            for source, sink in streams
        ]
        for pump in self._pumps:
            pump.start()

    def has_ended(self) -> bool:
        """Return whether the rank's process has exited. Its children may still run."""
        return self._process.poll() is not None

    def ask_to_end(self) -> None:
        """Send SIGTERM to the process group of the rank."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to all processes of the rank's session."""
        kill(session_members({self.pid}))

    def reap(self) -> RankEnd:
        """Kill the remaining children of the exited rank, and return how the rank's process ended."""
        returncode = self._process.wait()
        self.kill()
        if returncode > 0:
            self._pumps[1].join(_LAST_WORDS_S)
        self.channel.close()
        return RankEnd(exit_code=returncode if returncode >= 0 else 128 - returncode, reason=self._reason)

    def drain(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until all output of the rank has been forwarded."""
        for pump in self._pumps:
            pump.join(timeout_s)

    def _pump(self, source: IO[bytes], sink: int) -> None:
        """Forward output lines of the rank to the launcher, each prefixed with the number of its process. Very long
        lines are split.
        """
        head = b"[%d] " % self.worker
        with source:
            while line := source.readline(_LONGEST_LINE):
                line = PATTERN.sub(self._note, line)
                if line and not line.endswith(b"\n"):
                    line += UNFINISHED
                rest = memoryview(head + line if line else b"")
                # Ignore write errors: the launcher, which reads the output, has exited.
                with _writing, contextlib.suppress(OSError):
                    while rest:
                        rest = rest[os.write(sink, rest) :]

    def _note(self, found: re.Match[bytes]) -> bytes:
        """Store the failure reason in a message from the rank to the launcher, and add the number of the rank's
        process.
        """
        message = ChannelLine.decode(found)
        if message.event is RankEvent.FAILED:
            self._reason = message.reason
        return replace(message, rank=self.worker).encode().encode()


ALONE_S = 3.0
"""Seconds for which an agent may still try to connect to the driver after its standard input was closed.

An agent is a process that starts ranks. The driver is the launcher process.
"""

_POLL_S = 0.5
_POLL_WITHOUT_PIDFD_S = 0.05


class Agent:
    """The agent process of one host: starts and ends ranks, and forwards messages between them and the driver (launcher
    process).
    """

    def __init__(self, config: AgentConfig, driver: socket.socket) -> None:
        self._config = config
        self._janitor = Janitor(os.getpid(), end_s=0.0)
        self._succession = Succession(config) if config.job.policy.has_successors else None
        self._rules = AgentRules(self, host=config.host, proof=config.proof, now_s=time.monotonic())
        self._ranks: dict[int, RankProcess] = {}
        self._events = selectors.DefaultSelector()
        self._pidfds: dict[int, int] = {}
        self._poll_s = _POLL_S
        self._meet(driver)

    def run(self) -> None:
        """Run until the driver (launcher process) ends this agent, or until no driver can be found. Afterwards, no rank
        is left running.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        if self._succession is not None:
            signal.signal(
                signal.SIGHUP,
                signal.SIG_IGN,
                # Ignore SIGHUP, which a lost ssh connection sends: this agent then looks for another driver (launcher
                # process).
            )
        while not self._rules.ends or self._ranks:
            self._poll()
        self._driver.close()
        if self._succession is not None:
            self._succession.close()
        self._janitor.dismiss()

    def _meet(self, driver: socket.socket) -> None:
        self._driver: JsonChannel[ToAgent] = JsonChannel(driver, ToAgent)
        self._driver.watch(self._events, self._driver)
        self._rules.meet_driver([] if self._succession is None else self._succession.places, time.monotonic())

    def _lose_driver(self) -> None:
        """Connect to another driver (launcher process) after the current one was lost. If no driver can be reached, end
        all ranks.
        """
        self._driver.close()
        if not self._rules.ends and self._succession is not None:
            self._write_to_file()
            if (found := self._succession.find_driver(self._rules.agents)) is not None:
                self._meet(found)
                return
        self._end()

    def _write_to_file(self) -> None:
        """Redirect the output of this process and its ranks to a file, because the lost driver no longer reads it."""
        with contextlib.suppress(OSError), open(f"sirtaki-{self._config.host}.log", "ab") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)

    def _end(self, number: int | None = None, frame: FrameType | None = None) -> None:
        del frame
        environ = {**os.environ, **self._config.environ}
        self._rules.end(time.monotonic(), grace_s=end_grace_s(number, environ))

    def _poll(self) -> None:
        """Wait for messages, exits of ranks, or the next time limit, and process them."""
        for chosen, _ in self._events.select(self._poll_s):
            if chosen.data is self._driver:
                self._receive_from_driver()
            elif isinstance(chosen.data, RankProcess) and chosen.data.worker in self._ranks:
                self._receive_from_rank(chosen.data)
        for rank in [rank for rank in self._ranks.values() if rank.has_ended()]:
            self._reap(rank)
        has_driver = self._rules.tick(time.monotonic())
        if not has_driver and self._driver.fileno() >= 0:
            self._lose_driver()

    def _receive_from_driver(self) -> None:
        try:
            messages = self._driver.receive()
        except ConnectionError:
            self._lose_driver()
            return
        for message in messages:
            self._rules.driver_message(message, time.monotonic())

    def _receive_from_rank(self, rank: RankProcess) -> None:
        try:
            messages = rank.channel.receive()
        except ConnectionError:  # The rank has closed the socket, or has died.
            rank.channel.close()
            return
        for message in messages:
            self._rules.rank_message(rank.worker, message)

    # ── actions of the rules ──────────────────────────────────────────────────────────────────────────────────────────

    def start_rank(self, worker: int, slot: int) -> None:
        """Start the process of a rank.

        Args:
            worker: id of the process in the job.
            slot: number of the place for a rank on this host.

        Raises:
            OSError: the process cannot be started.
        """
        config = self._config
        environ = {
            **os.environ,
            **config.environ,
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_HOSTNAME": config.host,
            "HOROVOD_LOCAL_RANK": str(slot),
        }
        rank = RankProcess(worker, config.job.command, environ, hosts="one" if config.job.one_host else "many")
        self._ranks[worker] = rank
        self._janitor.watch(rank.pid)
        rank.channel.watch(self._events, rank)
        try:
            self._pidfds[worker] = os.pidfd_open(rank.pid)
            self._events.register(self._pidfds[worker], selectors.EVENT_READ, worker)
        except (OSError, AttributeError):  # A sandbox may lack pidfd. Without it, the agent polls for exits.
            self._poll_s = _POLL_WITHOUT_PIDFD_S

    def ask_to_end(self, worker: int) -> None:
        """Send SIGTERM to the process group of a rank, given by its worker number."""
        self._ranks[worker].ask_to_end()

    def kill(self, worker: int) -> None:
        """Kill all processes of the session of a rank, given by its worker number."""
        self._ranks[worker].kill()

    def send_to_rank(self, worker: int, message: ToRank) -> None:
        """Send a message to a rank. Ignored if the rank has exited."""
        if (rank := self._ranks.get(worker)) is not None:
            rank.channel.send(message)

    def send_to_driver(self, message: FromAgent) -> None:
        """Send a message to the driver (launcher process)."""
        self._driver.send(message)

    def _reap(self, rank: RankProcess) -> None:
        self._receive_from_rank(rank)  # Process the rank's last messages before its exit is reported.
        if (pidfd := self._pidfds.pop(rank.worker, None)) is not None:
            self._events.unregister(pidfd)
            os.close(pidfd)
        end = rank.reap()
        self._janitor.forget(rank.pid)
        del self._ranks[rank.worker]
        self._rules.rank_ended(rank.worker, end)
        if self._rules.ends:
            rank.drain(KILL_GRACE_S)


def _leave_with_input(arrived: threading.Event) -> None:
    """End this agent process if its standard input is closed before the agent has connected to the driver.

    The driver (launcher process) closes this input when it gives up the agent, or when it exits.
    """
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    if not arrived.wait(ALONE_S):
        os._exit(1)


@dataclass(frozen=True, slots=True)
class _AgentRequirements:
    """Fields of an agent's configuration (`AgentConfig`) that every Sirtaki version can decode.

    The agent compares versions before it decodes the other fields.
    """

    need: Need


def main() -> int:
    """Run the agent, which starts the ranks on this host. Returns exit code 1 if this host cannot be used or the driver
    (launcher process) cannot be reached.
    """
    line = sys.stdin.buffer.readline()
    # Check versions before decoding the rest, because another version may use other fields.
    if problem := problem_here(msgspec.json.decode(line, type=_AgentRequirements).need):
        print(f"{PROBLEM}{problem}", file=sys.stderr, flush=True)
        return 1
    config = msgspec.json.decode(line, type=AgentConfig)
    with contextlib.suppress(OSError):
        os.chdir(config.need.folder)
    arrived = threading.Event()
    threading.Thread(target=_leave_with_input, args=[arrived], name="input-watch", daemon=True).start()
    try:
        driver = reach_driver(config.places, proof=config.proof, number=config.number)
    except CommError as err:
        print(f"{PROBLEM}{err}", file=sys.stderr)
        return 1
    arrived.set()
    Agent(config, driver).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
