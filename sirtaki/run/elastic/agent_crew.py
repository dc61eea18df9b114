"""The agents of an elastic job as its driver has them: started, connected, heard, given up."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Generic, TypeVar

import msgspec

from sirtaki.comm.control.mesh_rendezvous import Door, listen
from sirtaki.engine.membership import Proof
from sirtaki.errors import ConfigError, LaunchError
from sirtaki.json_channel import JsonChannel, encoded

from ..host_check import PROBLEM, Need, versions_here
from ..hosts import OPTIONS, Host, remedy
from .agent import DRIVER, AgentConfig, DriverEndpoint, ElasticJob, agents_key, end_grace_s
from .job_members import Beat, EndAll, FromAgent, Heard, KnownAgents, Lost, Place, ToAgent, Up

AGENT_SILENT_S = 10.0
"""After which the agent of a host, and its ranks with it, are given up."""

REMEMBERED_S = 120.0
"""How long the others are told of an agent that is lost: it may live beyond a network that has come apart, and they
must find each other where it is this driver that has to end."""


class AgentRecord:
    """What is known of an agent, of another driver's as long as it is no `StartedAgent`.

    Attributes:
        host: "" = not known yet.
        number: names it in the job.
        channel: to it, None until it has proved itself.
        started_s: when it was.
        heard_s: when something has come from it last.
        places: where a driver would listen that it has started.
    """

    def __init__(self, host: str, number: int, *, now_s: float, problem: str = "") -> None:
        self.host, self.number, self._problem = host, number, problem
        self.channel: JsonChannel[FromAgent] | None = None
        self.started_s = self.heard_s = now_s
        self.places: Sequence[Place] = ()

    def why_ended(self) -> str:
        """Why the program that starts it has ended before the agent has come; "" = it runs, or nobody knows."""
        return self._problem

    def disconnect(self) -> None:
        """The agent ends its ranks and itself as soon as it notices."""
        if self.channel is not None:
            self.channel.close()

    def wait(self, timeout_s: float, *, kills: bool = True) -> None:
        """Until it has closed the connection, at most so long; `kills` is for those that this process has started."""
        deadline_s = time.monotonic() + timeout_s
        with contextlib.suppress(ConnectionError):
            while self.channel is not None and self.channel.fileno() >= 0 and time.monotonic() < deadline_s:
                self.channel.receive()
                time.sleep(0.05)
        self.disconnect()


class AgentList:
    """The agents that a driver counts on, with the rules for when one is given up.

    Attributes:
        agents: by host; who is given up is not among them.
        expected: numbers of those that another driver has started and that have not come yet.
        adopts: any other one of the job may come, too: the lost driver may have given it up.
    """

    def __init__(self, *, expected: Iterable[int], numbers: int, start_s: float, tells: bool, now_s: float) -> None:
        """Has no agent yet.

        Args:
            expected: numbers of those that another driver has started.
            numbers: of agents, that have been given.
            start_s: how long an agent may take to connect.
            tells: agents are told of each other, since one of them may start the next driver.
            now_s: the time.
        """
        self.agents: dict[str, AgentRecord] = {}
        self.expected = set(expected)
        self.adopts = bool(self.expected)
        self._numbers, self._start_s, self._tells = numbers, start_s, tells
        self._looked_s = now_s
        self._remembered: list[tuple[float, AgentRecord]] = []

    @property
    def hosts(self) -> list[str]:
        """Hosts of agents that have not been given up."""
        return list(self.agents)

    def next_number(self) -> int:
        """For an agent that is about to be started."""
        self._numbers += 1
        return self._numbers

    def expect_no_more(self) -> None:
        """Who has not come yet comes too late."""
        self.expected.clear()
        self.adopts = False

    def wants(self, number: int) -> bool:
        """Whether the agent of this number may come; one that was given up looks for a driver elsewhere."""
        return self.adopts or self.awaited(number) is not None

    def awaited(self, number: int) -> AgentRecord | None:
        """That of this number which has not come yet; None = there is none."""
        return next((each for each in self.agents.values() if each.number == number and each.channel is None), None)

    def hear(self, agent: AgentRecord, message: FromAgent, now_s: float) -> Heard | None:
        """An agent has said that; None = nothing for others."""
        agent.heard_s = now_s
        match message:
            case Beat():
                self.send_to([agent.host], message)
                return None
            case Up(host=host, places=places):
                agent.places = places
                if not agent.host:
                    self.expected.discard(agent.number)
                    self._numbers = max(self._numbers, agent.number)
                    agent.host, self.agents[host] = host, agent
        return Heard(agent.host, message) if agent.host else None

    def send_to(self, hosts: Iterable[str], message: ToAgent) -> None:
        """Sends the message to the agents of these hosts; nothing happens where there is none."""
        text = encoded(message)
        for host in hosts:
            agent = self.agents.get(host)
            if agent is not None and agent.channel is not None:
                agent.channel.send(text)

    def tell_each_other(self) -> None:
        """Lets all agents know who may be the next driver."""
        if self._tells:
            known = (*self.agents.values(), *(agent for _, agent in self._remembered))
            self.send_to(self.agents, KnownAgents([(agent.number, agent.places) for agent in known if agent.places]))

    def tick(self, now_s: float) -> Iterator[Lost]:
        """Those that have not come, or say nothing any more."""
        if now_s - self._looked_s > AGENT_SILENT_S / 2:  # this process was stopped, or the machine slept
            for agent in self.agents.values():
                agent.heard_s = now_s
        self._looked_s = now_s
        self._remembered = [(until_s, agent) for until_s, agent in self._remembered if now_s < until_s]
        for agent in list(self.agents.values()):
            if agent.channel is not None:
                if now_s - agent.heard_s > AGENT_SILENT_S:
                    yield from self.lose(agent, now_s, f"it has been silent for {AGENT_SILENT_S:g} s")
            elif why := agent.why_ended():
                yield from self.lose(agent, now_s, why)
            elif now_s - agent.started_s > self._start_s:
                yield from self.lose(agent, now_s, f"its agent has not answered within {self._start_s:g} s")

    def lose(self, agent: AgentRecord, now_s: float, why: str = "its agent is gone") -> Iterator[Lost]:
        """An agent is gone; nothing if it had been given up, or has never said its host."""
        is_known = self.agents.get(agent.host) is agent
        self._release(agent)
        if is_known:
            self._remembered.append((now_s + REMEMBERED_S, agent))
            yield Lost(agent.host, why)

    def stop(self, host: str) -> None:
        """The agent of that host is to end; nothing that it says counts any more."""
        if (agent := self.agents.get(host)) is not None:
            if agent.channel is not None:
                agent.channel.send(EndAll())
            self._release(agent)

    def _release(self, agent: AgentRecord) -> None:
        """Without a word, since it may be this side that has to end; an agent without a driver ends, or finds one."""
        if self.agents.get(agent.host) is agent:
            del self.agents[agent.host]
        agent.disconnect()


def is_child(job: ElasticJob, host: str) -> bool:
    """Whether the agent runs on this machine, and inherits its environment."""
    return not job.agent_command and Host(name=host, slots=1).is_local


def agent_words(job: ElasticJob, host: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The command line that starts the agent of a host; the agent reads from its standard input.

    Raises:
        ConfigError: the user's command has no place for the agent's.
    """
    agent = [sys.executable, "-m", "sirtaki.run.elastic.agent"]
    if is_child(job, host):
        return agent
    if path := environ.get("PYTHONPATH"):
        agent = ["env", f"PYTHONPATH={path}", *agent]
    if job.agent_command:
        if "{command}" not in job.agent_command:
            raise ConfigError(
                f"--agent-command {job.agent_command!r} has no {{command}}; write for example "
                "'kubectl exec -i {host} -- {command}'"
            )
        # `{command}` as a word of its own becomes the agent's words, within a word their quoted form.
        words = [
            agent if word == "{command}" else [word.replace("{host}", host).replace("{command}", shlex.join(agent))]
            for word in shlex.split(job.agent_command)
        ]
        return [*itertools.chain(*words)]
    if host in job.slurm_hosts:
        # All that the job has there, whatever the site or the batch script has set for tasks of its own.
        place = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--mpi=none", "--export=ALL"]
        unbound = ["--cpu-bind=none"] if "SLURM_CPU_BIND" in environ else []
        return ["srun", *place, *unbound, "--unbuffered", *agent]
    return ["ssh", *OPTIONS, *job.ssh, host, f"exec {shlex.join(agent)}"]


def new_endpoint(addresses: Sequence[str]) -> DriverEndpoint:
    """Opens the ports of a job's first driver at these addresses, and gives the job a name and a secret.

    Raises:
        LaunchError: it cannot listen.
    """
    try:
        listeners = tuple(listener.detach() for listener in listen(addresses))
    except OSError as err:
        raise LaunchError(f"the launcher cannot listen at {', '.join(addresses)}: {err}") from err
    return DriverEndpoint(proof=Proof(job=secrets.token_hex(8), secret=secrets.token_hex(32)), listeners=listeners)


Speaker = TypeVar("Speaker")


class Switchboard(Generic[Speaker]):
    """What a driver waits for: those who speak to it, newcomers at the ports where it listens, its own other threads.

    Attributes:
        events: where the channel of a speaker is watched, with the speaker as the data.
    """

    def __init__(self, endpoint: DriverEndpoint, *, is_wanted: Callable[[int], bool]) -> None:
        """Listens at the ports that it inherits, which become its own; `is_wanted` says of a number who is let in."""
        self.events = selectors.DefaultSelector()
        listeners = [socket.socket(fileno=descriptor) for descriptor in endpoint.listeners]
        key = agents_key(endpoint.proof)
        self._door = Door(listeners, key=key, own=DRIVER, events=self.events, is_wanted=is_wanted)
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self.events.register(self._woken, selectors.EVENT_READ)

    @property
    def places(self) -> list[Place]:
        """Where it listens."""
        return self._door.places

    def wake(self) -> None:
        """From any thread: `look` returns."""
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def look(self, timeout_s: float, welcome: Callable[[int, socket.socket], None]) -> Iterator[Speaker]:
        """Waits for something to happen, at most so long; those who may be heard now.

        Args:
            timeout_s: at most so long.
            welcome: is given the number and the connection of each newcomer that has proved itself.
        """
        for chosen, _ in self.events.select(timeout_s):
            if chosen.fileobj is self._woken:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            elif chosen.data is self._door:
                if (found := self._door.advance(chosen.fd)) is not None:
                    found[1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    welcome(*found)
            else:
                yield chosen.data
        self._door.drop_late()

    def close(self) -> None:
        """Listens no more; connections are their speakers'."""
        self._door.close()
        self.events.close()
        for end in (self._woken, self._waker):
            end.close()


Pump = Callable[[str, Iterable[bytes]], None]
"""Shows all lines of "stdout" or "stderr", as they come."""


class StartedAgent(AgentRecord):
    """One agent from its start to its end; used once."""

    def __init__(
        self,
        host: str,
        number: int,
        words: Sequence[str],
        environ: Mapping[str, str],
        config: bytes,
        pump: Pump,
    ) -> None:
        """Starts it.

        Args:
            host: its host.
            number: names it in the job.
            words: the command line.
            environ: of the command.
            config: what the agent is told, a line.
            pump: shows its output; called in a thread for each stream.

        Raises:
            OSError: the command cannot be run.
        """
        super().__init__(host, number, now_s=time.monotonic())
        self._program = os.path.basename(words[0])
        self._process = subprocess.Popen(
            words,
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C comes to the driver alone
        )
        assert self._process.stdout is not None  # pipes
        assert self._process.stderr is not None
        streams = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        self._pumps = [
            threading.Thread(target=self._pump, args=[pump, *each], name=f"pump-{host}-{each[0]}", daemon=True)
            for each in streams.items()
        ]
        for thread in self._pumps:
            thread.start()
        assert self._process.stdin is not None  # a pipe
        with contextlib.suppress(OSError):  # it has ended already, which is found soon
            self._process.stdin.write(config)
            self._process.stdin.flush()

    def _pump(self, pump: Pump, name: str, stream: IO[bytes]) -> None:
        with stream:
            pump(name, stream if name == "stdout" else filter(self._is_shown, stream))

    def _is_shown(self, line: bytes) -> bool:
        """Whether a line of standard error does not say why the agent does not come, which is kept."""
        text, problem = line.decode(errors="replace"), ""
        if self.channel is None and text.startswith(PROBLEM):
            problem = text.removeprefix(PROBLEM).strip()
        elif self.channel is None and self._program == "ssh":
            found = remedy(text, host=self.host, python=sys.executable)
            problem = f"{text.strip().rstrip('.')}: {found}" if found else ""
        self._problem = problem or self._problem
        return not problem

    def why_ended(self) -> str:
        """What the last lines of the command say of the problem, or else its exit code; "" while it runs."""
        if (code := self._process.poll()) is None:
            return ""
        self._pumps[1].join(1.0)  # its last words
        return self._problem or f"{self._program} ended with exit code {code}"

    def disconnect(self) -> None:
        """Closes the connection and the command's input, so that the agent ends its ranks and itself."""
        super().disconnect()
        with contextlib.suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def wait(self, timeout_s: float, *, kills: bool = True) -> None:
        """For its end and its output, at most so long; then the command is killed, if it is to be."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, timeout_s))
        self.disconnect()
        if self._process.poll() is None and not kills:
            return
        if self._process.poll() is None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1.0)
        for pump in self._pumps:
            pump.join(1.0)


class AgentCrew(AgentList):
    """All agents, one a host."""

    def __init__(
        self,
        job: ElasticJob,
        endpoint: DriverEndpoint,
        pump: Pump,
        environ: Mapping[str, str],
    ) -> None:
        """Has none yet.

        Args:
            job: of the driver.
            endpoint: where it listens, and who may come.
            pump: shows the output of agents.
            environ: of the ranks on this machine.
        """
        super().__init__(
            expected=endpoint.agents,
            numbers=endpoint.numbers,
            start_s=job.agent_start_s,
            tells=job.policy.has_successors,
            now_s=time.monotonic(),
        )
        self._job, self._proof, self._pump, self._environ = job, endpoint.proof, pump, environ
        self._board: Switchboard[AgentRecord] = Switchboard(endpoint, is_wanted=self.wants)
        self._leaving: list[AgentRecord] = []

    def wake(self) -> None:
        """From any thread: `look` returns."""
        self._board.wake()

    def start(self, host: str) -> None:
        """Starts the agent of a host; it is heard once it is up, or lost where its command cannot be run."""
        job, number, places = self._job, self.next_number(), self._board.places
        here = is_child(job, host)
        need = Need(
            folder=os.getcwd(),
            script=job.script,
            interfaces=tuple(job.interface.split(",")) if job.interface else (),
            versions=versions_here(),
        )
        config = AgentConfig(
            need=need,
            host=host,
            number=number,
            places=tuple(places if here else places[1:] + places[:1]),
            proof=self._proof,
            environ={} if here else job.carried,
            job=job,
        )
        words, line = agent_words(job, host, self._environ), msgspec.json.encode(config) + b"\n"
        try:
            self.agents[host] = StartedAgent(host, number, words, self._environ, line, self._pump)
        except OSError as err:
            problem = f"its agent could not be started: {err}"
            self.agents[host] = AgentRecord(host, number, now_s=time.monotonic(), problem=problem)

    def look(self, timeout_s: float) -> Iterator[Heard | Lost]:
        """Waits for something to happen, at most so long, and says what."""
        for agent in self._board.look(timeout_s, self._welcome):
            yield from self._hear(agent)
        yield from self.tick(time.monotonic())

    def close(self, number: int | None = None) -> None:
        """Has all agents end their ranks and themselves, and waits for it, within limits.

        Args:
            number: the signal that is the reason; None = none is.
        """
        grace_s = end_grace_s(number, self._environ)
        self.send_to(self.agents, EndAll(grace_s))
        for each in self.agents.values():
            if each.channel is None:
                each.disconnect()  # which it will find out by its standard input
        deadline_s = time.monotonic() + grace_s + 2.0
        for agent in self.agents.values():
            agent.wait(deadline_s - time.monotonic())
        for agent in self._leaving:
            # One that was heard, and lost, may have another driver by now: this one was stopped, or cut off.
            agent.wait(
                deadline_s - time.monotonic(), kills=not self._job.policy.has_successors or agent.channel is None
            )
        self._board.close()

    def _welcome(self, number: int, sock: socket.socket) -> None:
        """An agent has proved itself."""
        # The host of one that is adopted is not known before it says it.
        agent = self.awaited(number) or AgentRecord("", number, now_s=time.monotonic())
        agent.channel, agent.heard_s = JsonChannel(sock, FromAgent), time.monotonic()
        agent.channel.watch(self._board.events, agent)

    def _hear(self, agent: AgentRecord) -> Iterator[Heard | Lost]:
        assert agent.channel is not None  # which is why it is heard
        try:
            messages = agent.channel.receive()
        except ConnectionError:
            yield from self.lose(agent, time.monotonic())
            return
        for message in messages:
            if (heard := self.hear(agent, message, time.monotonic())) is not None:
                yield heard

    def _release(self, agent: AgentRecord) -> None:
        self._leaving.append(agent)
        super()._release(agent)
