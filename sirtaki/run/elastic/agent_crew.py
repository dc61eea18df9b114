"""The agents of an elastic job as its driver has them: started, connected, heard, given up."""

from __future__ import annotations

import contextlib
import json
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
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Generic, Protocol, TypeVar

from sirtaki.comm.control.addresses import LOOPBACK, own_addresses
from sirtaki.comm.control.mesh_rendezvous import MAX_UNPROVED, Candidate, listen
from sirtaki.errors import ConfigError, LaunchError
from sirtaki.json_channel import JsonChannel, encoded

from ..host_check import PROBLEM, Need, versions_here
from ..hosts import OPTIONS, Host, remedy
from .agent_rules import end_grace_s
from .succession import DRIVER, agents_key

AGENT_SILENT_S = 10.0
"""After which the agent of a host, and its ranks with it, are given up."""

REMEMBERED_S = 120.0
"""How long the others are told of an agent that is lost: it may live beyond a network that has come apart, and they
must find each other where it is this driver that has to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The agent of a host has said something."""

    host: str
    message: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The agent of a host is given up; it ends its ranks and itself, if it lives, when it finds that out."""

    host: str
    why: str


class Channel(Protocol):
    """A connection to an agent."""

    def send(self, message: Mapping[str, Any]) -> None:
        """What is sent to somebody who is gone is dropped."""
        ...

    def send_encoded(self, text: bytes) -> None:
        """Sends a message that `json_channel.encoded` has made text of."""
        ...

    def close(self) -> None:
        """Ends it; again is harmless."""
        ...


_Channel = TypeVar("_Channel", bound=Channel)


class AgentRecord(Generic[_Channel]):
    """What is known of an agent.

    Attributes:
        host: "" = not known yet.
        number: names it in the job.
        channel: to it, None until it has proved itself.
        program: that has started it.
        started_s: when.
        heard_s: when something has come from it last.
        places: where a driver would listen that it has started.
    """

    def __init__(self, host: str, number: int, *, program: str, now_s: float) -> None:
        self.host, self.number, self.program = host, number, program
        self.channel: _Channel | None = None
        self.started_s = self.heard_s = now_s
        self.places: list[tuple[str, int]] = []

    @property
    def exit_code(self) -> int | None:
        """Of the program; None = it runs, or nobody knows."""
        return None

    def why_ended(self, code: int) -> str:
        """Why the program has ended with this exit code before the agent has come, as far as it is known."""
        return f"{os.path.basename(self.program)} ended with exit code {code}"

    def disconnect(self) -> None:
        """The agent ends its ranks and itself as soon as it notices."""
        if self.channel is not None:
            self.channel.close()


_Agent = TypeVar("_Agent", bound=AgentRecord[Any])  # of whatever channel


class AgentList(Generic[_Agent]):
    """The agents that a driver counts on, with the rules for when one is given up.

    Attributes:
        agents: by host; who is given up is not among them.
        expected: numbers of those that another driver has started and that have not come yet.
        adopts: any other one of the job may come, too: the lost driver may have given it up.
    """

    def __init__(
        self,
        *,
        expected: Iterable[int],
        numbers: int,
        start_s: float,
        tells: bool,
        sent: Callable[[_Agent], None],
        released: Callable[[_Agent], None],
        now_s: float,
    ) -> None:
        """Has no agent yet.

        Args:
            expected: see above.
            numbers: of agents, that have been given.
            start_s: how long an agent may take to connect.
            tells: agents are told of each other, since one of them may start the next driver.
            sent: called after something was sent to an agent.
            released: called when an agent is released, before its connection is closed.
            now_s: the time.
        """
        self.agents: dict[str, _Agent] = {}
        self.expected = set(expected)
        self.adopts = bool(self.expected)
        self._numbers, self._start_s, self._tells = numbers, start_s, tells
        self._sent, self._released = sent, released
        self._looked_s = now_s
        self._remembered: list[tuple[float, _Agent]] = []

    def next_number(self) -> int:
        """For an agent that is about to be started."""
        self._numbers += 1
        return self._numbers

    def started(self, agent: _Agent) -> None:
        """Adds an agent that has been started and is to connect."""
        self.agents[agent.host] = agent

    def close_adoption(self) -> None:
        """Who has not come yet comes too late."""
        self.expected.clear()
        self.adopts = False

    def awaited(self, number: int) -> _Agent | None:
        """That of this number which has not come yet; None = there is none."""
        return next((each for each in self.agents.values() if each.number == number and each.channel is None), None)

    def hear(self, agent: _Agent, message: Mapping[str, Any], now_s: float) -> Heard | None:
        """An agent has said that; None = nothing for others."""
        agent.heard_s = now_s
        match message:
            case {"is": "beat"}:
                self.send(agent.host, {"do": "beat"})
                return None
            case {"is": "up", "host": str(host), "places": list(places)}:
                agent.places = [(address, port) for address, port in places]
                if not agent.host:
                    self.expected.discard(agent.number)
                    self._numbers = max(self._numbers, agent.number)
                    agent.host, self.agents[host] = host, agent
        return Heard(host=agent.host, message=message) if agent.host else None

    def send(self, host: str, message: Mapping[str, Any]) -> None:
        """Sends the message to the agent of a host; nothing happens if there is none."""
        self.send_to([host], message)

    def send_to(self, hosts: Iterable[str], message: Mapping[str, Any]) -> None:
        """Sends the message to the agents of these hosts."""
        text = encoded(message)
        for host in hosts:
            agent = self.agents.get(host)
            if agent is not None and agent.channel is not None:
                agent.channel.send_encoded(text)
                self._sent(agent)

    def tell_each_other(self) -> None:
        """Lets all agents know who may be the next driver."""
        if self._tells:
            known = (*self.agents.values(), *(agent for _, agent in self._remembered))
            agents = [[agent.number, agent.places] for agent in known if agent.places]
            self.send_to(self.agents, {"do": "agents", "agents": agents})

    def tick(self, now_s: float) -> Iterator[Lost]:
        """Those that have not come, or say nothing any more."""
        if now_s - self._looked_s > AGENT_SILENT_S / 2:  # this process was stopped, or the machine slept
            for agent in self.agents.values():
                agent.heard_s = now_s
        self._looked_s = now_s
        self._remembered = [(until_s, agent) for until_s, agent in self._remembered if now_s < until_s]
        for agent in list(self.agents.values()):
            if agent.channel is None and (code := agent.exit_code) is not None:
                yield from self.lose(agent, now_s, agent.why_ended(code))
            elif agent.channel is None and now_s - agent.started_s > self._start_s:
                yield from self.lose(agent, now_s, f"its agent has not answered within {self._start_s:g} s")
            elif agent.channel is not None and now_s - agent.heard_s > AGENT_SILENT_S:
                yield from self.lose(agent, now_s, f"it has been silent for {AGENT_SILENT_S:g} s")

    def lose(self, agent: _Agent, now_s: float, why: str = "its agent is gone") -> Iterator[Lost]:
        """An agent is gone; nothing if it had been given up, or has never said its host."""
        is_known = self.agents.get(agent.host) is agent
        self._release(agent)
        if is_known:
            self._remembered.append((now_s + REMEMBERED_S, agent))
            yield Lost(host=agent.host, why=why)

    def stop(self, agent: _Agent) -> None:
        """It is to end; nothing that it says counts any more."""
        if agent.channel is not None:
            agent.channel.send({"do": "end"})
        self._release(agent)

    def _release(self, agent: _Agent) -> None:
        """Without a word, since it may be this side that has to end; an agent without a driver ends, or finds one."""
        if self.agents.get(agent.host) is agent:
            del self.agents[agent.host]
        self._released(agent)
        agent.disconnect()


_AGENT = ("-m", "sirtaki.run.elastic.agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStart:
    """How the agent of a host is started, as far as the user has said.

    Attributes:
        template: a command with `{host}` and `{command}`; "" = ssh, or srun.
        slurm_hosts: those of the allocation that this process runs in.
        ssh: arguments for ssh.
    """

    template: str = ""
    slurm_hosts: frozenset[str] = frozenset()
    ssh: tuple[str, ...] = ()

    def is_child(self, host: str) -> bool:
        """The agent runs on this machine, and inherits its environment."""
        return not self.template and Host(name=host, slots=1).is_local

    def words(self, host: str, environ: Mapping[str, str] = os.environ) -> list[str]:
        """The command line; the agent reads from its standard input.

        Raises:
            ConfigError: the template has no place for the command.
        """
        agent = [sys.executable, *_AGENT]
        if self.is_child(host):
            return agent
        if path := environ.get("PYTHONPATH"):
            agent = ["env", f"PYTHONPATH={path}", *agent]
        if self.template:
            return _filled(self.template, host, agent)
        if host in self.slurm_hosts:
            # All that the job has there, whatever the site or the batch script has set for tasks of its own.
            place = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--mpi=none", "--export=ALL"]
            unbound = ["--cpu-bind=none"] if "SLURM_CPU_BIND" in environ else []
            return ["srun", *place, *unbound, "--unbuffered", *agent]
        return ["ssh", *OPTIONS, *self.ssh, host, f"exec {shlex.join(agent)}"]


def _filled(template: str, host: str, agent: Sequence[str]) -> list[str]:
    """`{command}` as a word of its own becomes the agent's words, within a word their quoted form."""
    if "{command}" not in template:
        raise ConfigError(
            f"--agent-command {template!r} has no {{command}}; write for example "
            "'kubectl exec -i {host} -- {command}'"
        )
    words: list[str] = []
    for word in shlex.split(template):
        if word == "{command}":
            words += agent
        else:
            words.append(word.replace("{host}", host).replace("{command}", shlex.join(agent)))
    return words


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticJob:
    """What is to be started.

    Attributes:
        command: what each rank runs.
        script: the file among its words that must be there; "" = none.
        environ: of the ranks on this machine.
        carried: of it, what ranks elsewhere get.
        interface: network interface that joins the hosts; None = any.
        one_host: there will never be a host besides this one.
        agents: how they are started.
        agent_start_s: how long an agent may take to connect.
        successor_config: what a driver needs that takes this one's place; None = there will be none.
    """

    command: tuple[str, ...]
    environ: Mapping[str, str]
    carried: Mapping[str, str]
    interface: str | None
    one_host: bool
    agents: AgentStart
    agent_start_s: float = 60.0
    script: str = ""
    successor_config: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverEndpoint:
    """Where agents reach a driver, and how they prove themselves: made by the first driver, passed on to the next.

    Attributes:
        name, secret: of the job.
        listeners: at which agents look for it.
        agents: numbers of those that should come.
        numbers: of agents, that have been given.
    """

    name: str
    secret: str = field(repr=False)
    listeners: tuple[socket.socket, ...]
    agents: tuple[int, ...] = ()
    numbers: int = 0


def new_endpoint(job: ElasticJob) -> DriverEndpoint:
    """Opens the ports of a job's first driver and gives the job a name and a secret.

    Raises:
        LaunchError: it cannot listen.
    """
    return endpoint_at([LOOPBACK, *([] if job.one_host else own_addresses(job.interface))])


def endpoint_at(addresses: Sequence[str]) -> DriverEndpoint:
    """Opens the ports at these addresses and gives the job a name and a secret.

    Raises:
        LaunchError: it cannot.
    """
    try:
        listeners = tuple(listen(addresses))
    except OSError as err:
        raise LaunchError(f"the launcher cannot listen at {', '.join(addresses)}: {err}") from err
    return DriverEndpoint(name=secrets.token_hex(8), secret=secrets.token_hex(32), listeners=listeners)


class AgentServer:
    """Listens, and tells agents from strangers; it is asked by the driver's selector and never blocks."""

    def __init__(self, listeners: Sequence[socket.socket], *, key: bytes, events: selectors.BaseSelector) -> None:
        """The listeners become its own."""
        self._key, self._events = key, events
        self._listeners = listeners
        self._candidates: dict[int, Candidate] = {}
        for listener in self._listeners:
            listener.setblocking(False)
            events.register(listener, selectors.EVENT_READ, self)

    @property
    def places(self) -> list[tuple[str, int]]:
        """Where it listens."""
        return [listener.getsockname()[:2] for listener in self._listeners]

    def advance(self, descriptor: int) -> tuple[int, JsonChannel] | None:
        """Something has come there: the number of an agent and its connection, once it has proved itself."""
        candidate = self._candidates.get(descriptor)
        if candidate is None:
            self._accept(descriptor)
            return None
        try:
            number = candidate.advance(self._key, DRIVER)
            if number is None:
                return None
            candidate.welcome()
        except OSError:
            self._drop(descriptor)
            return None
        del self._candidates[descriptor]
        self._events.unregister(candidate.sock)
        candidate.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return number, JsonChannel(candidate.sock)

    def drop_late(self) -> None:
        """Closes what has not proved itself in time."""
        now_s = time.monotonic()
        for descriptor in [number for number, each in self._candidates.items() if each.deadline_s < now_s]:
            self._drop(descriptor)

    def close(self) -> None:
        """Listens no more."""
        for descriptor in list(self._candidates):
            self._drop(descriptor)
        for listener in self._listeners:
            with suppress(KeyError, ValueError):
                self._events.unregister(listener)
            listener.close()

    def _accept(self, descriptor: int) -> None:
        for listener in self._listeners:
            if listener.fileno() != descriptor:
                continue
            with suppress(OSError):
                sock, _ = listener.accept()
                sock.setblocking(False)
                if len(self._candidates) >= MAX_UNPROVED:
                    self._drop(next(iter(self._candidates)))
                self._candidates[sock.fileno()] = Candidate(sock)
                self._events.register(sock, selectors.EVENT_READ, self)

    def _drop(self, descriptor: int) -> None:
        gone = self._candidates.pop(descriptor)
        self._events.unregister(gone.sock)
        gone.sock.close()


Speaker = TypeVar("Speaker")


class Switchboard(Generic[Speaker]):
    """The connections of a driver, each with the speaker that is heard through it, and the ports where it listens."""

    def __init__(self, endpoint: DriverEndpoint) -> None:
        """Listens at the ports that it inherits, which become its own."""
        self._events = selectors.DefaultSelector()
        key = agents_key(endpoint.secret, endpoint.name)
        self._server = AgentServer(endpoint.listeners, key=key, events=self._events)
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._events.register(self._woken, selectors.EVENT_READ)

    @property
    def places(self) -> list[tuple[str, int]]:
        """Where it listens."""
        return self._server.places

    def connect(self, channel: JsonChannel, speaker: Speaker) -> None:
        """From now on the speaker is heard."""
        self._events.register(channel, selectors.EVENT_READ, speaker)

    def watch(self, channel: JsonChannel, speaker: Speaker) -> None:
        """Asks for what is needed of a connection just now; nothing happens if it is not connected."""
        if self._events.get_map().get(channel) is not None:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
            self._events.modify(channel, wanted, speaker)

    def disconnect(self, channel: JsonChannel) -> None:
        """It is heard no more; harmless if it is not connected. The channel stays open."""
        with contextlib.suppress(KeyError, ValueError):
            self._events.unregister(channel)

    def wake(self) -> None:
        """From any thread: `look` returns."""
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def look(self, timeout_s: float, welcome: Callable[[int, JsonChannel], None]) -> Iterator[Speaker]:
        """Waits for something to happen, at most so long; those who may be heard now.

        Args:
            timeout_s: see above.
            welcome: is given the number and the connection of each newcomer that has proved itself.
        """
        for chosen, _ in self._events.select(timeout_s):
            if chosen.fileobj is self._woken:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            elif chosen.data is self._server:
                if (found := self._server.advance(chosen.fd)) is not None:
                    welcome(*found)
            else:
                yield chosen.data
        self._server.drop_late()

    def close(self) -> None:
        """Listens no more; connections are their speakers'."""
        self._server.close()
        self._events.close()
        for end in (self._woken, self._waker):
            end.close()


class AgentHandle(AgentRecord[JsonChannel]):
    """One agent from its start to its end; used once."""

    def __init__(
        self,
        host: str,
        number: int,
        words: Sequence[str],
        environ: Mapping[str, str],
        config: bytes,
        pump: Callable[[str, IO[bytes]], None],
    ) -> None:
        """Starts it.

        Args:
            host: its host.
            number: names it in the job.
            words: the command line.
            environ: of the command.
            config: what the agent is told, a line.
            pump: reads a stream ("stdout" or "stderr") to its end, in a thread.

        Raises:
            OSError: the command cannot be run.
        """
        super().__init__(host, number, program=words[0], now_s=time.monotonic())
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
        self._told = _Told(self._process.stderr, self, by_ssh=os.path.basename(words[0]) == "ssh")
        self._pumps = [
            threading.Thread(target=pump, args=[name, stream], name=f"pump-{host}-{name}", daemon=True)
            for name, stream in (("stdout", self._process.stdout), ("stderr", self._told))
        ]
        for thread in self._pumps:
            thread.start()
        assert self._process.stdin is not None  # a pipe
        with contextlib.suppress(OSError):  # it has ended already, which is found soon
            self._process.stdin.write(config)
            self._process.stdin.flush()

    @property
    def exit_code(self) -> int | None:
        """Of the command; None = it runs."""
        return self._process.poll()

    def why_ended(self, code: int) -> str:
        """What the command's last lines say of the problem, or else its exit code."""
        self._pumps[1].join(1.0)  # its last words
        return self._told.problem or super().why_ended(code)

    def disconnect(self) -> None:
        """Closes the connection and the command's input, so that the agent ends its ranks and itself."""
        super().disconnect()
        self._close_input()

    def wait(self, timeout_s: float) -> None:
        """For its end and its output, at most so long; then the command is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, timeout_s))
        self.disconnect()
        if self._process.poll() is None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1.0)
        for pump in self._pumps:
            pump.join(1.0)

    def _close_input(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.close()


class _Told:
    """An agent's standard error without those lines that say why it does not come.

    Attributes:
        problem: what they say, and what to do; "" = nothing.
    """

    def __init__(self, stream: IO[bytes], agent: AgentRecord[JsonChannel], *, by_ssh: bool) -> None:
        self._stream, self._agent, self._by_ssh = stream, agent, by_ssh
        self.problem = ""

    def __enter__(self) -> Iterator[bytes]:
        return iter(self)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the stream."""
        self._stream.close()

    def __iter__(self) -> Iterator[bytes]:
        for line in self._stream:
            problem = self._read(line.decode(errors="replace")) if self._agent.channel is None else ""
            self.problem = problem or self.problem
            if not problem:
                yield line

    def _read(self, line: str) -> str:
        if line.startswith(PROBLEM):
            return line.removeprefix(PROBLEM).strip()
        found = remedy(line, host=self._agent.host, python=sys.executable) if self._by_ssh else ""
        return f"{line.strip().rstrip('.')}: {found}" if found else ""


class AdoptedAgent(AgentRecord[JsonChannel]):
    """One that another driver has started."""

    def __init__(self, number: int) -> None:
        """Its host is not known before it says it."""
        super().__init__("", number, program="its starter", now_s=time.monotonic())

    def wait(self, timeout_s: float) -> None:
        """Until it has closed the connection, at most so long."""
        deadline_s = time.monotonic() + timeout_s
        with contextlib.suppress(ConnectionError):
            while self.channel is not None and self.channel.fileno() >= 0 and time.monotonic() < deadline_s:
                self.channel.receive()
                time.sleep(0.05)
        self.disconnect()


class AgentCrew:
    """All agents, one a host."""

    def __init__(self, job: ElasticJob, endpoint: DriverEndpoint, pump: Callable[[str, IO[bytes]], None]) -> None:
        """Has none yet.

        Args:
            job: of the driver.
            endpoint: where it listens, and who may come.
            pump: shows what an agent writes to "stdout" or "stderr".
        """
        self._job, self._own, self._pump = job, endpoint, pump
        self._board: Switchboard[AgentHandle | AdoptedAgent] = Switchboard(endpoint)
        self._agent_list: AgentList[AgentHandle | AdoptedAgent] = AgentList(
            expected=endpoint.agents,
            numbers=endpoint.numbers,
            start_s=job.agent_start_s,
            tells=job.successor_config is not None,
            sent=self._watch,
            released=self._forget,
            now_s=time.monotonic(),
        )
        self._leaving: list[AgentHandle | AdoptedAgent] = []

    @property
    def hosts(self) -> list[str]:
        """Hosts of agents that have not been given up."""
        return list(self._agent_list.agents)

    @property
    def expected(self) -> set[int]:
        """Numbers of agents that another driver has started and that have not come yet."""
        return self._agent_list.expected

    def expect_no_more(self) -> None:
        """Who has not come yet comes too late."""
        self._agent_list.close_adoption()

    def wake(self) -> None:
        """From any thread: `look` returns."""
        self._board.wake()

    def start(self, host: str) -> None:
        """Starts the agent of a host; it is heard once it is up.

        Raises:
            OSError: its command cannot be run.
        """
        job, number, places = self._job, self._agent_list.next_number(), self._board.places
        is_child = job.agents.is_child(host)
        need = Need(
            folder=os.getcwd(),
            script=job.script,
            interfaces=tuple(job.interface.split(",")) if job.interface else (),
            versions=versions_here(),
        )
        config = {
            "host": host,
            "need": asdict(need),
            "number": number,
            "places": places if is_child else places[1:] + places[:1],
            "secret": self._own.secret,
            "job": self._own.name,
            "command": job.command,
            "environ": {} if is_child else dict(job.carried),
            "folder": os.getcwd(),
            "hosts": "one" if job.one_host else "many",
            "interface": job.interface,
            "successor_config": job.successor_config,
        }
        words, line = job.agents.words(host, job.environ), json.dumps(config).encode() + b"\n"
        self._agent_list.started(AgentHandle(host, number, words, job.environ, line, self._pump))

    def stop(self, host: str) -> None:
        """Has the agent of a host end."""
        if (agent := self._agent_list.agents.get(host)) is not None:
            self._agent_list.stop(agent)

    def send(self, host: str, message: Mapping[str, Any]) -> None:
        """Sends the message to the agent of a host; nothing happens if there is none."""
        self._agent_list.send(host, message)

    def send_to(self, hosts: Iterable[str], message: Mapping[str, Any]) -> None:
        """Sends the message to the agents of these hosts."""
        self._agent_list.send_to(hosts, message)

    def tell_each_other(self) -> None:
        """Lets all agents know who may be the next driver."""
        self._agent_list.tell_each_other()

    def look(self, timeout_s: float) -> Iterator[Heard | Lost]:
        """Waits for something to happen, at most so long, and says what."""
        for agent in self._board.look(timeout_s, self._welcome):
            yield from self._hear(agent)
        yield from self._agent_list.tick(time.monotonic())

    def close(self, number: int | None = None) -> None:
        """Has all agents end their ranks and themselves, and waits for it, within limits.

        Args:
            number: the signal that is the reason; None = none is.
        """
        grace_s = end_grace_s(number, self._job.environ)
        for host in self.hosts:
            self.send(host, {"do": "end", "grace_s": grace_s})
        for each in self._agent_list.agents.values():
            if each.channel is None:
                each.disconnect()  # which it will find out by its standard input
        deadline_s = time.monotonic() + grace_s + 2.0
        for agent in (*self._agent_list.agents.values(), *self._leaving):
            agent.wait(deadline_s - time.monotonic())
        self._board.close()

    def _welcome(self, number: int, channel: JsonChannel) -> None:
        """An agent has proved itself."""
        agent = self._agent_list.awaited(number)
        if agent is None and self._agent_list.adopts:
            agent = AdoptedAgent(number)
        if agent is None:
            channel.close()
            return
        agent.channel, agent.heard_s = channel, time.monotonic()
        self._board.connect(channel, agent)

    def _hear(self, agent: AgentHandle | AdoptedAgent) -> Iterator[Heard | Lost]:
        if agent.channel is None or agent.channel.fileno() < 0:
            return
        agent.channel.flush()
        self._watch(agent)
        try:
            messages = agent.channel.receive()
        except ConnectionError:
            yield from self._agent_list.lose(agent, time.monotonic())
            return
        for message in messages:
            if (heard := self._agent_list.hear(agent, message, time.monotonic())) is not None:
                yield heard

    def _forget(self, agent: AgentHandle | AdoptedAgent) -> None:
        """It is given up."""
        if agent.channel is not None:
            self._board.disconnect(agent.channel)
        self._leaving.append(agent)

    def _watch(self, agent: AgentHandle | AdoptedAgent) -> None:
        """Asks the selector for what is needed of that agent just now."""
        if agent.channel is not None:
            self._board.watch(agent.channel, agent)
