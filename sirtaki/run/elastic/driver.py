"""Carries out what the rules of membership decide: starts agents, hears them, asks discovery, says what happens."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from sirtaki.comm.control.addresses import LOOPBACK, own_addresses
from sirtaki.errors import ConfigError, LaunchError
from sirtaki.json_channel import JsonChannel

from .actions import Action, Dismiss, End, Form, KillRank, Say, StartAgent, StartRank, StopAgent, Tell
from .agent import BEAT_S, KILL_GRACE_S, agents_key
from .agent_handle import AgentHandle
from .agent_server import AgentServer
from .agent_start import AgentStart
from .discovery import Discovery, Hosts
from .elastic_output import ElasticOutput
from .job_members import JobMembers
from .workers import RankEnd

AGENT_SILENT_S = 10.0
"""After which the agent of a host, and its ranks with it, are given up."""

_TICK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticJob:
    """What is to be started.

    Attributes:
        command: what each rank runs.
        environ: of the ranks on this machine.
        carried: of it, what ranks elsewhere get.
        interface: network interface that joins the hosts; None = any.
        one_host: there will never be a host besides this one.
        agents: how they are started.
        agent_start_s: how long an agent may take to connect.
    """

    command: tuple[str, ...]
    environ: Mapping[str, str]
    carried: Mapping[str, str]
    interface: str | None
    one_host: bool
    agents: AgentStart
    agent_start_s: float = 60.0


class Driver:
    """One job from start to end; used once."""

    def __init__(self, job: ElasticJob, members: JobMembers, output: ElasticOutput) -> None:
        self._job, self._members, self._output = job, members, output
        self._name, self._secret = secrets.token_hex(8), secrets.token_hex(32)
        self._events = selectors.DefaultSelector()
        addresses = [LOOPBACK, *([] if job.one_host else own_addresses(job.interface))]
        try:
            self._server = AgentServer(addresses, key=agents_key(self._secret, self._name), events=self._events)
        except OSError as err:
            raise LaunchError(f"the launcher cannot listen at {', '.join(addresses)}: {err}") from err
        self._agents: dict[str, AgentHandle] = {}
        self._leaving: list[AgentHandle] = []
        self._numbers = 0
        self._attendees: dict[int, Mapping[str, Any]] = {}
        self._hosts: dict[int, str] = {}
        self._end: End | None = None
        self._signal: int | None = None
        self._looked_s = time.monotonic()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._events.register(self._woken, selectors.EVENT_READ)

    def run(self, hosts: Hosts, ask: Callable[[], Hosts] | None) -> int:
        """Runs the job to its end; no process of it is left on hosts that can be reached.

        Args:
            hosts: with which to begin.
            ask: for all hosts, from now on; None = they stay.

        Returns:
            0, the exit code of the rank that failed first, or 128 + the signal that ended this process.
        """
        discovery = None if ask is None else Discovery(ask, on_answer=self._wake)
        with self._signals():
            try:
                self._do(self._members.found(hosts, time.monotonic()))
                while self._end is None and self._signal is None:
                    self._look(discovery)
            finally:
                if discovery is not None:
                    discovery.close()
                self._end_agents()
        if self._end is not None and self._signal is None:
            if self._end.text:
                self._output.say(self._end.text)
            return self._end.exit_code
        assert self._signal is not None
        return 128 + self._signal

    def _look(self, discovery: Discovery | None) -> None:
        """Waits for something to happen, and sees to it."""
        for chosen, _ in self._events.select(_TICK_S):
            if chosen.fileobj is self._woken:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            elif chosen.data is self._server:
                if (found := self._server.advance(chosen.fd)) is not None:
                    self._welcome(*found)
            else:
                self._hear(chosen.data)
        self._server.drop_late()
        while discovery is not None and (answer := discovery.take()) is not None:
            if isinstance(answer, LaunchError):
                self._output.say(f"host discovery script: {answer}; hosts stay as they are, it is asked again")
            else:
                self._do(self._members.found(answer, time.monotonic()))
        self._watch_agents()
        self._do(self._members.tick(time.monotonic()))

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def _watch_agents(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s > AGENT_SILENT_S / 2:  # this process was stopped, or the machine slept
            for agent in self._agents.values():
                agent.heard_s = now_s
        self._looked_s = now_s
        for agent in list(self._agents.values()):
            if agent.channel is None:
                if (code := agent.exit_code) is not None:
                    self._lose(agent, f"{os.path.basename(agent.program)} ended with exit code {code}")
                elif now_s - agent.started_s > self._job.agent_start_s:
                    self._lose(agent, f"its agent has not answered within {self._job.agent_start_s:g} s")
            else:
                if now_s - agent.heard_s > BEAT_S:
                    agent.channel.flush()
                if now_s - agent.heard_s > AGENT_SILENT_S:
                    self._lose(agent, f"it has been silent for {AGENT_SILENT_S:g} s")

    def _welcome(self, number: int, channel: JsonChannel) -> None:
        agent = next((each for each in self._agents.values() if each.number == number), None)
        if agent is None or agent.channel is not None:
            channel.close()
            return
        agent.channel, agent.heard_s = channel, time.monotonic()
        self._events.register(channel, selectors.EVENT_READ, agent)

    def _hear(self, agent: AgentHandle) -> None:
        if agent.channel is None or agent.channel.fileno() < 0:
            return
        agent.channel.flush()
        self._watch(agent)
        try:
            messages = agent.channel.receive()
        except ConnectionError:
            self._lose(agent, "its agent is gone")
            return
        agent.heard_s = now_s = time.monotonic()
        for message in messages:
            match message:
                case {"is": "up"}:
                    self._do(self._members.agent_up(agent.host, now_s))
                case {"is": "beat"}:
                    agent.channel.send({"do": "beat"})
                case {"is": "joined", "worker": int(worker), "has_state": bool(has_state), "attendee": dict(attendee)}:
                    if self._hosts.get(worker) == agent.host:
                        self._attendees[worker] = attendee
                        self._do(self._members.joined(worker, has_state=has_state, now_s=now_s))
                case {"is": "finished", "worker": int(worker)} if self._hosts.get(worker) == agent.host:
                    self._do(self._members.finished(worker, now_s))
                case {"is": "ended", "worker": int(worker), "exit_code": int(code), "reason": str(reason)}:
                    if self._hosts.pop(worker, None) == agent.host:
                        self._attendees.pop(worker, None)
                        self._do(self._members.ended(worker, RankEnd(exit_code=code, reason=reason), now_s))

    def _lose(self, agent: AgentHandle, why: str) -> None:
        """It is given up; if it lives, it ends its ranks and itself once it finds the connection closed."""
        if self._agents.get(agent.host) is agent:
            self._forget(agent)
            self._do(self._members.agent_lost(agent.host, why, time.monotonic()))

    def _forget(self, agent: AgentHandle) -> None:
        if agent.channel is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._events.unregister(agent.channel)
        self._agents.pop(agent.host, None)
        self._hosts = {worker: host for worker, host in self._hosts.items() if host != agent.host}
        agent.disconnect()
        self._leaving.append(agent)

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case StartAgent(host=host):
                    self._start_agent(host)
                case StopAgent(host=host):
                    if (agent := self._agents.get(host)) is not None:
                        self._send(host, {"do": "end"})
                        self._forget(agent)
                case StartRank(worker=worker, host=host, slot=slot):
                    self._hosts[worker] = host
                    self._send(host, {"do": "start", "worker": worker, "slot": slot})
                case KillRank(worker=worker, host=host, at_once=at_once):
                    self._send(host, {"do": "kill", "worker": worker, "at_once": at_once})
                case Dismiss(worker=worker, host=host):
                    self._send(host, {"do": "dismiss", "worker": worker})
                case Tell(workers=workers, change=change, lost=lost):
                    for host in {self._hosts[worker] for worker in workers}:
                        there = [worker for worker in workers if self._hosts[worker] == host]
                        self._send(host, {"do": "change", "workers": there, "change": change.value, "lost": lost})
                case Form():
                    self._announce(action)
                case Say(text=text):
                    self._output.say(text)
                case End():
                    self._end = action

    def _start_agent(self, host: str) -> None:
        self._numbers += 1
        job, number = self._job, self._numbers
        is_child = job.agents.is_child(host)
        config = {
            "host": host,
            "number": number,
            "places": self._server.places if is_child else self._server.places[1:] + self._server.places[:1],
            "secret": self._secret,
            "job": self._name,
            "command": job.command,
            "environ": {} if is_child else dict(job.carried),
            "folder": os.getcwd(),
            "hosts": "one" if job.one_host else "many",
        }
        words = job.agents.words(host, job.environ)
        try:
            self._agents[host] = AgentHandle(
                host, number, words, job.environ, json.dumps(config).encode() + b"\n", self._output.pump
            )
        except OSError as err:
            self._do(self._members.agent_lost(host, f"{words[0]} could not be run: {err}", time.monotonic()))

    def _announce(self, form: Form) -> None:
        workers = self._members.roll.workers
        generation = {
            "number": form.number,
            "members": [[workers[each].host, workers[each].slot, each in form.new] for each in form.workers],
            "attendees": [self._attendees[each] for each in form.workers],
        }
        for host in {workers[each].host for each in form.workers}:
            ranks = [[each, rank] for rank, each in enumerate(form.workers) if workers[each].host == host]
            self._send(host, {"do": "generation", "ranks": ranks, **generation})

    def _send(self, host: str, message: Mapping[str, Any]) -> None:
        agent = self._agents.get(host)
        if agent is not None and agent.channel is not None:
            agent.channel.send(message)
            self._watch(agent)

    def _watch(self, agent: AgentHandle) -> None:
        if agent.channel is not None and self._events.get_map().get(agent.channel) is not None:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if agent.channel.has_unsent else 0)
            self._events.modify(agent.channel, wanted, agent)

    def _end_agents(self) -> None:
        """Has all agents end their ranks and themselves, and waits for it, within limits."""
        for agent in self._agents.values():
            if agent.channel is not None:
                agent.channel.send({"do": "end"})
        deadline_s = time.monotonic() + KILL_GRACE_S + 2.0
        for agent in (*self._agents.values(), *self._leaving):
            agent.wait(deadline_s - time.monotonic())
        self._output.finish()
        self._server.close()
        self._events.close()
        for end in (self._woken, self._waker):
            end.close()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and SIGHUP end the job; outside the main thread Python permits no handlers."""

        def remember(number: int, frame: FrameType | None) -> None:
            del frame
            self._signal = number
            self._wake()

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous = {number: signal.signal(number, remember) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def first_answer(ask: Callable[[], Hosts]) -> Hosts:
    """What discovery says at the start, where a failure is the user's to mend.

    Raises:
        ConfigError: there is no answer.
    """
    try:
        return ask()
    except LaunchError as err:
        raise ConfigError(f"host discovery script: {err}") from err
