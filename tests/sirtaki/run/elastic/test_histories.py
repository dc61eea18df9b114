"""The rules of membership in random histories, against what must hold in every one of them."""

import heapq
import itertools
import random
from collections.abc import Callable

import pytest

from sirtaki.run.elastic.job_members import (
    Action,
    Dismiss,
    End,
    Form,
    HostPool,
    JobMembers,
    KillRank,
    OnFailure,
    Policy,
    RankEnd,
    StartAgent,
    StartRank,
    Tell,
)

KILLED = RankEnd(exit_code=137)
RAISED = RankEnd(exit_code=3, reason="ValueError: a bad batch")
WELL = RankEnd(exit_code=0)


class World:
    """Plays hosts, agents and ranks of a job at random, in simulated time, and looks at each thing that it is told.

    A rank joins some seconds after its start, synchronises some time after each generation has begun, leaves it at the
    next commit once it has been told of a change or a member is gone, and may die or stop at any moment.
    """

    FAULTS_S = 200.0
    """After it nothing fails any more, and the job must come to rest."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.min_ranks, self.max_ranks = rng.randint(1, 3), rng.choice([None, 3, 5])
        policy = Policy(
            start_ranks=self.min_ranks,
            min_ranks=self.min_ranks,
            max_ranks=self.max_ranks,
            timeout_s=200.0,
            on_failure=rng.choice(list(OnFailure)),
            cooldown_s=(5.0, 20.0),
        )
        self.members = JobMembers(policy, HostPool(policy, random.Random(seed)))
        self.hosts = {host: rng.randint(1, 3) for host in "abc"}
        self.ordinal = itertools.count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.now_s = 0.0
        self.phase: dict[int, str] = {}  # as the rank sees it
        self.place: dict[int, tuple[str, int]] = {}
        self.generation: dict[int, int] = {}
        self.state: dict[int, bool] = {}
        self.synced = False
        self.stopped: set[int] = set()
        self.order: tuple[int, ...] = ()
        self.end: End | None = None
        self.forms = 0
        self.finishes = seed % 3 == 0

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now_s + delay_s, next(self.ordinal), what))

    def play(self) -> None:
        self.later(0.0, lambda: self.do(self.members.found(self.hosts, self.now_s)))
        for at_s in range(1, 600):
            self.later(float(at_s), lambda: self.do(self.members.tick(self.now_s)))
        for _ in range(self.rng.randint(0, 25)):
            self.later(self.rng.uniform(0.0, self.FAULTS_S), self.disturb)
        self.later(self.FAULTS_S, self.calm)
        if self.finishes:
            self.later(self.FAULTS_S + 150.0, self.finish)
        while self.events and self.end is None:
            self.now_s, _, what = heapq.heappop(self.events)
            what()
        if self.finishes and self.now_s > self.FAULTS_S + 150.0:
            assert self.end == End(exit_code=0)
        if self.end is None:
            alive = {worker for worker, phase in self.phase.items() if phase == "member"}
            slots = sum(self.hosts.values())
            assert len(alive) == min(slots, self.max_ranks or slots)
            assert set(self.order) == alive

    def calm(self) -> None:
        self.hosts = self.hosts or {"a": 3}
        for worker in list(self.stopped):
            self.die(worker, KILLED)
        self.do(self.members.found(self.hosts, self.now_s))

    def finish(self) -> None:
        """The members have done their work; some of them see others end, and take it for a failure."""
        first, *others = [worker for worker in self.order if self.phase[worker] == "member"] or [0]
        if not first:  # too few are left, and the job is about to be given up
            self.finishes = False
            return
        self.do(self.members.finished(first, self.now_s))
        self.later(self.rng.uniform(0.0, 3.0), lambda: self.die(first, WELL))
        for worker in others:
            if self.rng.random() < 0.3:
                self.join(worker)
            else:
                self.later(self.rng.uniform(0.0, 3.0), lambda worker=worker: self.die(worker, WELL))

    def disturb(self) -> None:
        alive = [worker for worker, phase in self.phase.items() if phase != "gone"]
        what = self.rng.random()
        if what < 0.45 and alive:
            self.die(self.rng.choice(alive), self.rng.choice([KILLED, KILLED, RAISED]))
        elif what < 0.55 and alive:
            self.stopped.add(self.rng.choice(alive))
        elif what < 0.7 and self.members.agents:
            self.lose(self.rng.choice(list(self.members.agents)))
        else:
            self.hosts = {host: self.rng.randint(1, 3) for host in "abcd" if self.rng.random() < 0.7}
            self.do(self.members.found(self.hosts, self.now_s))

    def lose(self, host: str) -> None:
        for worker, phase in self.phase.items():
            if phase != "gone" and self.place[worker][0] == host:
                self.bury(worker)
        self.do(self.members.agent_lost(host, "it is silent", self.now_s))

    def bury(self, worker: int) -> None:
        self.phase[worker] = "gone"
        self.stopped.discard(worker)
        if worker in self.order:  # those who communicate with it notice
            for other in self.order:
                self.later(
                    self.rng.uniform(0.0, 2.0), lambda other=other, own=self.generation[other]: self.leave(other, own)
                )

    def die(self, worker: int, how: RankEnd) -> None:
        if self.phase[worker] != "gone":
            self.bury(worker)
            self.do(self.members.ended(worker, how, self.now_s))

    def leave(self, worker: int, generation: int) -> None:
        if worker in self.stopped or self.phase[worker] != "member" or self.generation[worker] != generation:
            return
        self.join(worker)

    def join(self, worker: int) -> None:
        if self.phase[worker] != "gone" and worker not in self.stopped:
            self.phase[worker] = "waiting"
            self.do(self.members.joined(worker, has_state=self.state[worker], now_s=self.now_s))

    def sync(self, members: tuple[int, ...], number: int) -> None:
        here = [worker for worker in members if self.phase[worker] == "member" and self.generation[worker] == number]
        if len(here) == len(members) and not self.stopped & set(members):
            self.synced = True
            self.state.update(dict.fromkeys(members, True))

    def do(self, actions: list[Action]) -> None:
        assert self.end is None or not actions
        for action in actions:
            match action:
                case StartAgent():
                    self.later(
                        self.rng.uniform(0.1, 1.0),
                        lambda host=action.host: self.do(self.members.agent_up(host, self.now_s)),
                    )
                case StartRank():
                    taken = {self.place[worker] for worker, phase in self.phase.items() if phase != "gone"}
                    assert (action.host, action.slot) not in taken
                    assert action.host in self.members.agents
                    worker = action.worker
                    self.phase[worker], self.state[worker], self.generation[worker] = "starting", False, 0
                    self.place[worker] = action.host, action.slot
                    self.later(self.rng.uniform(1.0, 5.0), lambda worker=worker: self.join(worker))
                case KillRank():
                    self.later(0.01, lambda worker=action.worker: self.die(worker, KILLED))
                case Dismiss():
                    assert self.phase[action.worker] == "waiting"
                    self.later(0.5, lambda worker=action.worker: self.die(worker, WELL))
                case Tell():
                    for worker in action.workers:
                        own = self.generation[worker]
                        self.later(self.rng.uniform(0.0, 2.0), lambda worker=worker, own=own: self.leave(worker, own))
                case Form():
                    self.begin(action)
                case End():
                    self.end = action
                    assert action.exit_code or self.now_s > self.FAULTS_S + 150.0

    def begin(self, form: Form) -> None:
        """What must hold whenever a generation begins."""
        self.forms += 1
        assert form.number == self.forms
        assert all(self.phase[worker] == "waiting" or worker in self.stopped for worker in form.workers)
        assert not [
            worker for worker in self.order if self.phase[worker] == "member"
        ]  # nobody is still in the last one
        assert self.min_ranks <= len(form.workers) <= (self.max_ranks or 99)
        assert [member.is_new for member in form.members] == [not self.state[worker] for worker in form.workers]
        assert not self.synced or self.state[form.workers[0]]
        hosts = [self.place[worker][0] for worker in form.workers]
        assert len([host for host, _ in itertools.groupby(hosts)]) == len(set(hosts))
        for host in set(hosts):
            old = [w for w in form.workers if self.place[w][0] == host and self.state[w]]
            assert old == [w for w in self.order if w in old] + [w for w in old if w not in self.order]
        self.order = form.workers
        for worker in form.workers:
            self.phase[worker], self.generation[worker] = "member", form.number
        self.later(self.rng.uniform(0.1, 1.0), lambda: self.sync(form.workers, form.number))


@pytest.mark.parametrize("block", range(2))
def test_random_histories_keep_the_rules_and_come_to_rest(block: int) -> None:
    endings = 0
    for seed in range(30 * block, 30 * block + 30):
        world = World(seed)
        world.play()
        endings += world.end is not None
    assert endings < 25  # most of them go on


@pytest.mark.slow
@pytest.mark.parametrize("block", range(50))
def test_many_random_histories(block: int) -> None:
    for seed in range(10_000 + 200 * block, 10_000 + 200 * block + 200):
        World(seed).play()
