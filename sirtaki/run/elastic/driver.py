"""The driver (launcher process) of an elastic job: starts an agent process on each host, and runs the host discovery
script.

If the driver is lost, an agent starts a new driver with `python -m sirtaki.run.elastic.driver`.
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

from sirtaki.comm.control.handshake import HandshakeListener, listen
from sirtaki.comm.control.waiting import Deadline, Poll, wait_for
from sirtaki.engine.json_channel import JsonChannel, encoded
from sirtaki.engine.launchers import node_names
from sirtaki.engine.membership import Proof
from sirtaki.engine.settings import Settings
from sirtaki.errors import ConfigError, LaunchError, require
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
    AgentAddress,
    AgentMessage,
    Crew,
    EndAll,
    FromAgent,
    Heartbeat,
    JobMembers,
    KnownAgents,
    Lost,
    OnFailure,
    Policy,
    RegisterAgent,
    ToAgent,
    has_waited,
)
from sirtaki.run.host_check import PROBLEM, Need, versions_here
from sirtaki.run.hosts import MOST_SLOTS, OPTIONS, Host, given_hosts, parse_hosts, remedy, ssh_arguments
from sirtaki.run.launch import begin_environ, carried_variables, complete_environ, rank_command
from sirtaki.run.output import OutputOptions, RankOutput, output_folder, say, standard_consoles
from sirtaki.run.rank_channel import ChannelLine, RankEvent
from sirtaki.run.supervisor import handling_signals

# ── agents, as seen by the driver ─────────────────────────────────────────────────────────────────────────────────────

AGENT_SILENT_S = 10.0
"""Seconds without a message after which the driver (launcher process) gives up the agent of a host (the process that
starts ranks there) and all its ranks.
"""

REMEMBERED_S = 120.0
"""Seconds for which a lost agent stays in the list of agents that the driver (launcher process) sends to all agents.

An agent is a process that starts ranks. After a network split, the lost agent may have started another driver. If this
driver must then end, its agents need the list to find the other driver.
"""


class AgentRecord:
    """State of an agent (process that starts the ranks of a host), as known to the driver (launcher process). Agents
    that this driver started are `StartedAgent`s. Agents that an earlier driver started are plain `AgentRecord`s.

    Attributes:
        host: host of the agent. "" until the agent has reported its host.
        number: id of the agent in the job.
        channel: connection to the agent. None until the agent has authenticated.
        started_s: time at which the agent was started.
        heard_s: time of the last message from the agent.
        places: addresses at which a driver started by this agent would listen.
    """

    def __init__(self, host: str, number: int, *, now_s: float, problem: str = "") -> None:
        self.host, self.number, self._problem = host, number, problem
        self.channel: JsonChannel[FromAgent] | None = None
        self.started_s = self.heard_s = now_s
        self.places: Sequence[AgentAddress] = ()

    def why_ended(self) -> str:
        """Return why the command that starts the agent has ended before the agent connected. "" if the command still
        runs, or if the reason is unknown.
        """
        return self._problem

    def disconnect(self) -> None:
        """Close the connection to the agent (process that starts ranks), which then ends its ranks and exits."""
        if self.channel is not None:
            self.channel.close()

    def wait(self, timeout_s: float, *, kills: bool = True) -> None:
        """Wait until the agent (process that starts ranks) has closed the connection.

        Args:
            timeout_s: maximum wait in seconds.
            kills: True to kill the start command if it has not ended after `timeout_s`. Used only by `StartedAgent`.
        """

        def has_closed() -> bool:
            if self.channel is None or self.channel.fileno() < 0:
                return True
            self.channel.receive()
            return False

        with contextlib.suppress(ConnectionError):
            wait_for(has_closed, Deadline.after(timeout_s), Poll.SLOW)
        self.disconnect()


class AgentList:
    """The agents (one process per host that starts ranks) of a driver (launcher process), and the rules for giving one
    up.

    Attributes:
        agents: agents by host, without agents that were given up.
        expected: ids of agents that an earlier driver started and that have not connected to this driver yet.
        adopts: True if the driver accepts agents that are not in `expected`. The lost driver may have given up such an
            agent by mistake.
    """

    def __init__(self, *, expected: Iterable[int], numbers: int, start_s: float, shares: bool, now_s: float) -> None:
        """Create an empty list of agents (processes that start ranks) of a driver (launcher process).

        Args:
            expected: ids of agents that an earlier driver started.
            numbers: highest agent id that was assigned until now.
            start_s: seconds that an agent may take to connect.
            shares: True to send the list of agents to every agent, because any agent may start the next driver.
            now_s: current time.
        """
        self.agents: dict[str, AgentRecord] = {}
        self.expected = set(expected)
        self.adopts = bool(self.expected)
        self._numbers, self._start_s, self._shares = numbers, start_s, shares
        self._looked_s = now_s
        self._remembered: list[tuple[float, AgentRecord]] = []

    @property
    def hosts(self) -> list[str]:
        """Return the hosts whose agents (processes that start ranks) have not been given up."""
        return list(self.agents)

    def next_number(self) -> int:
        """Return an unused id for a new agent (process that starts ranks)."""
        self._numbers += 1
        return self._numbers

    def expect_no_more(self) -> None:
        """Stop accepting connections of agents that an earlier driver (launcher process) has started."""
        self.expected.clear()
        self.adopts = False

    def wants(self, number: int) -> bool:
        """Return whether the agent with id `number` may connect. A rejected agent searches for another driver (launcher
        process).
        """
        return self.adopts or self.awaited(number) is not None

    def awaited(self, number: int) -> AgentRecord | None:
        """Return the agent (process that starts ranks) with id `number` if it was started and has not connected yet.

        Otherwise return None.
        """
        return next((each for each in self.agents.values() if each.number == number and each.channel is None), None)

    def receive(self, agent: AgentRecord, message: FromAgent, now_s: float) -> AgentMessage | None:
        """Process a message of an agent (process that starts ranks).

        Returns:
            The message as an event for `JobMembers`, which decides about ranks. None if no decision is needed.
        """
        agent.heard_s = now_s
        match message:
            case Heartbeat():
                self.send_to([agent.host], message)
                return None
            case RegisterAgent(host=host, places=places):
                agent.places = places
                if not agent.host:
                    self.expected.discard(agent.number)
                    self._numbers = max(self._numbers, agent.number)
                    agent.host, self.agents[host] = host, agent
        return AgentMessage(agent.host, message) if agent.host else None

    def send_to(self, hosts: Iterable[str], message: ToAgent) -> None:
        """Send a message to the agents (processes that start ranks) of `hosts`. Hosts without an agent are ignored."""
        text = encoded(message)
        for host in hosts:
            agent = self.agents.get(host)
            if agent is not None and agent.channel is not None:
                agent.channel.send(text)

    def broadcast_agents(self) -> None:
        """Send the list of all agents (processes that start ranks) to every agent.

        Agents need the list to find or start a new driver (launcher process) if this driver is lost.
        """
        if self._shares:
            known = (*self.agents.values(), *(agent for _, agent in self._remembered))
            self.send_to(self.agents, KnownAgents([(agent.number, agent.places) for agent in known if agent.places]))

    def tick(self, now_s: float) -> Iterator[Lost]:
        """Give up agents (processes that start ranks) that have not connected in time or have sent nothing for too
        long. Yield a `Lost` event for each.
        """
        # Restart all time limits after a long gap, in which this process was stopped or the machine was suspended.
        if now_s - self._looked_s > AGENT_SILENT_S / 2:
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

    def lose(self, agent: AgentRecord, now_s: float, why: str = "its agent has exited") -> Iterator[Lost]:
        """Give up an agent (process that starts ranks) whose connection was closed, and yield a `Lost` event.

        Yield nothing if the agent was given up before, or if its host is unknown.
        """
        is_known = self.agents.get(agent.host) is agent
        self._release(agent)
        if is_known:
            self._remembered.append((now_s + REMEMBERED_S, agent))
            yield Lost(agent.host, why)

    def stop(self, host: str) -> None:
        """End the agent (process that starts ranks) of a host. Its later messages are ignored."""
        if (agent := self.agents.get(host)) is not None:
            if agent.channel is not None:
                agent.channel.send(EndAll())
            self._release(agent)

    def _release(self, agent: AgentRecord) -> None:
        """Close the connection to a lost agent without ordering it to end, so that it finds another driver or exits.

        After a network split, it may be this driver (launcher process) that has to end.
        """
        if self.agents.get(agent.host) is agent:
            del self.agents[agent.host]
        agent.disconnect()


def is_child(job: ElasticJob, host: str) -> bool:
    """Return whether the agent of `host` (the process that starts its ranks) is a child of this launcher, and so
    inherits its environment.
    """
    return not job.agent_command and Host(name=host, slots=1).is_local


def agent_words(job: ElasticJob, host: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the command line that starts the agent of a host (the process that starts its ranks).

    The agent reads its configuration from standard input.

    Raises:
        ConfigError: the user's `--agent-command` does not contain `{command}`.
    """
    agent = [sys.executable, "-P", "-m", "sirtaki.run.elastic.agent"]
    if is_child(job, host):
        return agent
    if path := environ.get("PYTHONPATH"):
        agent = ["env", f"PYTHONPATH={path}", *agent]
    if job.agent_command:
        if "{command}" not in job.agent_command:
            raise ConfigError(
                "the value of --agent-command must contain {command}, as in 'kubectl exec -i {host} -- {command}', "
                f"found {job.agent_command!r}"
            )
        # Insert the agent's command into the user's command. If `{command}` is a word by itself, replace it by the
        # words of the agent's command. Otherwise insert them as quoted text.
        words = [
            agent if word == "{command}" else [word.replace("{host}", host).replace("{command}", shlex.join(agent))]
            for word in shlex.split(job.agent_command)
        ]
        return [*itertools.chain(*words)]
    if host in job.slurm_hosts:
        # Options of srun that request all CPUs and environment variables, even if the site or the batch script limits
        # them for single tasks.
        place = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--mpi=none", "--export=ALL"]
        unbound = ["--cpu-bind=none"] if "SLURM_CPU_BIND" in environ else []
        return ["srun", *place, *unbound, "--unbuffered", *agent]
    return ["ssh", *OPTIONS, *job.ssh, host, f"exec {shlex.join(agent)}"]


def new_endpoint(addresses: Sequence[str]) -> DriverEndpoint:
    """Open the ports of a job's first driver (launcher process) at `addresses`, and create the id and the secret of the
    job.

    Raises:
        LaunchError: the driver cannot listen at any of the addresses.
    """
    try:
        listeners = tuple(listener.detach() for listener in listen(addresses))
    except OSError as err:
        raise LaunchError(
            "the launcher cannot open a port for its agents (processes that start ranks) at the addresses "
            f"{', '.join(addresses)}: {err}; choose another network with --network-interfaces"
        ) from err
    return DriverEndpoint(proof=Proof(job=secrets.token_hex(8), secret=secrets.token_hex(32)), listeners=listeners)


Speaker = TypeVar("Speaker")


class Switchboard(Generic[Speaker]):
    """Event loop of a driver (launcher process of an elastic job). Waits for messages of agents or ranks, for new
    connections, and for `wake` from other threads.

    Attributes:
        events: selector in which the channel of each connected peer is registered, with the peer as data.
    """

    def __init__(self, endpoint: DriverEndpoint, *, is_wanted: Callable[[int], bool]) -> None:
        """Listen at the sockets of `endpoint`, and take ownership of them.

        Args:
            endpoint: listening sockets and credentials of the driver.
            is_wanted: returns whether the peer with this id may connect.
        """
        self.events = selectors.DefaultSelector()
        listeners = [socket.socket(fileno=descriptor) for descriptor in endpoint.listeners]
        key = agents_key(endpoint.proof)
        self._door = HandshakeListener(listeners, key=key, own=DRIVER, events=self.events, is_wanted=is_wanted)
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self.events.register(self._woken, selectors.EVENT_READ)

    @property
    def places(self) -> list[AgentAddress]:
        """Return the addresses at which the driver (launcher process) listens."""
        return self._door.addresses

    def wake(self) -> None:
        """Make a waiting `poll` return immediately. Thread-safe."""
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def poll(self, timeout_s: float, welcome: Callable[[int, socket.socket], None]) -> Iterator[Speaker]:
        """Wait for an event, and yield each peer (agent or rank) whose channel is readable or writable.

        Args:
            timeout_s: maximum wait in seconds.
            welcome: called with the id and the socket of each new peer that has authenticated.
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
        self._door.drop_expired()

    def close(self) -> None:
        """Close the listening sockets. Connections to peers stay open."""
        self._door.close()
        self.events.close()
        for end in (self._woken, self._waker):
            end.close()


Pump = Callable[[str, Iterable[bytes]], None]
"""Function that prints output lines as they arrive.

Its arguments are the name of the stream ("stdout" or "stderr") and the lines.
"""


class StartedAgent(AgentRecord):
    """An agent (process that starts ranks on a host) that this driver has started by ssh, by srun or as a local
    process.
    """

    def __init__(
        self,
        host: str,
        number: int,
        words: Sequence[str],
        environ: Mapping[str, str],
        config: bytes,
        pump: Pump,
    ) -> None:
        """Start the command that runs an agent (process that starts the ranks of a host).

        Args:
            host: host of the agent.
            number: id of the agent in the job.
            words: command line that starts the agent.
            environ: environment of the command.
            config: configuration of the agent, as one line of JSON.
            pump: prints the output of the command. Called in one thread per stream.

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
            # Run the command in a session of its own, so that Ctrl-C in the terminal reaches only the launcher.
            start_new_session=True,
        )
        assert self._process.stdout is not None  # This is never None, because stdout and stderr are pipes.
        assert self._process.stderr is not None
        streams = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        self._pumps = [
            threading.Thread(target=self._pump, args=[pump, *each], name=f"pump-{host}-{each[0]}", daemon=True)
            for each in streams.items()
        ]
        for thread in self._pumps:
            thread.start()
        assert self._process.stdin is not None  # This is never None, because standard input is a pipe.
        # Ignore a broken pipe, because `why_ended` reports that the command has ended.
        with contextlib.suppress(OSError):
            self._process.stdin.write(config)
            self._process.stdin.flush()

    def _pump(self, pump: Pump, name: str, stream: IO[bytes]) -> None:
        with stream:
            pump(name, stream if name == "stdout" else filter(self._is_shown, stream))

    def _is_shown(self, line: bytes) -> bool:
        """Return whether to print a line that the agent's start command has written to standard error.

        Lines that may explain why the agent does not start are not printed, but stored for `why_ended`.
        """
        text, problem = line.decode(errors="replace"), ""
        if self.channel is None and text.startswith(PROBLEM):
            problem = text.removeprefix(PROBLEM).strip()
        elif self.channel is None and self._program == "ssh":
            found = remedy(text, host=self.host, python=sys.executable)
            problem = f"{text.strip().rstrip('.')}: {found}" if found else ""
        self._problem = problem or self._problem
        return not problem

    def why_ended(self) -> str:
        """Return why the command that started the agent has ended: its last error lines, or its exit code. "" while it
        runs.
        """
        if (code := self._process.poll()) is None:
            return ""
        self._pumps[1].join(1.0)  # Wait for the last lines of standard error.
        return self._problem or f"{self._program} ended with exit code {code}"

    def disconnect(self) -> None:
        """Close the connection and the start command's standard input, so that the agent (process that starts ranks)
        ends its ranks and exits.
        """
        super().disconnect()
        with contextlib.suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def wait(self, timeout_s: float, *, kills: bool = True) -> None:
        """Wait up to `timeout_s` until the agent's start command has ended and its output was printed.

        Then kill it if `kills`.
        """
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
    """All agents (processes that start ranks, one per host) of a driver, with their connections and start commands."""

    def __init__(
        self,
        job: ElasticJob,
        endpoint: DriverEndpoint,
        pump: Pump,
        environ: Mapping[str, str],
    ) -> None:
        """Listen for agents (processes that start ranks). No agent is started yet.

        Args:
            job: description of the elastic job.
            endpoint: listening sockets of the driver, and ids of agents that are expected to connect.
            pump: prints the output of agents.
            environ: environment of ranks on this machine.
        """
        super().__init__(
            expected=endpoint.agents,
            numbers=endpoint.numbers,
            start_s=job.agent_start_s,
            shares=job.policy.has_successors,
            now_s=time.monotonic(),
        )
        self._job, self._proof, self._pump, self._environ = job, endpoint.proof, pump, environ
        self._board: Switchboard[AgentRecord] = Switchboard(endpoint, is_wanted=self.wants)
        self._leaving: list[AgentRecord] = []

    def wake(self) -> None:
        """Make a waiting `poll` return immediately. Thread-safe."""
        self._board.wake()

    def start(self, host: str) -> None:
        """Start the agent (process that starts ranks) of a host. `poll` later yields its first message, or `Lost` if
        the start command fails.
        """
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

    def poll(self, timeout_s: float) -> Iterator[AgentMessage | Lost]:
        """Wait up to `timeout_s` for messages of agents (one process per host) and for losses of agents, and yield
        them.
        """
        for agent in self._board.poll(timeout_s, self._welcome):
            yield from self._receive(agent)
        yield from self.tick(time.monotonic())

    def close(self, number: int | None = None) -> None:
        """End all agents (processes that start ranks) and their ranks, and wait for their exit within time limits.

        Args:
            number: signal that ended the driver. None if the job ended without a signal.
        """
        grace_s = end_grace_s(number, self._environ)
        self.send_to(self.agents, EndAll(grace_s))
        for each in self.agents.values():
            if each.channel is None:
                each.disconnect()  # Close the agent's standard input, which ends the agent.
        deadline_s = time.monotonic() + grace_s + 2.0
        for agent in self.agents.values():
            agent.wait(deadline_s - time.monotonic())
        for agent in self._leaving:
            # Kill no lost agent: it may have found a new driver (launcher process) while this one was stopped or
            # disconnected.
            agent.wait(
                deadline_s - time.monotonic(), kills=not self._job.policy.has_successors or agent.channel is None
            )
        self._board.close()

    def _welcome(self, number: int, sock: socket.socket) -> None:
        """Store the connection of an agent (process that starts ranks) that has authenticated."""
        # Accept an agent of an earlier driver (launcher process). Its host is unknown until its first message.
        agent = self.awaited(number) or AgentRecord("", number, now_s=time.monotonic())
        agent.channel, agent.heard_s = JsonChannel(sock, FromAgent), time.monotonic()
        agent.channel.watch(self._board.events, agent)

    def _receive(self, agent: AgentRecord) -> Iterator[AgentMessage | Lost]:
        assert agent.channel is not None  # This is never None, because `poll` yields only agents with a channel.
        try:
            messages = agent.channel.receive()
        except ConnectionError:
            yield from self.lose(agent, time.monotonic())
            return
        for message in messages:
            if (heard := self.receive(agent, message, time.monotonic())) is not None:
                yield heard

    def _release(self, agent: AgentRecord) -> None:
        self._leaving.append(agent)
        super()._release(agent)


# ── the driver: runs host discovery, passes events to `JobMembers`, and carries out its orders ────────────────────────

INTERVAL_S = 1.0
"""Seconds between the end of one run of the host discovery script and the start of the next run."""

LIMIT_S, MOST_BYTES = 20.0, 1 << 20
"""Maximum run time in seconds, and maximum size of the output in bytes, of the host discovery script."""

MOST_HOSTS = 10_000

Hosts = Mapping[str, int]


def ask_script(script: str, slots: int, limit_s: float = LIMIT_S) -> Hosts:
    """Run the host discovery script once, and return its hosts. The script prints one host per line, `name` or
    `name:slots`, with `#` comments.

    Args:
        script: path of an executable file, or a shell command.
        slots: slots (number of ranks) of hosts for which the script prints no number.
        limit_s: maximum run time in seconds. At the limit, the script and its children are killed.

    Raises:
        LaunchError: the script cannot be run, fails, takes too long, or prints an invalid host.
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
                f"the host discovery script {script!r} cannot be started ({err}); make it executable, and write "
                "#!/bin/sh into its first line"
            ) from err

        def has_ended() -> bool:
            if process.poll() is not None:
                return True
            if sum(os.fstat(file.fileno()).st_size for file in (out, errors)) > MOST_BYTES:
                raise LaunchError(
                    f"the host discovery script {script!r} printed more than {MOST_BYTES} bytes; it must print only "
                    "one host per line, as name or name:slots, and then exit"
                )
            return False

        try:
            if not wait_for(has_ended, deadline, Poll.SLICES):
                raise LaunchError(
                    f"the host discovery script {script!r} did not exit within {limit_s:g} s; it must print one host "
                    "per line, as name or name:slots, and then exit"
                )
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed, complaint = (os.pread(file.fileno(), MOST_BYTES, 0).decode(errors="replace") for file in (out, errors))
    if process.returncode != 0:
        last = (complaint.strip().splitlines() or [""])[-1]
        raise LaunchError(
            f"the host discovery script {script!r} failed with exit code {process.returncode}"
            f"{f': {last[:200]}' if last else ''}"
        )
    return _hosts(script, printed, slots)


def _hosts(script: str, text: str, slots: int) -> Hosts:
    found: dict[str, int] = {}
    for line in text.splitlines():
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        try:
            (host,) = parse_hosts(entry if ":" in entry else f"{entry}:{slots}")
        except (ConfigError, ValueError) as err:
            raise LaunchError(
                f"the host discovery script {script!r} printed the invalid line {entry[:80]!r}; each line must be a "
                f"host, as name or name:slots, with at most {MOST_SLOTS} slots"
            ) from err
        found[host.name] = min(MOST_SLOTS, found.get(host.name, 0) + host.slots)
        if len(found) > MOST_HOSTS:
            raise LaunchError(
                f"the host discovery script {script!r} must print at most {MOST_HOSTS} hosts, but it printed more"
            )
    return found


class Discovery:
    """Thread that repeatedly runs host discovery (the user's script that lists hosts), because a run may take long."""

    def __init__(
        self, ask: Callable[[], Hosts], *, on_answer: Callable[[], None], interval_s: float = INTERVAL_S
    ) -> None:
        """Start the thread that queries for hosts.

        Args:
            ask: returns all available hosts, or raises LaunchError.
            on_answer: called in the thread when the hosts have changed or a new error has occurred.
            interval_s: seconds between the end of one query and the start of the next.
        """
        self._ask, self._on_answer, self._interval_s = ask, on_answer, interval_s
        self._answers: queue.SimpleQueue[Hosts | LaunchError] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)
        self._thread.start()

    def take(self) -> Iterator[Hosts | LaunchError]:
        """Yield the new lists of hosts and the new errors of host discovery since the last call."""
        while not self._answers.empty():
            yield self._answers.get()

    def close(self) -> None:
        """Stop the thread that runs host discovery. Does not wait for a run in progress."""
        self._closing.set()

    def _run(self) -> None:
        last: object = None
        while not self._closing.wait(self._interval_s):
            try:
                answer: Hosts | LaunchError = self._ask()
            except LaunchError as err:
                answer = err
            found = str(answer) if isinstance(answer, LaunchError) else dict(answer)
            if found != last:  # Report only changes: the same hosts, or the same error, are reported once.
                last = found
                self._answers.put(answer)
                self._on_answer()


class RunningCrew(Crew, Protocol):
    """Interface of a running driver to its agents, each of which starts the ranks of a host.

    Agents are processes, or objects that control Ray actors.
    """

    def wake(self) -> None:
        """Make a waiting `poll` return immediately. Thread-safe."""
        ...

    def poll(self, timeout_s: float) -> Iterator[AgentMessage | Lost]:
        """Wait up to `timeout_s` for messages of agents (one process per host) and for losses of agents, and yield
        them.
        """
        ...

    def close(self, number: int | None = None) -> None:
        """End all agents (processes that start ranks) and their ranks, and wait for their exit within time limits.

        Args:
            number: signal that ended the driver. None if the job ended without a signal.
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
    """Run a job to its end. Afterwards, no process of the job is left on reachable hosts.

    Args:
        crew: controls the agents (processes that start ranks). Closed at the end.
        members: decides which ranks start, are members, and are given up.
        say: prints a line for the user.
        hosts: initial hosts, with their slots (numbers of ranks).
        ask: queries host discovery. None if the set of hosts is fixed.
        finish_output: called after all ranks have ended, and before the final line is printed.

    Returns:
        0, the exit code of the rank that failed first, or 128 + the signal that ended this process.
    """
    signals: list[int] = []

    def remember(number: int) -> None:
        signals.append(number)
        crew.wake()

    discovery = None if ask is None else Discovery(ask, on_answer=crew.wake)
    with handling_signals(remember):
        try:
            members.found(hosts, time.monotonic())
            while members.end is None and not signals:
                members.answer(list(crew.poll(_TICK_S)), time.monotonic())
                for answer in () if discovery is None else discovery.take():
                    if isinstance(answer, LaunchError):
                        say(f"{answer}; the job keeps its hosts, and the launcher will run the script again")
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
    """Continue a job whose driver (launcher process) was lost. Waits until the job's agents (processes that start
    ranks) have connected to this new driver.

    Returns:
        The hosts that the connected agents report, with their slots. None if too few agents have connected; then all
        agents were ended.
    """
    reports: dict[str, RegisterAgent] = {}
    later: list[AgentMessage | Lost] = []
    begin_s = time.monotonic()
    while not has_waited(time.monotonic() - begin_s, reports, crew.expected):
        for event in crew.poll(_TICK_S):
            if isinstance(event, AgentMessage) and isinstance(event.message, RegisterAgent):
                reports[event.host] = event.message
            else:
                later.append(event)
    crew.expect_no_more()
    goes_on = members.take_over(reports, time.monotonic())
    workers = members.member_list.workers.values()
    there = f"{len(workers)} ranks on {', '.join(crew.hosts)}"
    if not goes_on:
        say(f"the driver (launcher process) has died, and only {there} can be reached; these are too few to continue")
        crew.close()
        return None
    say(f"the driver (launcher process) has died; process {os.getpid()} on {socket.gethostname()} takes over {there}")
    crew.broadcast_agents()
    members.answer(later, time.monotonic())
    slots = dict.fromkeys(crew.hosts, 1)
    for worker in members.member_list.workers.values():
        slots[worker.host] = max(slots.get(worker.host, 1), worker.slot + 1)
    return slots


# ── a job from parsed options, and the successor of a lost driver ─────────────────────────────────────────────────────

_LATER_S = 30.0
"""Seconds for which ranks wait longer for missing ranks than the launcher does.

The launcher must give up first, because only the launcher can name the missing ranks in its error message.
"""


def drive(job: ElasticJob, endpoint: DriverEndpoint, environ: Mapping[str, str], hosts: Hosts | None) -> int:
    """Run an elastic job to its end, as its driver (launcher process).

    Args:
        job: description of the job.
        endpoint: sockets at which this driver listens for agents.
        environ: environment of agents and ranks on this machine.
        hosts: initial hosts. None to continue the job of a lost driver.

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

    def show_progress(message: ChannelLine) -> None:
        if message.event is RankEvent.PROGRESS:
            consoles["stderr"].show_bar(message.reason)

    def say(line: str) -> None:
        # Remove the progress bar: the rank that drew it may have exited. A rank that still tunes draws it again.
        consoles["stderr"].show_bar("")
        consoles["stderr"].say(line)

    outputs = {
        name: RankOutput(name, console=console, options=options, on_message=show_progress)
        for name, console in consoles.items()
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
    """Run the job described by `options` (from `parse`) to its end.

    Returns:
        The exit code for the launcher.

    Raises:
        ConfigError: an option is invalid. Nothing was started.
        LaunchError: the launcher cannot open a port for agents.
    """
    environ, exported = begin_environ(options)
    for option, name in (("mpi_args", "--mpi-args"), ("binding_args", "--binding-args"), ("tcp", "--tcp")):
        if getattr(options, option):
            say(f"{name} has no effect on elastic jobs, which do not use mpiexec")
    script, slots = options.host_discovery_script, options.slots_per_host or 1
    fixed: Hosts = {} if script else _fixed_hosts(options, environ)
    try:
        hosts = ask_script(script, slots) if script else fixed
    except LaunchError as err:
        raise ConfigError(str(err)) from err
    policy = policy_of(
        options, hosts, timeout_s=options.elastic_timeout or Settings.from_environ(environ).elastic_timeout_s
    )
    if options.as_horovod and not script and not options.on_failure:
        say(
            "with --as-horovod the failure of a rank excludes its whole host, as under horovodrun, and without "
            "discovery no host replaces it: use --host-discovery-script FILE, or --on-failure replace-rank"
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
        agent_words(job, "host")  # Check `--agent-command`. The result is not used.
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
    """Return the policy of an elastic job (numbers of ranks, treatment of failed hosts) that the command-line options
    describe.

    Raises:
        ConfigError: numbers of ranks or slots contradict each other.
    """
    start, least, most = options.ranks, options.min_ranks, options.max_ranks
    least = least or start or 1
    start = start or least
    rule = "--min-np <= -np <= --max-np"
    require(least <= start <= (most or start), "the number of ranks", rule, f"{least}, {start}, {most or 'no limit'}")
    on_failure = OnFailure(options.on_failure) if options.on_failure else None
    if on_failure is None:
        on_failure = OnFailure.DROP_HOST if options.as_horovod else OnFailure.REPLACE_RANK
    cooldown_s = tuple(options.blacklist_cooldown_range or ())
    valid = cooldown_s == tuple(sorted(cooldown_s))
    require(valid, "--blacklist-cooldown-range", "a first value that does not exceed the second", cooldown_s)
    require((options.reset_limit or 0) >= 0, "--reset-limit", "at least 0", options.reset_limit)
    if not options.host_discovery_script and (slots := sum(hosts.values())) < start:
        what = f"--min-np {least}" if slots < least else f"-np {start}"
        raise ConfigError(
            f"the option {what} requires more ranks than the hosts have slots ({slots}); name more hosts or slots, or "
            "use --host-discovery-script"
        )
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
    """Run, as its new driver (launcher process), the job of a lost driver to its end. Reads the job's state, an
    `Inheritance`, from standard input.

    Returns:
        The exit code of the job.
    """
    inherited = msgspec.json.decode(sys.stdin.buffer.read(), type=Inheritance)
    return drive(inherited.job, inherited.endpoint, {**os.environ, **inherited.environ}, None)


if __name__ == "__main__":
    sys.exit(inherit())
