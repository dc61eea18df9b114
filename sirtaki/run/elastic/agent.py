"""The parent of the ranks of one host: `python -m sirtaki.run.elastic.agent`, started by the driver.

Where the driver is lost an agent starts another one, and all others find it.
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

from sirtaki.comm.control.mesh_rendezvous import connect, job_key, listen
from sirtaki.comm.control.waiting import Deadline, retry
from sirtaki.engine.json_channel import JsonChannel
from sirtaki.engine.launchers import AGENT
from sirtaki.engine.membership import Dismissal, Finished, Formed, FromRank, Join, Patience, Proof, ToRank
from sirtaki.errors import CommError
from sirtaki.machine import LOOPBACK, own_addresses

from ..host_check import PROBLEM, Need, problem_here
from ..leftovers import Janitor, kill, session_members
from ..rank_channel import PATTERN, UNFINISHED, Event, Message
from .job_members import (
    KILL_GRACE_S,
    NO_GENERATION,
    Agents,
    Beat,
    EndAll,
    Ended,
    Form,
    FromAgent,
    KillRank,
    KnownAgents,
    Phase,
    Place,
    Policy,
    RankEnd,
    Relay,
    Relayed,
    Settle,
    StartRank,
    ToAgent,
    Told,
    Up,
    Worker,
)

BEAT_S = 2.0
"""How often agent and driver tell each other that they are there."""

DRIVER_SILENT_S = 60.0
"""After which a driver is given up: it may have been stopped for a while by its terminal."""

DRIVER_WANTED_S = 30.0
"""The same where ranks that have trained wait for it to tell who goes on: its host may be lost with some of theirs."""

LEAVE_GRACE_S = 30.0
"""As `KILL_GRACE_S`, where SIGTERM ends the job and its ranks write a checkpoint with their next commit."""


def end_grace_s(number: int | None, environ: Mapping[str, str]) -> float:
    """How long ranks in `environ` may take to end because of a signal, if it is one."""
    writes = number == signal.SIGTERM and environ.get("SIRTAKI_CHECKPOINT_DIR")
    return LEAVE_GRACE_S if writes else KILL_GRACE_S


# ── what an agent does about what it hears: without sockets, processes or a clock ────────────────────────────────────


class AgentActions(Protocol):
    """Carries out what the rules decide: processes and connections of a real, a simulated or Ray's host."""

    def start_rank(self, worker: int, slot: int) -> None:
        """Starts a process; OSError if it cannot."""
        ...

    def ask_to_end(self, worker: int) -> None:
        """Asks a rank to end, with SIGTERM."""
        ...

    def kill(self, worker: int) -> None:
        """Kills a rank at once; its end is told as any other's."""
        ...

    def tell_rank(self, worker: int, message: ToRank) -> None:
        """Nothing happens if it is gone."""
        ...

    def tell_driver(self, message: FromAgent) -> None:
        """What is told to a driver that is gone is dropped."""
        ...


class AgentRules:
    """Decides what the agent of one host does about each message and each end of a rank.

    Attributes:
        ranks: that are there, by worker.
        agents: as the driver has told last, this one too.
        ends: no rank is to be left, nor this agent.
    """

    def __init__(self, actions: AgentActions, *, host: str, proof: Proof, now_s: float) -> None:
        self._actions, self._host, self._proof = actions, host, proof
        self.ranks: dict[int, Worker] = {}
        self._kill_at_s: dict[int, float] = {}
        self._patience_s = 0.0
        self.agents: Agents = []
        self.ends = False
        self._generation = NO_GENERATION
        self._heard_s = self._beat_s = self._looked_s = now_s

    def meet_driver(self, places: Sequence[Place], now_s: float) -> None:
        """There is a driver: it hears all that one has to know that knows nothing of this agent.

        Args:
            places: where a driver would listen that this agent has started.
            now_s: the time.
        """
        self._heard_s = now_s
        up = Up(
            host=self._host,
            places=places,
            ranks=[*map(replace, self.ranks.values())],  # copies: they change before they are heard
            patience_s=self._patience_s,
            generation=self._generation,
        )
        self._actions.tell_driver(up)

    def end(self, now_s: float, *, grace_s: float = KILL_GRACE_S) -> None:
        """Ends all ranks; the agent is to follow.

        Args:
            now_s: the time.
            grace_s: after which ranks are killed that train and have not ended themselves.
        """
        self.ends = True
        for worker, there in self.ranks.items():
            if worker not in self._kill_at_s:
                self._kill_at_s[worker] = now_s + (grace_s if there.phase is Phase.MEMBER else KILL_GRACE_S)
                self._actions.ask_to_end(worker)

    def tick(self, now_s: float) -> bool:
        """Time has passed, to be told at least twice a second; False = the driver is to be given up."""
        for worker, at_s in list(self._kill_at_s.items()):
            if now_s >= at_s:
                self._actions.kill(worker)
        if now_s - self._looked_s > DRIVER_SILENT_S / 2:
            self._heard_s = now_s  # this process was stopped, or the machine slept
        self._looked_s = now_s
        if now_s - self._beat_s > BEAT_S:
            self._beat_s = now_s
            self._actions.tell_driver(Beat())
        is_wanted = any(there.phase is Phase.WAITING and there.generation for there in self.ranks.values())
        return now_s - self._heard_s <= (DRIVER_WANTED_S if is_wanted else DRIVER_SILENT_S)

    def hear_driver(self, message: ToAgent, now_s: float) -> None:
        """It wants something done; what concerns ranks that are not here does not concern this agent."""
        self._heard_s, act = now_s, self._actions
        match message:
            case StartRank(worker=worker, slot=slot):
                try:
                    act.start_rank(worker, slot)
                except OSError as err:
                    act.tell_driver(Ended(worker=worker, end=RankEnd(exit_code=127, reason=str(err))))
                else:
                    self.ranks[worker] = Worker(number=worker, host=self._host, slot=slot)
            case KillRank(worker=worker, at_once=at_once) if worker in self.ranks:
                self._kill_at_s[worker] = now_s + (0.0 if at_once else KILL_GRACE_S)
                (act.kill if at_once else act.ask_to_end)(worker)
            case KnownAgents(agents):
                self.agents = agents
            case Form():
                self._generation = msgspec.structs.replace(message, members=(), attendees=(), older=message.older or ())
                for rank, worker in enumerate(message.workers):
                    if (there := self.ranks.get(worker)) is not None:
                        there.phase, there.generation, there.rank = Phase.MEMBER, message.number, rank
                        formed = Formed(
                            number=message.number,
                            rank=rank,
                            members=message.members,
                            attendees=message.attendees,
                            proof=self._proof,
                        )
                        act.tell_rank(worker, formed)
                if message.older is not None:
                    act.tell_driver(Told(message.number))
            case Settle(number=number, older=older) if number == self._generation.number:
                self._generation = msgspec.structs.replace(self._generation, older=older)
            case Relay(workers, told):
                for worker in self.ranks.keys() & set(workers):
                    if isinstance(told, Dismissal):
                        self.ranks[worker].phase = Phase.DISMISSED
                    act.tell_rank(worker, told)
            case EndAll(grace_s):
                self.end(now_s, grace_s=grace_s)

    def hear_rank(self, worker: int, message: FromRank) -> None:
        """It asks for something."""
        there = self.ranks[worker]
        match message:
            case Join(has_state=has_state, attendee=attendee):
                there.phase, there.has_state, there.attendee = Phase.WAITING, has_state, attendee
                if self.ends:  # there will be nobody to train with
                    self._actions.kill(worker)
            case Patience(seconds):
                self._patience_s = max(self._patience_s, seconds)
            case Finished():
                there.phase = Phase.FINISHED
        self._actions.tell_driver(Relayed(worker, message))

    def rank_ended(self, worker: int, end: RankEnd) -> None:
        """A process is there no more."""
        del self.ranks[worker]
        self._kill_at_s.pop(worker, None)
        self._actions.tell_driver(Ended(worker=worker, end=end))


# ── how agents find a driver ─────────────────────────────────────────────────────────────────────────────────────────

CONNECT_S = 20.0
"""How long to try to reach a driver that is there, or is about to be."""

CANDIDATE_S = 6.0
"""How long to try to reach an agent that may be the next driver."""

DRIVER = 0
"""The driver's number in the handshake; agents count from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticJob:
    """A job as its launcher has decided it: what its drivers and agents are told.

    Attributes:
        command: what each rank runs.
        script: the file among its words that must be there; "" = none.
        carried: variables that ranks elsewhere get.
        interface: network interface that joins the hosts; None = any.
        one_host: there will never be a host besides this one.
        agent_command: starts an agent, a command with `{host}` and `{command}`; "" = ssh, or srun.
        slurm_hosts: those of the allocation that the launcher runs in.
        ssh: arguments for ssh.
        agent_start_s: how long an agent may take to connect.
        policy: rules of membership.
        discovery: script that prints the hosts; "" = they stay.
        slots: of a host that the script gives no number for.
        hosts: those that stay.
        prefix: console lines begin with the rank.
        timestamps: and with the time.
        folder: also write one file a place and stream below it; None = console only.
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
        """Where drivers of it listen on this host."""
        return [LOOPBACK, *([] if self.one_host else own_addresses(self.interface))]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What an agent is told on its standard input, as a line of JSON.

    Attributes:
        need: what its host must have; ranks run in its folder.
        host: as the job calls it.
        number: of the agent; no other one of the job has had it.
        places: where the driver listens.
        proof: with which the job's processes prove themselves.
        environ: what is added to this process's environment for ranks.
        job: that it serves.
    """

    need: Need
    host: str
    number: int
    places: tuple[Place, ...]
    proof: Proof
    environ: Mapping[str, str]
    job: ElasticJob


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverEndpoint:
    """Where agents reach a driver, and how they prove themselves: made by the first driver, passed on to the next.

    Attributes:
        proof: name and secret of the job.
        listeners: descriptors of the sockets at which agents look for it.
        agents: numbers of those that should come.
        numbers: of agents, that have been given.
    """

    proof: Proof
    listeners: tuple[int, ...]
    agents: tuple[int, ...] = ()
    numbers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """What a driver is told, as JSON on its standard input, that an agent starts in the place of a lost one.

    Attributes:
        job: of the lost one.
        environ: what is added to the agent's environment for ranks.
        endpoint: its own.
    """

    job: ElasticJob
    environ: Mapping[str, str]
    endpoint: DriverEndpoint


def agents_key(proof: Proof) -> bytes:
    """With which agents and driver prove themselves; ranks of a generation have other ones."""
    return job_key(proof.secret, f"{proof.job}/agents")


def reach_driver(places: Sequence[Place], *, proof: Proof, number: int, timeout_s: float = CONNECT_S) -> socket.socket:
    """A connection to the driver, at the first of its places that answers.

    Raises:
        CommError: none does.
    """

    def reach() -> socket.socket:
        problem = "it listens nowhere"
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
            f"the driver cannot be reached at {tried} ({err}); name the interface with --network-interface"
        ) from err
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def candidates(agents: Agents, own: int) -> Iterator[tuple[int, Sequence[Place], float]]:
    """Agents at which one looks for the next driver, one after the other: number, places, and for how long.

    Args:
        agents: as the lost driver has told last.
        own: number of the one that looks; when it is its own turn, it is for it to start the driver.
    """
    for number, places in sorted(agents):
        yield number, places, CONNECT_S if number == own else CANDIDATE_S


def expected_by_successor(agents: Agents, own: int) -> tuple[int, ...]:
    """Numbers of agents that come to a driver that `own` starts: they have not tried to start one before."""
    return tuple(number for number, _ in agents if number >= own)


class Succession:
    """Finds an agent another driver when its own is lost, and starts that driver where it is this agent's turn."""

    def __init__(self, config: AgentConfig) -> None:
        """Opens the port.

        Raises:
            OSError: it cannot.
        """
        self._config = config
        self._listeners = listen(config.job.addresses)
        self._driver: subprocess.Popen[bytes] | None = None

    @property
    def places(self) -> list[Place]:
        """Where a driver would listen that this agent has started."""
        return [listener.getsockname()[:2] for listener in self._listeners]

    def find_driver(self, agents: Agents) -> socket.socket | None:
        """Blocks, up to some seconds for each agent that is gone; None = there is none.

        Args:
            agents: as the driver has told last.
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
        """Closes the port; a driver that this agent has started ends by itself, and is waited for."""
        for listener in self._listeners:
            listener.close()
        if self._driver is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._driver.wait(10.0)

    def _start_driver(self, agents: Agents) -> None:
        if self._driver is not None and self._driver.poll() is None:
            return  # it goes on, and has done without this agent, which was stopped meanwhile
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
        assert self._driver.stdin is not None  # a pipe
        with contextlib.suppress(OSError), self._driver.stdin as stdin:
            stdin.write(msgspec.json.encode(inheritance))


# ── the process ──────────────────────────────────────────────────────────────────────────────────────────────────────

_LONGEST_LINE = 65536
_LAST_WORDS_S = 1.0
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
        self.channel: JsonChannel[FromRank] = JsonChannel(own, FromRank)
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
        kill(session_members({self.pid}))

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
                rest = memoryview(head + line if line else b"")
                with _writing, contextlib.suppress(OSError):  # at once; what nobody reads any more is dropped
                    while rest:
                        rest = rest[os.write(sink, rest) :]

    def _note(self, found: re.Match[bytes]) -> bytes:
        """What the rank says about itself: its reason is kept, and whose error it is is written into it."""
        message = Message.decode(found)
        if message.event is Event.FAILED:
            self._reason = message.reason
        return replace(message, rank=self.worker).encode().encode()


ALONE_S = 3.0
"""How much longer an agent looks for its driver once its standard input has ended."""

_POLL_S = 0.5
_POLL_WITHOUT_PIDFD_S = 0.05


class Agent:
    """Starts and ends ranks as the driver says, and passes on what they ask and what they are told."""

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
        """Returns when the driver says so, or is gone; no rank is left."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        if self._succession is not None:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of an ssh whose other end is gone
        while not self._rules.ends or self._ranks:
            self._look()
        self._driver.close()
        if self._succession is not None:
            self._succession.close()
        self._janitor.dismiss()

    def _meet(self, driver: socket.socket) -> None:
        self._driver: JsonChannel[ToAgent] = JsonChannel(driver, ToAgent)
        self._driver.watch(self._events, self._driver)
        self._rules.meet_driver([] if self._succession is None else self._succession.places, time.monotonic())

    def _lose_driver(self) -> None:
        """Finds another one, or ends."""
        self._driver.close()
        if not self._rules.ends and self._succession is not None:
            self._write_to_file()
            if (found := self._succession.find_driver(self._rules.agents)) is not None:
                self._meet(found)
                return
        self._end()

    def _write_to_file(self) -> None:
        """Nobody reads any more what this process and its ranks write."""
        with contextlib.suppress(OSError), open(f"sirtaki-{self._config.host}.log", "ab") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)

    def _end(self, number: int | None = None, frame: FrameType | None = None) -> None:
        del frame
        environ = {**os.environ, **self._config.environ}
        self._rules.end(time.monotonic(), grace_s=end_grace_s(number, environ))

    def _look(self) -> None:
        """Waits for something to happen, and sees to it."""
        for chosen, _ in self._events.select(self._poll_s):
            if chosen.data is self._driver:
                self._hear_driver()
            elif isinstance(chosen.data, RankProcess) and chosen.data.worker in self._ranks:
                self._hear_rank(chosen.data)
        for rank in [rank for rank in self._ranks.values() if rank.has_ended()]:
            self._bury(rank)
        has_driver = self._rules.tick(time.monotonic())
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
        try:
            messages = rank.channel.receive()
        except ConnectionError:  # it has closed the socket, or is about to be found dead
            rank.channel.close()
            return
        for message in messages:
            self._rules.hear_rank(rank.worker, message)

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
        rank = RankProcess(worker, config.job.command, environ, hosts="one" if config.job.one_host else "many")
        self._ranks[worker] = rank
        self._janitor.watch(rank.pid)
        rank.channel.watch(self._events, rank)
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

    def tell_rank(self, worker: int, message: ToRank) -> None:
        """Sends the message to a rank."""
        if (rank := self._ranks.get(worker)) is not None:
            rank.channel.send(message)

    def tell_driver(self, message: FromAgent) -> None:
        """Sends the message to the driver."""
        self._driver.send(message)

    def _bury(self, rank: RankProcess) -> None:
        self._hear_rank(rank)  # its last words
        if (pidfd := self._pidfds.pop(rank.worker, None)) is not None:
            self._events.unregister(pidfd)
            os.close(pidfd)
        end = rank.bury()
        self._janitor.forget(rank.pid)
        del self._ranks[rank.worker]
        self._rules.rank_ended(rank.worker, end)
        if self._rules.ends:
            rank.drain(KILL_GRACE_S)


def _leave_with_input(arrived: threading.Event) -> None:
    """Ends this process where its starter has gone before it has found the driver."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    if not arrived.wait(ALONE_S):
        os._exit(1)


@dataclass(frozen=True, slots=True)
class _Needing:
    """Of what an agent is told what any version understands."""

    need: Need


def main() -> int:
    """The agent's process; its exit code says whether it has come as far as to be used."""
    line = sys.stdin.buffer.readline()
    if problem := problem_here(msgspec.json.decode(line, type=_Needing).need):  # before the rest is understood
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
