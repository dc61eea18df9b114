"""Drivers and agents in simulated time. They run the product's rules, with simulated actions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from simulation.network import Address, End, Process

from sirtaki.engine.membership import Proof, ToRank
from sirtaki.run.elastic.agent import CONNECT_S, AgentRules, candidates, expected_by_successor
from sirtaki.run.elastic.driver import AgentList, AgentRecord
from sirtaki.run.elastic.job_members import (
    KILL_GRACE_S,
    AgentAddress,
    AgentMessage,
    EndAll,
    FormGeneration,
    FromAgent,
    JobMembers,
    Lost,
    RankEnd,
    RegisterAgent,
    ToAgent,
    has_waited,
)

if TYPE_CHECKING:
    from simulation.histories import World

KEY = "agents"
DRIVER = 0
TICK_S = 0.5
POLL_S = 0.02


class SimulatedAgent(AgentRecord):
    """An agent, as its driver sees it."""

    code: int | None = None

    def why_ended(self) -> str:
        return "" if self.code is None else f"ssh ended with exit code {self.code}"


class DriverProcess(Process):
    """The driver: the launcher, or a successor that an agent has started."""

    def __init__(
        self,
        world: World,
        host: str,
        *,
        address: Address,
        expected: list[int] | None = None,
        numbers: int = 0,
    ) -> None:
        super().__init__(world.network, host, "driver")
        self.world, self.address = world, address
        self.network.listeners[address] = self
        self.process = self
        policy = world.policy
        self.agent_list: AgentList = AgentList(
            expected=expected or [],
            numbers=numbers,
            start_s=60.0,
            shares=world.plan.goes_on,
            now_s=self.sim.now_s,
        )
        rng = random.Random(self.sim.rng.random())
        self.members = JobMembers(policy, self, lambda text: world.history.note("say", self.name, text=text), rng)
        self._events: list[AgentMessage | Lost] | None = None
        self._heard: list[AgentMessage | Lost] = []
        self._reports: dict[str, RegisterAgent] = {}
        self._asked: Mapping[str, int] = {}
        self._closing = False
        if expected is None:
            self._run(world.hosts)
        else:
            self._events = []
            self._begun_s = self.sim.now_s
        self.later(TICK_S, self._tick)

    # ── see Crew ─────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def hosts(self) -> list[str]:
        return self.agent_list.hosts

    def start(self, host: str) -> None:
        number = self.agent_list.next_number()
        record = self.agent_list.agents[host] = SimulatedAgent(host, number, now_s=self.sim.now_s)

        def begin() -> None:
            if host in self.world.dead_hosts or self.network.cut(self.host, host) or self.network.cut(host, self.host):
                self.later(15.0, lambda: setattr(record, "code", 255))
            else:
                AgentProcess(self.world, host, number=number, driver=self.address)

        self.later(self.sim.rng.uniform(0.1, 1.0), begin)

    def stop(self, host: str) -> None:
        self.agent_list.stop(host)

    def send_to(self, hosts: Iterable[str], message: ToAgent) -> None:
        if isinstance(message, FormGeneration):
            places = [(member.node, not member.has_state) for member in message.members]
            limits = self.world.policy.min_ranks, self.world.policy.max_ranks
            self.world.history.note("formed", "driver", workers=message.workers, places=places, limits=limits)
        self.agent_list.send_to(hosts, message)

    def broadcast_agents(self) -> None:
        self.agent_list.broadcast_agents()

    # ── see Listener ─────────────────────────────────────────────────────────────────────────────────────────────

    def offer(self, key: str, own: int, other: int, end: End) -> bool:
        if key != KEY or other != DRIVER or self._closing or not self.agent_list.wants(own):
            return False
        agent = self.agent_list.awaited(own) or SimulatedAgent("", own, now_s=self.sim.now_s)
        agent.channel, agent.heard_s = end, self.sim.now_s
        end.on_message = lambda message: self._hear(self.agent_list.receive(agent, message, self.sim.now_s))
        end.on_close = lambda: self._hear(*self.agent_list.lose(agent, self.sim.now_s))
        return True

    # ── see Driver ───────────────────────────────────────────────────────────────────────────────────────────────

    def _hear(self, *events: AgentMessage | Lost | None) -> None:
        for event in events:
            if event is None or self._closing:
                continue
            if self._events is None:
                if not self._heard:
                    self.later(self.sim.rng.uniform(0.0, POLL_S), self._answer)
                self._heard.append(event)
            elif isinstance(event, AgentMessage) and isinstance(event.message, RegisterAgent):
                self._reports[event.host] = event.message
            else:
                self._events.append(event)

    def _answer(self) -> None:
        heard, self._heard = self._heard, []
        if not self._closing:
            self.members.answer(heard, self.sim.now_s)
            self._exit_if_done()

    def _tick(self) -> None:
        if self._closing:
            return
        self._hear(*self.agent_list.tick(self.sim.now_s))
        if self._events is not None:
            if has_waited(self.sim.now_s - self._begun_s, self._reports, self.agent_list.expected):
                self._take_over(self._events)
        else:
            if self.world.plan.discovers and self.world.hosts != self._asked:
                self._asked = dict(self.world.hosts)
                self.members.found(self._asked, self.sim.now_s)
            self.members.tick(self.sim.now_s)
        self._exit_if_done()
        self.later(TICK_S, self._tick)

    def _run(self, hosts: Mapping[str, int]) -> None:
        self._events = None
        self._asked = dict(hosts)
        self.members.found(hosts, self.sim.now_s)

    def _take_over(self, later: list[AgentMessage | Lost]) -> None:
        self.agent_list.expect_no_more()
        if not self.members.take_over(self._reports, self.sim.now_s):
            self.world.history.note("say", self.name, text="too few to continue")
            self._close(1)
            return
        self.world.history.note("takes over", self.name, hosts=self.hosts)
        self.broadcast_agents()
        self._events = None
        self.members.answer(later, self.sim.now_s)
        self._run(self.world.fixed_hosts)

    def _exit_if_done(self) -> None:
        if self.members.end is not None and not self._closing:
            self.world.history.note("end", self.name, code=self.members.end.exit_code, text=self.members.end.text)
            self._close(self.members.end.exit_code)

    def _close(self, code: int) -> None:
        self._closing = True
        self.send_to(self.hosts, EndAll())
        self.later(KILL_GRACE_S + 2.0, lambda: self.exit(code))


class AgentProcess(Process):
    """The agent of a host, parent of its ranks."""

    def __init__(self, world: World, host: str, *, number: int, driver: Address) -> None:
        super().__init__(world.network, host, f"agent {number}")
        self.world, self.number = world, number
        self.rules = AgentRules(self, host=host, proof=Proof(job="job", secret=""), now_s=self.sim.now_s)
        self.place = self.network.port(host)
        self.channels: dict[int, End] = {}
        self._driver: End | None = None
        self._successor: DriverProcess | None = None
        self._waiting: list[Callable[[], None]] | None = []
        self._reach([driver], CONNECT_S, self._met)

    def _met(self, end: End | None) -> None:
        if end is None:
            self.exit(1)
            return
        self.later(TICK_S, self._tick)
        self._meet(end)

    def _meet(self, end: End) -> None:
        self._driver = end
        end.on_message = lambda message: self._does(lambda: self.rules.driver_message(message, self.sim.now_s))
        end.on_close = lambda: self._does(lambda: self._lose_driver(end))
        places = [self.place] if self.world.plan.goes_on else []
        self.rules.meet_driver(places, self.sim.now_s)
        waiting, self._waiting = self._waiting or [], None
        for what in waiting:
            self._does(what)

    def _does(self, what: Callable[[], None]) -> None:
        """Run `what` now, or after the agent has found a driver."""
        if self._waiting is not None:
            self._waiting.append(what)
        else:
            what()
            self._exit_if_done()

    def _exit_if_done(self) -> None:
        if self.rules.ends and not self.rules.ranks and self.alive:
            self.exit(0)

    def _tick(self) -> None:
        if self._waiting is None:
            has_driver = self.rules.tick(self.sim.now_s)
            if not has_driver and self._driver is not None and self._driver.is_open:
                self._lose_driver(self._driver)
            self._exit_if_done()
        self.later(TICK_S, self._tick)

    def _lose_driver(self, end: End) -> None:
        if end is not self._driver:
            return
        end.close()
        self._driver = None
        if self.rules.ends or not self.world.plan.goes_on:
            self.rules.end(self.sim.now_s)
            return
        self._waiting = []
        self._try(list(candidates(self.rules.agents, self.number)))

    def _try(self, left: list[tuple[int, Sequence[AgentAddress], float]]) -> None:
        if not left:
            waiting, self._waiting = self._waiting or [], None
            self.rules.end(self.sim.now_s)
            for what in waiting:
                self._does(what)
            self._exit_if_done()
            return
        (number, places, timeout_s), *rest = left
        if number == self.number and (self._successor is None or not self._successor.alive):
            self._successor = DriverProcess(
                self.world,
                self.host,
                address=self.place,
                expected=list(expected_by_successor(self.rules.agents, self.number)),
                numbers=max(number for number, _ in self.rules.agents),
            )
        self._reach(
            [(host, port) for host, port in places],
            timeout_s,
            lambda end: self._try(rest) if end is None else self._meet(end),
        )

    def _reach(self, places: list[Address], timeout_s: float, then: Callable[[End | None], None]) -> None:
        deadline_s = self.sim.now_s + timeout_s

        def attempt() -> None:
            if self.sim.now_s >= deadline_s:
                then(None)
            else:
                self.network.connect(self, places[0], key=KEY, own=self.number, other=DRIVER, then=reached)

        def reached(end: End | None) -> None:
            if end is not None:
                then(end)
            else:
                self.later(0.2, attempt)

        attempt()

    # ── what the rules have done ──────────────────────────────────────────────────────────────────────────────────────

    def start_rank(self, worker: int, slot: int) -> None:
        from simulation.ranks import Rank

        rank = Rank(self.world, self.host, worker)
        self.children.append(rank)
        own, its = self.network.cable(self, rank)
        self.channels[worker] = own
        rank.begin(its)
        own.on_message = lambda message: self._does(lambda: self.rules.rank_message(worker, message))
        own.on_close = lambda: self._does(lambda: self._reap(worker, rank))

    def _reap(self, worker: int, rank: Process) -> None:
        del self.channels[worker]
        self.children.remove(rank)
        code = rank.exit_code if rank.exit_code is not None else 137
        self.rules.rank_ended(worker, RankEnd(exit_code=code))

    def ask_to_end(self, worker: int) -> None:
        rank = next(each for each in self.children if each.name == f"worker {worker}")
        rank.later(self.sim.rng.uniform(0.0, 0.5), lambda: rank.exit(143))

    def kill(self, worker: int) -> None:
        for each in self.children:
            if each.name == f"worker {worker}":
                each.exit(137)

    def send_to_rank(self, worker: int, message: ToRank) -> None:
        if worker in self.channels:
            self.channels[worker].send(message)

    def send_to_driver(self, message: FromAgent) -> None:
        if self._driver is not None:
            self._driver.send(message)
