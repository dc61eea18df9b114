"""The rules of membership of a job whose ranks come and go.

Pure: what happens is told with its time, and what is to be done comes back. Whoever asks for a generation waits in
`join` until there is one, so that two members never believe in different generations of one number: a generation begins
only when every member of the one before has asked, ended or been killed.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from .actions import Action, Dismiss, End, Form, KillRank, Say, Settle
from .endings import Endings
from .host_pool import HostPool
from .losses import Losses
from .news import announcement, difference, ordinal
from .policy import Policy
from .quorum import Quorum
from .roll import Roll
from .staffing import Staffing
from .tidings import Tidings
from .workers import Phase, RankEnd, Worker, ranked


class JobMembers:
    """Decides who starts, who belongs to the next generation, who is given up, and when the job has ended.

    Each method tells of an event, in the order in which they have happened, and returns what is to be done about it.
    """

    def __init__(self, policy: Policy, pool: HostPool) -> None:
        self.policy, self.pool = policy, pool
        self.roll = Roll()
        self.is_over = self._defers = False
        self._actions: list[Action] = []
        self._staffing = Staffing(policy, pool, self.roll)
        self._tidings = Tidings()
        self._endings = Endings(policy)
        self._losses = Losses(policy, pool, self.roll, self._endings)
        self._quorum = Quorum()
        self._enough_since_s: float | None = None
        self._longest_s = 0.0

    def take_over(
        self,
        workers: Sequence[Worker],
        agents: Sequence[str],
        generation: int,
        members: Sequence[int],
        older: Sequence[Sequence[int]] = (),
        *,
        has_state: bool = False,
    ) -> bool:
        """Before anything else: goes on where another driver has been lost.

        Args:
            workers: the processes that are there, of all agents that can be reached.
            agents: their hosts.
            generation: the newest that any of them knows.
            members: of it, by rank.
            older: see `Quorum`.
            has_state: when it began somebody held the job's state: without that nobody goes on.

        Returns:
            Whether this is the side of a network that may have come apart which goes on. Before the first generation
            there is no such side.
        """
        self.agents.update(dict.fromkeys(agents, True))
        self._tidings.lose("the driver was lost")
        self._endings.fail("the driver", RankEnd(exit_code=1, reason="it was lost"))
        self.roll.take_over(workers, generation, members)
        self.roll.has_state = self.roll.has_state or has_state
        self._quorum.take_over([*older, members], generation, self.roll.workers)
        return bool(generation) and not self._quorum.is_lost

    def found(self, hosts: Mapping[str, int], now_s: float) -> list[Action]:
        """Discovery says which hosts there are, with how many slots each."""
        before = self.pool.known
        self.pool.find(hosts)
        if before and before != self.pool.known:
            self._say(difference(before, self.pool.known))
        return self._settle(now_s)

    def agent_up(self, host: str, now_s: float) -> list[Action]:
        """The agent of that host can start ranks."""
        if host in self.agents:
            self.agents[host] = True
        return self._settle(now_s)

    def agent_lost(self, host: str, why: str, now_s: float) -> list[Action]:
        """The agent of that host, and all its ranks, are gone or cannot be reached."""
        if self.agents.pop(host, None) is None or self.is_over:
            return []
        lost = [worker for worker in self.roll.workers.values() if worker.host == host]
        for worker in lost:
            del self.roll.workers[worker.number]
        self._tidings.lose(f"host {host} is lost ({why})")
        self._say(self._losses.of_host(host, lost, why, now_s))
        self._quorum.lose([worker.number for worker in lost])
        if self.policy.has_heirs and self._quorum.is_lost and not self.roll.has_succeeded:
            self._end(self._endings.outvoted())
        return self._settle(now_s)

    def told(self, host: str, number: int, now_s: float) -> list[Action]:
        """The agent of that host has been told of that generation, and its ranks with it."""
        self._quorum.inform(number, lambda worker: self.roll.is_of(host, worker))
        return self._settle(now_s)

    def joined(self, number: int, *, has_state: bool, now_s: float) -> list[Action]:
        """A process asks for the generation after the one that it was in."""
        worker = self.roll.workers.get(number)
        if worker is None or self.is_over:
            return []
        if worker.phase in (Phase.DISMISSED, Phase.FINISHED):
            self._actions.append(Dismiss(worker=number, host=worker.host))
        else:
            worker.has_state = worker.has_state or has_state
            self.roll.has_state = self.roll.has_state or has_state
            worker.enter(Phase.WAITING, now_s)
        return self._settle(now_s)

    def slow(self, seconds: float) -> None:
        """A process has computed for so long without looking for changes: others, too, may take so long."""
        self._longest_s = max(self._longest_s, seconds)

    @property
    def agents(self) -> dict[str, bool]:
        """By host; False = being started."""
        return self._staffing.agents

    @property
    def _leave_s(self) -> float:
        """How long a member may take to leave its generation."""
        return max(self.policy.leave_s, min(2 * self._longest_s, self.policy.timeout_s))

    def finished(self, number: int, now_s: float) -> list[Action]:
        """A process has done its work; it may still live for a while."""
        worker = self.roll.workers.get(number)
        if worker is not None and worker.phase is Phase.MEMBER:
            worker.enter(Phase.FINISHED, now_s)
            self.roll.has_succeeded = True
        return self._settle(now_s)

    def ended(self, number: int, end: RankEnd, now_s: float) -> list[Action]:
        """A process is there no more."""
        worker = self.roll.workers.pop(number, None)
        if worker is None or self.is_over:
            return []
        self._quorum.died(number)
        if worker.phase is Phase.MEMBER:
            self._tidings.lose(f"{worker.label} {end.text}")
        if worker.phase is Phase.FINISHED and end.exit_code:
            self._say(f"{worker.label} {end.text}, but it had done its work")
        elif worker.phase is Phase.MEMBER and end.exit_code == 0 and not worker.is_leaving:
            self.roll.has_succeeded = True
        elif worker.phase not in (Phase.DISMISSED, Phase.FINISHED):
            self._lose(worker, end, now_s)
        return self._settle(now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Time has passed; to be told often, as limits are looked after here."""
        return self._settle(now_s)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """What is told within has happened at once: what follows is decided by the next `tick`, and once.

        A decision looks at all ranks; one for each of a thousand that ask at the same time would take many seconds.
        """
        self._defers = True
        try:
            yield
        finally:
            self._defers = False

    def _lose(self, worker: Worker, end: RankEnd, now_s: float) -> None:
        """A process has failed, or ended before it was a member."""
        if end.exit_code == 0:
            self._endings.ended_well = True
            if self.roll.generation == 0:
                return
            end = RankEnd(exit_code=1, reason="it ended before it was a member")
        self._say(self._losses.of_worker(worker, end, now_s, may_start=self._may_start))

    def _may_start(self) -> bool:
        """Whether a rank that starts now would find anybody who goes on with it."""
        if self.roll.has_succeeded or (self._endings.ended_well and not self.roll.generation):
            return False
        if self.roll.generation == 0:
            return not self._endings.ended_badly or bool(self.roll.present(Phase.WAITING))
        return bool(self.roll.of_generation(Phase.MEMBER, Phase.WAITING))

    def _settle(self, now_s: float) -> list[Action]:
        """Decides all that follows from what is known."""
        if self._defers:
            return []
        if not self.is_over:
            for host in self.pool.take_back(now_s):
                self._say(f"host {host} is used again")
            self._actions += self._staffing.send_away(now_s)
            self._end(self._endings.reached(self.roll, agents=self.agents, slots=sum(self.pool.usable.values())))
        if not self.is_over:
            if self._may_start():
                self._actions += self._staffing.take_on(now_s)
            self._advance(now_s)
        if not self.is_over:
            if (news := self._tidings.news(self.roll)) is not None:
                self._actions.append(news)
            if self._quorum.settle() and self.policy.has_heirs:
                self._actions.append(Settle(number=self.roll.generation, older=self._quorum.older))
            self._end(self._endings.in_vain(self.roll, now_s))
        actions, self._actions = self._actions, []
        return actions

    def _advance(self, now_s: float) -> None:
        """Begins the next generation once all members of this one have left it."""
        roll = self.roll
        if roll.is_running:
            asked = [worker.since_s for worker in roll.of_generation(Phase.WAITING)]
            if asked and now_s - min(asked) > self._leave_s:
                for worker in roll.of_generation(Phase.MEMBER):
                    if not worker.verdict:
                        worker.verdict = f"did not leave its generation within {self._leave_s:g} s and was killed"
                        self._actions.append(KillRank(worker=worker.number, host=worker.host, at_once=True))
            return
        if roll.has_succeeded:
            return  # those who have done their work have not ended yet
        candidates = roll.candidates(self.policy.max_ranks)
        if roll.has_state and not any(worker.has_state for worker in candidates):
            if not any(worker.has_state for worker in roll.workers.values()):
                self._end(self._endings.without_state())
            return
        if len(candidates) < (self.policy.min_ranks if roll.generation else self.policy.start_ranks):
            self._enough_since_s = None
            return
        self._enough_since_s = now_s if self._enough_since_s is None else self._enough_since_s
        coming = any(not worker.is_leaving for worker in roll.present(Phase.STARTING)) or not all(self.agents.values())
        if not roll.generation and coming and now_s - self._enough_since_s < self.policy.start_grace_s:
            return
        if self.policy.has_heirs and not self._quorum.permits([worker.number for worker in candidates]):
            return  # those who are dismissed have not ended yet
        if self.policy.reset_limit is not None and roll.generation > self.policy.reset_limit:
            limit = self.policy.reset_limit
            again = f"the job would begin anew for the {ordinal(limit + 1)} time"
            self._end(End(exit_code=1, text=f"--reset-limit {limit}: {again}"))
            return
        self._form(candidates, now_s)

    def _form(self, candidates: list[Worker], now_s: float) -> None:
        roll = self.roll
        members = ranked(candidates, list(self.pool.known))
        roll.begin(members, now_s)
        new = frozenset(worker.number for worker in members if not worker.has_state)
        self._quorum.begin(roll.generation, roll.members)
        older = self._quorum.older if self.policy.has_heirs else None
        self._actions.append(Form(number=roll.generation, workers=roll.members, new=new, older=older))
        self._say(announcement(roll.generation, members, new))
        self._tidings.begin()
        self._enough_since_s = None
        self._endings.begin()

    def _end(self, end: End | None) -> None:
        if end is not None:
            self.is_over = True
            for worker in self.roll.present(Phase.WAITING):
                self._actions.append(Dismiss(worker=worker.number, host=worker.host))
            self._actions.append(end)

    def _say(self, text: str) -> None:
        self._actions.append(Say(text=text))
