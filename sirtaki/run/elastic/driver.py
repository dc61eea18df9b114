"""The driver of a job whose ranks come and go: agents as it has them, discovery, and the launch from parsed options.

Where it is lost an agent starts another one, as `python -m sirtaki.run.elastic.driver`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import queue
import random
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Generic, Protocol, TypeVar

import msgspec

from sirtaki.comm.control.mesh_rendezvous import Door, listen
from sirtaki.comm.control.waiting import Deadline, Poll, wait_for
from sirtaki.engine.json_channel import JsonChannel, encoded
from sirtaki.engine.launchers import node_names
from sirtaki.engine.membership import Proof
from sirtaki.engine.settings import Settings
from sirtaki.errors import ConfigError, LaunchError
from sirtaki.run.elastic.agent import (
    DRIVER,
    AgentConfig,
    DriverEndpoint,
    ElasticJob,
    Inheritance,
    agents_key,
    end_grace_s,
)
from sirtaki.run.elastic.job_members import (
    COOLDOWN_S,
    Beat,
    Crew,
    EndAll,
    FromAgent,
    Heard,
    JobMembers,
    KnownAgents,
    Lost,
    OnFailure,
    Place,
    Policy,
    ToAgent,
    Up,
    has_waited,
)
from sirtaki.run.host_check import PROBLEM, Need, versions_here
from sirtaki.run.hosts import MOST_SLOTS, OPTIONS, Host, given_hosts, parse_hosts, remedy, ssh_arguments
from sirtaki.run.launch import begin_environ, carried_variables, complete_environ, rank_command
from sirtaki.run.output import OutputOptions, RankOutput, output_folder, say, standard_consoles
from sirtaki.run.rank_channel import Event, Message
from sirtaki.run.supervisor import signals_heard

# ── the agents of an elastic job as its driver has them ───────────────────────────────────────────────────────────────

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

        def has_closed() -> bool:
            if self.channel is None or self.channel.fileno() < 0:
                return True
            self.channel.receive()
            return False

        with contextlib.suppress(ConnectionError):
            wait_for(has_closed, Deadline.after(timeout_s), Poll.SLOW)
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
    agent = [sys.executable, "-P", "-m", "sirtaki.run.elastic.agent"]
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


# ── the driver: asks discovery, tells the rules of membership what happens, does what they say ────────────────────────

INTERVAL_S = 1.0
"""Between one answer and the next question."""

LIMIT_S, MOST_BYTES = 20.0, 1 << 20
"""How long the script may take, and how much it may print."""

MOST_HOSTS = 10_000

Hosts = Mapping[str, int]


def ask_script(script: str, slots: int, limit_s: float = LIMIT_S) -> Hosts:
    """Runs the script once: one host a line, `name` or `name:slots`; blank lines and `#` comments are ignored.

    Args:
        script: of the user, with its path; anything that can be executed.
        slots: of a host that the script gives no number for.
        limit_s: how long it may take; then it is killed, with what it has started.

    Raises:
        LaunchError: it cannot be run, fails, hangs or prints what names no host.
    """
    deadline = Deadline.after(limit_s)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [str(Path(script).resolve())] if Path(script).exists() else ["sh", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as err:
            raise LaunchError(
                f"it cannot be run ({err}); make it executable, with #!/bin/sh in its first line"
            ) from err

        def has_ended() -> bool:
            if process.poll() is not None:
                return True
            if sum(os.fstat(file.fileno()).st_size for file in (out, errors)) > MOST_BYTES:
                raise LaunchError(f"it has printed more than {MOST_BYTES} bytes")
            return False

        try:
            if not wait_for(has_ended, deadline, Poll.SLICES):
                raise LaunchError(f"it has not ended within {limit_s:g} s")
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        told, complaint = (os.pread(file.fileno(), MOST_BYTES, 0).decode(errors="replace") for file in (out, errors))
    if process.returncode != 0:
        last = (complaint.strip().splitlines() or [""])[-1]
        raise LaunchError(f"it ended with exit code {process.returncode}{f': {last[:200]}' if last else ''}")
    return _hosts(told, slots)


def _hosts(text: str, slots: int) -> Hosts:
    found: dict[str, int] = {}
    for line in text.splitlines():
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        try:
            (host,) = parse_hosts(entry if ":" in entry else f"{entry}:{slots}")
        except (ConfigError, ValueError) as err:
            raise LaunchError(
                f"it printed {entry[:80]!r}, which is no host; write name or name:slots, of {MOST_SLOTS} slots at most"
            ) from err
        found[host.name] = min(MOST_SLOTS, found.get(host.name, 0) + host.slots)
        if len(found) > MOST_HOSTS:
            raise LaunchError(f"it printed more than {MOST_HOSTS} hosts")
    return found


class Discovery:
    """Asks in a thread, since an answer may take long."""

    def __init__(
        self, ask: Callable[[], Hosts], *, on_answer: Callable[[], None], interval_s: float = INTERVAL_S
    ) -> None:
        """Begins at once.

        Args:
            ask: for all hosts; LaunchError where there is no answer.
            on_answer: called in the thread when `take` has something.
            interval_s: between one answer and the next question.
        """
        self._ask, self._on_answer, self._interval_s = ask, on_answer, interval_s
        self._answers: queue.SimpleQueue[Hosts | LaunchError] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)
        self._thread.start()

    def take(self) -> Iterator[Hosts | LaunchError]:
        """What has been answered, or why there was no answer, since the last time."""
        while not self._answers.empty():
            yield self._answers.get()

    def close(self) -> None:
        """Asks no more; a question that is being asked is not waited for."""
        self._closing.set()

    def _run(self) -> None:
        last: object = None
        while not self._closing.wait(self._interval_s):
            try:
                answer: Hosts | LaunchError = self._ask()
            except LaunchError as err:
                answer = err
            found = str(answer) if isinstance(answer, LaunchError) else dict(answer)
            if found != last:  # an error that stays is told once
                last = found
                self._answers.put(answer)
                self._on_answer()


class RunningCrew(Crew, Protocol):
    """Agents as a driver runs them: real ones, or Ray's."""

    def wake(self) -> None:
        """From any thread: `look` returns."""
        ...

    def look(self, timeout_s: float) -> Iterator[Heard | Lost]:
        """Waits for something to happen, at most so long, and says what."""
        ...

    def close(self, number: int | None = None) -> None:
        """Has all agents end their ranks and themselves, and waits for it, within limits.

        Args:
            number: the signal that is the reason; None = none is.
        """
        ...


_TICK_S = 0.2


def run_job(
    crew: RunningCrew,
    members: JobMembers,
    say: Callable[[str], None],
    hosts: Hosts,
    ask: Callable[[], Hosts] | None,
    *,
    finish_output: Callable[[], None] = lambda: None,
) -> int:
    """Runs a job to its end; no process of it is left on hosts that can be reached.

    Args:
        crew: the agents, which end with this.
        members: the rules.
        say: shows a line to the user.
        hosts: with which to begin.
        ask: for all hosts, from now on; None = they stay.
        finish_output: called once no rank writes anything any more, before the last line.

    Returns:
        0, the exit code of the rank that failed first, or 128 + the signal that ended this process.
    """
    signals: list[int] = []

    def remember(number: int) -> None:
        signals.append(number)
        crew.wake()

    discovery = None if ask is None else Discovery(ask, on_answer=crew.wake)
    with signals_heard(remember):
        try:
            members.found(hosts, time.monotonic())
            while members.end is None and not signals:
                members.answer(list(crew.look(_TICK_S)), time.monotonic())
                for answer in () if discovery is None else discovery.take():
                    if isinstance(answer, LaunchError):
                        say(f"host discovery script: {answer}; hosts stay as they are, it is asked again")
                    else:
                        members.found(answer, time.monotonic())
        finally:
            if discovery is not None:
                discovery.close()
            crew.close(signals[-1] if signals else None)
            finish_output()
    if signals:
        return 128 + signals[-1]
    assert members.end is not None
    if members.end.text:
        say(members.end.text)
    return members.end.exit_code


def take_over(crew: AgentCrew, members: JobMembers, say: Callable[[str], None]) -> Hosts | None:
    """Goes on with a job whose driver is lost: the agents that come say what there is.

    Returns:
        The hosts that the job goes on with, as far as their agents tell; None = there are too few, and all have ended.
    """
    reports: dict[str, Up] = {}
    later: list[Heard | Lost] = []
    begin_s = time.monotonic()
    while not has_waited(time.monotonic() - begin_s, reports, crew.expected):
        for event in crew.look(_TICK_S):
            if isinstance(event, Heard) and isinstance(event.message, Up):
                reports[event.host] = event.message
            else:
                later.append(event)
    crew.expect_no_more()
    goes_on = members.take_over(reports, time.monotonic())
    workers = members.member_list.workers.values()
    there = f"{len(workers)} ranks on {', '.join(crew.hosts)}"
    if not goes_on:
        say(f"the driver is lost, and only {there} can be reached: too few to go on")
        crew.close()
        return None
    say(f"the driver is lost; process {os.getpid()} on {socket.gethostname()} takes over {there}")
    crew.tell_each_other()
    members.answer(later, time.monotonic())
    slots = dict.fromkeys(crew.hosts, 1)
    for worker in members.member_list.workers.values():
        slots[worker.host] = max(slots.get(worker.host, 1), worker.slot + 1)
    return slots


# ── a job from parsed options, and another driver in the place of one that is lost ────────────────────────────────────

_LATER_S = 30.0
"""How much longer than the launcher a rank waits for others: the launcher can say who is missing."""


def drive(job: ElasticJob, endpoint: DriverEndpoint, environ: Mapping[str, str], hosts: Hosts | None) -> int:
    """Runs a job to its end.

    Args:
        job: of which this process is the driver.
        endpoint: where agents reach it.
        environ: of the agents and ranks of this machine.
        hosts: with which to begin; None = another driver is lost, whose agents come.

    Returns:
        The exit code for the launcher.
    """
    options = OutputOptions(
        hydra=True,
        prefix=job.prefix,
        timestamps=job.timestamps,
        folder=Path(job.folder) if job.folder else None,
        label=lambda worker: members.member_list.label(worker),
        place=lambda worker: members.member_list.place(worker),
    )
    consoles = standard_consoles()

    def hear(message: Message) -> None:
        if message.event is Event.PROGRESS:
            consoles["stderr"].show_bar(message.reason)

    def say(line: str) -> None:
        consoles["stderr"].show_bar("")  # its rank may be gone; one that tunes draws it again
        consoles["stderr"].say(line)

    outputs = {
        name: RankOutput(name, console=console, options=options, on_message=hear) for name, console in consoles.items()
    }

    def finish_output() -> None:
        for output in outputs.values():
            output.finish()
        consoles["stderr"].show_bar("")

    crew = AgentCrew(job, endpoint, lambda name, stream: outputs[name].pump(stream), environ)
    members = JobMembers(job.policy, crew, say, random.Random(time.time_ns()))
    if hosts is None:
        if (found := take_over(crew, members, say)) is None:
            return 1
        hosts = found if job.discovery else job.hosts
    ask = functools.partial(ask_script, job.discovery, job.slots) if job.discovery else None
    return run_job(crew, members, say, hosts, ask, finish_output=finish_output)


def launch_elastic(options: argparse.Namespace) -> int:
    """Runs the job that `options` (of `parse`) describe to its end.

    Returns:
        The exit code for the launcher.

    Raises:
        ConfigError: options that is invalid; nothing was started.
        LaunchError: the launcher cannot listen.
    """
    environ, exported = begin_environ(options)
    for option, name in (("mpi_args", "--mpi-args"), ("binding_args", "--binding-args"), ("tcp", "--tcp")):
        if getattr(options, option):
            say(f"{name} has no effect here: no mpiexec starts ranks that come and go")
    script, slots = options.host_discovery_script, options.slots_per_host or 1
    fixed: Hosts = {} if script else _fixed_hosts(options, environ)
    try:
        hosts = ask_script(script, slots) if script else fixed
    except LaunchError as err:
        raise ConfigError(f"host discovery script: {err}") from err
    policy = policy_of(
        options, hosts, timeout_s=options.elastic_timeout or Settings.from_environ(environ).elastic_timeout_s
    )
    if options.as_horovod and not script and not options.on_failure:
        say(
            "with --as-horovod a rank that fails takes its whole host out, as under horovodrun, and without discovery "
            "no host comes in its place: give --host-discovery-script FILE, or --on-failure replace-rank"
        )
    job = ElasticJob(
        command=(),
        policy=policy,
        agent_command=options.agent_command,
        slurm_hosts=frozenset(node_names(environ.get("SLURM_JOB_NODELIST", ""))),
        ssh=ssh_arguments(options.ssh_port, options.ssh_identity_file),
        agent_start_s=options.start_timeout or 60.0,
        discovery=str(Path(script).resolve()) if script and Path(script).exists() else script or "",
        slots=slots,
        hosts=fixed,
        prefix=options.prefix,
        timestamps=options.timestamps,
        folder=str(output_folder(options.output_filename).resolve()) if options.output_filename else None,
    )
    if job.agent_command:
        agent_words(job, "host")  # which refuses what cannot work
    here = not script and all(is_child(job, host) for host in hosts)
    command = rank_command(options.command, as_horovod=options.as_horovod, check_files=here)
    environ["HOROVOD_ELASTIC_TIMEOUT"] = f"{policy.timeout_s + _LATER_S:g}"
    complete_environ(environ, options, local_ranks=min(max([1, *hosts.values()]), policy.max_ranks or 2**31))
    job = replace(
        job,
        command=command.words,
        script=command.script,
        carried={name: environ[name] for name in dict.fromkeys([*carried_variables(environ), *exported])},
        interface=Settings.from_environ(environ).gloo_interface,
        one_host=here and len(hosts) == 1,
    )
    if options.verbose:
        say(f"hosts: {', '.join(f'{host} ({slots} slots)' for host, slots in hosts.items()) or 'none yet'}")
        most = policy.max_ranks or "as many as there are slots"
        say(f"at least {policy.min_ranks} ranks, at most {most}; a failure: {policy.on_failure.value}")
        say(f"each rank runs: {shlex.join(job.command)}")
    return drive(job, new_endpoint(job.addresses), environ, hosts)


def policy_of(options: argparse.Namespace, hosts: Hosts, *, timeout_s: float) -> Policy:
    """What the options say about ranks that come and go.

    Raises:
        ConfigError: numbers that contradict each other.
    """
    start, least, most = options.ranks, options.min_ranks, options.max_ranks
    least = least or start or 1
    start = start or least
    if not least <= start <= (most or start):
        raise ConfigError(
            f"--min-np {least}, -np {start}{f', --max-np {most}' if most else ''}: each must be at least the one before"
        )
    on_failure = OnFailure(options.on_failure) if options.on_failure else None
    if on_failure is None:
        on_failure = OnFailure.DROP_HOST if options.as_horovod else OnFailure.REPLACE_RANK
    cooldown_s = tuple(options.blacklist_cooldown_range or ())
    if cooldown_s and cooldown_s[0] > cooldown_s[1]:
        raise ConfigError(
            f"--blacklist-cooldown-range {cooldown_s[0]:g} {cooldown_s[1]:g}: the first is the shorter one"
        )
    if options.reset_limit is not None and options.reset_limit < 0:
        raise ConfigError(f"--reset-limit {options.reset_limit}: give a number from 0")
    if not options.host_discovery_script and (slots := sum(hosts.values())) < start:
        what = f"--min-np {least}" if slots < least else f"-np {start}"
        raise ConfigError(f"{what}, but the hosts have {slots} slots and will not get more")
    default_s = None if on_failure is OnFailure.DROP_HOST else COOLDOWN_S
    return Policy(
        start_ranks=start,
        min_ranks=least,
        max_ranks=most,
        timeout_s=timeout_s,
        reset_limit=options.reset_limit,
        on_failure=on_failure,
        cooldown_s=(cooldown_s[0], cooldown_s[1]) if cooldown_s else default_s,
        has_successors=options.on_driver_loss == "go-on",
        hosts_stay=not options.host_discovery_script,
    )


def _fixed_hosts(options: argparse.Namespace, environ: Mapping[str, str]) -> Hosts:
    listed = options.hosts
    if listed and options.slots_per_host:
        listed = ",".join(part if ":" in part else f"{part}:{options.slots_per_host}" for part in listed.split(","))
    hosts = given_hosts(listed, options.hostfile, environ)
    if not hosts:
        slots = options.max_ranks or options.ranks or options.min_ranks
        hosts = (Host(name="localhost", slots=slots),)
    return {host.name: host.slots for host in hosts}


def inherit() -> int:
    """Runs the job of a driver that is lost to its end; standard input says what that has left behind.

    Returns:
        The exit code of the job.
    """
    told = msgspec.json.decode(sys.stdin.buffer.read(), type=Inheritance)
    return drive(told.job, told.endpoint, {**os.environ, **told.environ}, None)


if __name__ == "__main__":
    sys.exit(inherit())
