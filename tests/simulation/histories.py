"""Run a job with faults in simulated time, until it has ended or trains undisturbed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from simulation.faults import Fault, Kind, Plan, drawn, smallest
from simulation.judge import History, wrongs
from simulation.launchers import AgentProcess, DriverProcess
from simulation.network import Address, Network, Simulator
from simulation.ranks import Rank

from sirtaki.run.elastic.job_members import OnFailure, Policy

REST_S = 400.0
"""Time after the last fault within which a job must have ended, or train with all ranks that it may have."""

LASTING_COMMITS = 3


class World:
    """A simulated job: clock, network, processes and history."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.sim = Simulator(plan.seed)
        self.network = Network(self.sim)
        self.history = History()
        self.history.now_s = lambda: self.sim.now_s
        self.fixed_hosts = {f"h{number}": slots for number, slots in enumerate(plan.slots)}
        self.hosts = dict(self.fixed_hosts)
        self.dead_hosts: set[str] = set()
        self.is_stopping = False
        self.owners: dict[Address, int] = {}
        self.policy = Policy(
            start_ranks=plan.min_ranks,
            min_ranks=plan.min_ranks,
            max_ranks=plan.max_ranks,
            timeout_s=150.0,
            on_failure=OnFailure.DROP_HOST if plan.drops else OnFailure.REPLACE_RANK,
            cooldown_s=(5.0, 20.0),
            has_successors=plan.goes_on,
        )
        self.is_at_rest = False

    def play(self) -> None:
        """Run the job until it is at rest, or until its time is up."""
        DriverProcess(self, "h0", address=self.network.port("h0"))
        for fault in self.plan.faults:
            self.sim.later(fault.at_s, lambda fault=fault: self.strike(fault))
        ends_s = max([self.plan.calm_s, *(fault.at_s + fault.seconds for fault in self.plan.faults)])
        self.sim.later(ends_s, self.calm)
        if self.plan.finishes:
            self.sim.later(ends_s + 20.0, lambda: setattr(self, "is_stopping", True))
        until_s, polled_s = ends_s + REST_S, 0.0
        while self.sim.now_s < until_s and self.sim.step():
            if self.sim.now_s > ends_s + 1.0 and self.sim.now_s > polled_s + 1.0:
                polled_s = self.sim.now_s
                if self.is_over or self.has_settled():
                    break
        self.is_at_rest = self.is_over or self.has_settled()

    def calm(self) -> None:
        """Let lost hosts return, because no further fault occurs."""
        self.dead_hosts.clear()
        self.history.note("calm", "world")

    @property
    def is_over(self) -> bool:
        """Return whether no process of the job is alive."""
        return not any(process.alive for process in self.network.processes)

    def has_settled(self) -> bool:
        """Return whether all ranks that the job may have are in one generation and have committed several times."""
        if self.plan.finishes:
            return False
        alive = [each for each in self.network.processes if each.alive and isinstance(each, Rank)]
        drivers = [each for each in self.network.processes if each.alive and isinstance(each, DriverProcess)]
        if not alive or len(drivers) != 1:
            return False
        slots = sum(self.hosts.values())
        if len(alive) != min(slots, self.plan.max_ranks or slots):
            return False
        if len({rank.mesh.number if rank.mesh else 0 for rank in alive}) != 1:
            return False
        mesh = alive[0].mesh
        if mesh is None or mesh.size != len(alive):
            return False
        commits = [
            note.who for note in self.history.notes if note.what == "commit" and note.more["number"] == mesh.number
        ]
        return len(commits) >= LASTING_COMMITS * len(alive) and all(rank.worker in commits for rank in alive)

    # ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────

    def strike(self, fault: Fault) -> None:
        """Apply a fault."""
        self.history.note("fault", "world", kind=fault.kind.value, draw=fault.draw, seconds=fault.seconds)
        kind = {
            Kind.KILL_RANK: Rank, Kind.FREEZE_RANK: Rank, Kind.KILL_AGENT: AgentProcess,
            Kind.FREEZE_AGENT: AgentProcess, Kind.KILL_DRIVER: DriverProcess, Kind.FREEZE_DRIVER: DriverProcess,
        }.get(fault.kind)  # fmt: skip
        if kind is not None:
            there = [each for each in self.network.processes if each.alive and isinstance(each, kind)]
            if not there:
                return
            victim = there[min(int(fault.draw * len(there)), len(there) - 1)]  # `draw` may have been rounded to 1
            if fault.seconds:
                victim.freeze()
                self.sim.later(fault.seconds, victim.thaw)
            else:
                victim.exit(137)
            return
        rng = random.Random(fault.draw)
        hosts = sorted(self.fixed_hosts)
        some = frozenset(rng.sample(hosts, rng.randint(1, len(hosts) - 1)))
        others = frozenset(hosts) - some
        if fault.kind is Kind.HOST_VANISHES:
            self.vanish(rng.choice(hosts))
        elif fault.kind is Kind.BREAK:
            cables = [cable for cable in self.network.cables if all(end.is_open for end in cable.ends)]
            remote = [cable for cable in cables if len({end.owner.host for end in cable.ends}) == 2]
            if remote:
                rng.choice(remote).cut_off()
        elif fault.kind is Kind.PARTITION:
            self.network.part(some, others, fault.seconds)
            self.network.part(others, some, fault.seconds)
        elif fault.kind is Kind.ONE_WAY:
            self.network.part(some, others, fault.seconds)
        elif fault.kind is Kind.HOSTS:
            fewer = {host: rng.randint(1, 2) for host in hosts if rng.random() < 0.7}
            self.hosts = fewer or dict(self.fixed_hosts)

    def vanish(self, host: str) -> None:
        """Remove a host without notice to any process. It returns without its processes when faults end."""
        self.dead_hosts.add(host)
        for process in self.network.on(host):
            process.exit(silently=True)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one history.

    Attributes:
        plan: plan of the job.
        wrongs: violations, in words.
        ended: whether the job has ended; otherwise it trains.
        message: last message of the last driver that ended; "success" if it was empty.
        events: number of notes.
        history: all notes.
    """

    plan: Plan
    wrongs: tuple[str, ...]
    ended: bool
    message: str
    events: int
    history: History


def play(plan: Plan) -> Verdict:
    """Run a plan and judge its history."""
    world = World(plan)
    world.play()
    found = wrongs(world.history)
    if not world.is_at_rest:
        left = [process.name for process in world.network.processes if process.alive]
        found.append(f"it does not come to rest; there are {', '.join(left[:12])}")
    last = [note for note in world.history.notes if note.what == "end"]
    message = last[-1].more["text"] or "success" if last else ""
    return Verdict(plan, tuple(found), world.is_over, message, len(world.history.notes), world.history)


def explain(plan: Plan) -> str:
    """Reduce a plan that fails, and return the smallest plan with its history and violations."""
    small = smallest(plan, lambda fewer: bool(play(fewer).wrongs))
    verdict = play(small)
    return f"{small.encode()}\n{verdict.history}\n{'; '.join(verdict.wrongs)}"


def many(seeds: Sequence[int]) -> list[Verdict]:
    """Run plans from these seeds, and return the verdicts with violations."""
    return [verdict for verdict in map(play, map(drawn, seeds)) if verdict.wrongs]
