"""The rules of membership of an elastic job: who starts, who is a member, who is given up, when the job has ended.

The messages between a driver and its agents are the events and the orders of these rules: what agents say comes in as
it is, and what the rules want done goes to the agent of a host as it is. No socket, process or clock is known here.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from msgspec import Struct

from sirtaki.comm.control.mesh_rendezvous import Attendee
from sirtaki.engine.membership import Change, Changed, Dismissal, Finished, FromRank, Join, Member, Patience
from sirtaki.machine import signal_name


class Phase(Enum):
    """What a process is doing, from its start to its end."""

    STARTING = "starting"  # it has not asked for a generation yet
    WAITING = "waiting"  # it has
    MEMBER = "member"  # it was given one
    FINISHED = "finished"  # it has done its work
    DISMISSED = "dismissed"  # it was told, or made, to end


NOWHERE = Attendee(host=(), places=())


@dataclass(slots=True, kw_only=True)
class Worker:
    """A process of the job that has been started and has not ended.

    Attributes:
        number: names it in this job.
        rank: in the generation that it is or was in last; None = in none.
        generation: that one's number, 0 = none.
        has_state: it holds the job's state.
        is_leaving: it is not wanted any more.
        since_s: when its phase began.
        verdict: why it was killed, as part of a sentence; "" = it was not.
        attendee: where it listens, while it waits.
    """

    number: int
    host: str
    slot: int
    phase: Phase = Phase.STARTING
    rank: int | None = None
    generation: int = 0
    has_state: bool = False
    is_leaving: bool = False
    since_s: float = 0.0
    verdict: str = ""
    attendee: Attendee = NOWHERE

    @property
    def label(self) -> str:
        """Names the process to the user, by rank, host and slot."""
        who = "a new rank" if self.rank is None else f"rank {self.rank}"
        return f"{who} (host {self.host}, slot {self.slot})"

    def enter(self, phase: Phase, now_s: float) -> None:
        """From now on it is in that phase."""
        self.phase, self.since_s = phase, now_s


def seniority(worker: Worker) -> tuple[bool, int, int, int]:
    """Sorts those first that hold the state, of the newest generation, in the order of its ranks; new ones by age."""
    return not worker.has_state, -worker.generation, 0 if worker.rank is None else worker.rank, worker.number


def ranked(workers: Iterable[Worker], hosts: Sequence[str]) -> list[Worker]:
    """The order of ranks: ranks of a host are neighbours; who holds the state comes first and keeps its order.

    Args:
        workers: the members to be.
        hosts: the order of hosts, as far as state and former ranks do not say otherwise.
    """
    place = {host: number for number, host in enumerate(hosts)}

    def own(worker: Worker) -> tuple[bool, int, int, int, int]:
        return *seniority(worker)[:3], place.get(worker.host, len(place)), worker.slot

    ordered = sorted(workers, key=own)
    first: dict[str, int] = {}
    for number, worker in enumerate(ordered):
        first.setdefault(worker.host, number)
    return sorted(ordered, key=lambda worker: first[worker.host])  # stable


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How a process has ended.

    Attributes:
        exit_code: as a shell has it, 128 + the signal's number.
        reason: what it has said of it, or what its agent has seen; "" = nothing.
    """

    exit_code: int
    reason: str = ""

    @property
    def is_signal(self) -> bool:
        """It was killed."""
        return self.exit_code > 128

    @property
    def text(self) -> str:
        """Says how the process ended, as part of a sentence."""
        if self.is_signal:
            return f"was killed by {signal_name(self.exit_code - 128)}"
        if not self.exit_code:
            return "ended"
        return f"failed ({self.reason or f'exit code {self.exit_code}'})"


COOLDOWN_S = (30.0, 600.0)
"""How long a host is left out where failed ranks are replaced in place, unless the user says otherwise."""


class OnFailure(Enum):
    """What becomes of the place of a rank that has failed."""

    REPLACE_RANK = "replace-rank"
    DROP_HOST = "drop-host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What holds for the whole job.

    Attributes:
        start_ranks: how many the first generation waits for.
        min_ranks: below it nobody goes on.
        max_ranks: above it nobody is started; None = as many as there are slots.
        timeout_s: how long to wait for enough ranks.
        reset_limit: how many generations may follow the first one; None = any number.
        on_failure: what becomes of a failed rank's place.
        cooldown_s: shortest and longest time that a dropped host is left out; None = for good.
        leave_s: how long a member may take to ask for the next generation after another one has (or twice the longest
            time that any rank has computed without looking for changes, up to `timeout_s`), and a rank that is
            dismissed to end; then it is killed.
        start_grace_s: how long the first generation waits for ranks that are starting, once enough are there.
        strikes: failures in a row, of ranks that had not trained for long, after which a host is dropped.
        has_successors: where the driver is lost an agent starts another one, so that of two sides one has to end.
        hosts_stay: there will never be others.
        settled_s: a rank that has trained for so long has cleared its host's failures.
    """

    start_ranks: int
    min_ranks: int
    max_ranks: int | None = None
    timeout_s: float = 600.0
    reset_limit: int | None = None
    on_failure: OnFailure = OnFailure.REPLACE_RANK
    cooldown_s: tuple[float, float] | None = None
    leave_s: float = 30.0
    start_grace_s: float = 10.0
    strikes: int = 3
    settled_s: float = 60.0
    has_successors: bool = False
    hosts_stay: bool = False


LeftOut = dict[str, tuple[int, float | None]]
"""By host how often it has been dropped, and for how many seconds it is left out; None = for good."""


@dataclass(slots=True)
class _Record:
    """Failures of a host, and until when it is left out for them."""

    strikes: int = 0
    drops: int = 0
    until_s: float = 0.0
    is_dropped: bool = False


class HostPool:
    """Hosts that discovery has found, oldest first, without those left out for their failures."""

    def __init__(self, policy: Policy, rng: random.Random) -> None:
        self._policy, self._rng = policy, rng
        self._found: dict[str, int] = {}
        self._records: dict[str, _Record] = {}

    def find(self, hosts: Mapping[str, int]) -> None:
        """What discovery says now, by host its slots; hosts keep their order, however it is told."""
        kept = {host: hosts[host] for host in self._found if host in hosts}
        self._found = kept | {host: slots for host, slots in hosts.items() if host not in kept}

    @property
    def usable(self) -> dict[str, int]:
        """Slots by host."""
        return {host: slots for host, slots in self._found.items() if not self._record(host).is_dropped}

    @property
    def known(self) -> dict[str, int]:
        """Slots by host, dropped ones too."""
        return dict(self._found)

    def strike(self, host: str) -> bool:
        """A rank has failed there before it had done much; whether that was once too often."""
        record = self._record(host)
        record.strikes += 1
        return record.strikes >= self._policy.strikes

    def clear(self, host: str) -> None:
        """A rank has done well there."""
        self._record(host).strikes = 0

    def drop(self, host: str, now_s: float) -> float | None:
        """Leaves the host out.

        Returns:
            For how many seconds: twice as long each time, and up to a tenth more or less; None = for good.
        """
        record = self._record(host)
        record.is_dropped, record.strikes = True, 0
        record.drops += 1
        if self._policy.cooldown_s is None:
            record.until_s = float("inf")
            return None
        shortest_s, longest_s = self._policy.cooldown_s
        wanted_s = shortest_s * 2.0 ** min(record.drops - 1, 30) * self._rng.uniform(0.9, 1.1)
        cooldown_s = min(longest_s, max(shortest_s, wanted_s))
        record.until_s = now_s + cooldown_s
        return cooldown_s

    def take_back(self, now_s: float) -> list[str]:
        """Hosts that have been left out for long enough, and from now on are not any more."""
        back = [host for host in self._found if self._record(host).is_dropped and now_s >= self._record(host).until_s]
        for host in back:
            self._record(host).is_dropped = False
        return back

    def left_out(self, now_s: float) -> LeftOut:
        """The hosts that are left out now."""
        return {
            host: (record.drops, None if record.until_s == float("inf") else max(0.0, record.until_s - now_s))
            for host, record in self._records.items()
            if record.is_dropped
        }

    def remember(self, left_out: LeftOut, now_s: float) -> None:
        """What `left_out` of another driver has said."""
        for host, (drops, left_s) in left_out.items():
            record = self._record(host)
            record.is_dropped, record.drops = True, drops
            record.until_s = float("inf") if left_s is None else now_s + left_s

    def _record(self, host: str) -> _Record:
        return self._records.setdefault(host, _Record())


@dataclass(slots=True, kw_only=True)
class _Ballot:
    """A generation that somebody may believe to be the newest.

    Attributes:
        members: by rank.
        dead: of them, for certain.
        unreachable: of them, dead or not.
        informed: those whose agents know of a newer one.
    """

    number: int
    members: Sequence[int]
    dead: set[int] = field(default_factory=set)
    unreachable: set[int] = field(default_factory=set)
    informed: set[int] = field(default_factory=set)

    def is_decided_by(self, workers: Set[int]) -> bool:
        """Whether these members of it would go on without the others."""
        twice = 2 * len(workers)
        return twice > len(self.members) or (twice == len(self.members) and self.members[0] in workers)

    def is_decided_without(self, *workers: Collection[int]) -> bool:
        """Whether the members that are left would."""
        return self.is_decided_by(set(self.members).difference(self.dead, *workers))


class Quorum:
    """Decides whether a generation may begin without members that cannot be reached and may go on elsewhere."""

    def __init__(self) -> None:
        """Before the first generation there is nothing to decide."""
        self._ballots: list[_Ballot] = []

    @property
    def older(self) -> tuple[tuple[int, ...], ...]:
        """Members of those generations before the newest that somebody may still believe in."""
        return tuple(tuple(ballot.members) for ballot in self._ballots[:-1])

    @property
    def is_lost(self) -> bool:
        """Those that cannot be reached may go on."""
        return any(ballot.is_decided_by(ballot.unreachable - ballot.dead) for ballot in self._ballots)

    def permits(self, candidates: Collection[int]) -> bool:
        """Whether a generation of these may begin: whoever is left out could not go on."""
        return not any(ballot.is_decided_without(candidates) for ballot in self._ballots)

    def begin(self, number: int, members: Sequence[int]) -> None:
        """A generation begins."""
        self._ballots.append(_Ballot(number=number, members=members))

    def take_over(self, newest: Form, present: Collection[int]) -> None:
        """Goes on where another driver has been lost, with that one's newest generation.

        Args:
            newest: with the members of it, and of those before it that may still count.
            present: workers that can be reached.
        """
        for members in [*(newest.older or ()), newest.workers]:
            gone = set(members).difference(present)
            self._ballots.append(_Ballot(number=newest.number, members=members, unreachable=gone))

    def lose(self, workers: Collection[int]) -> None:
        """They cannot be reached any more."""
        for ballot in self._ballots:
            ballot.unreachable.update(set(workers).intersection(ballot.members))

    def died(self, worker: int) -> None:
        """It has ended for certain."""
        for ballot in self._ballots:
            if worker in ballot.members:
                ballot.dead.add(worker)

    def inform(self, number: int, is_there: Callable[[int], bool]) -> None:
        """The agent of a host knows of that generation; the function says which workers are or were there."""
        for ballot in self._ballots:
            if ballot.number < number:
                ballot.informed.update(filter(is_there, ballot.members))

    def settle(self) -> bool:
        """Forgets generations that nobody could go on with any more; whether there were any."""
        older = [ballot for ballot in self._ballots[:-1] if ballot.is_decided_without(ballot.informed)]
        has_settled = len(older) < len(self._ballots) - 1
        if has_settled:
            self._ballots = [*older, self._ballots[-1]]
        return has_settled


# ── messages between the driver and the agents ───────────────────────────────────────────────────────────────────────

KILL_GRACE_S = 3.0
"""Between asking a rank to end and killing it."""

Place = tuple[str, int]
Agents = Sequence[tuple[int, Sequence[Place]]]
"""Number of each agent, and places where a driver would listen that it has started."""


class StartRank(Struct, tag=True, frozen=True, kw_only=True):
    """To an agent: start a process, whose number no other one of the job has had."""

    worker: int
    slot: int


class KillRank(Struct, tag=True, frozen=True, kw_only=True):
    """To an agent: end a process with all it has started, after asking it first unless it is to be `at_once`."""

    worker: int
    at_once: bool


class Relay(Struct, tag=True, frozen=True):
    """To agents: pass this on to those of these ranks that are there."""

    workers: tuple[int, ...]
    message: Dismissal | Changed


class Form(Struct, tag=True, frozen=True, kw_only=True):
    """To agents: answer all that wait; this is their generation. All its lists are by rank.

    Attributes:
        older: see `Quorum`; None = nobody takes a lost driver's place.
        has_state: a member holds the job's state.
        left_out: hosts that are.
    """

    number: int
    workers: tuple[int, ...]
    members: tuple[Member, ...] = ()
    attendees: tuple[Attendee, ...] = ()
    older: tuple[tuple[int, ...], ...] | None = None
    has_state: bool = False
    left_out: LeftOut = {}


NO_GENERATION = Form(number=0, workers=())
"""The newest generation before there is one."""


class Settle(Struct, tag=True, frozen=True, kw_only=True):
    """To all agents: which generations before the newest, of that number, may still count; see `Quorum`."""

    number: int
    older: tuple[tuple[int, ...], ...]


class KnownAgents(Struct, tag=True, frozen=True):
    """To an agent: which ones there are, the receiver too."""

    agents: Agents


class EndAll(Struct, tag=True, frozen=True):
    """To an agent: end all ranks, and yourself; who trains may take so long."""

    grace_s: float = KILL_GRACE_S


class Beat(Struct, tag=True, frozen=True):
    """The sender, driver or agent, is there."""


class Up(Struct, tag=True, frozen=True, kw_only=True):
    """To a driver that knows nothing of this agent: all that one has to know.

    Attributes:
        places: where a driver would listen that this agent has started.
        ranks: that are there.
        patience_s: the longest that any of them has computed without looking for changes; 0 = none for long.
        generation: the newest.
    """

    host: str
    places: Sequence[Place] = ()
    ranks: Sequence[Worker] = ()
    patience_s: float = 0.0
    generation: Form = NO_GENERATION


class Told(Struct, tag=True, frozen=True):
    """To a driver: the agent, and its ranks, know of the generation of that number."""

    number: int


class Relayed(Struct, tag=True, frozen=True):
    """To a driver: a rank says this."""

    worker: int
    message: FromRank


class Ended(Struct, tag=True, frozen=True, kw_only=True):
    """To a driver: a process of a rank is there no more."""

    worker: int
    end: RankEnd


ToAgent = StartRank | KillRank | Relay | Form | Settle | KnownAgents | EndAll | Beat
FromAgent = Up | Told | Relayed | Ended | Beat


@dataclass(frozen=True, slots=True)
class Heard:
    """The agent of a host has said something."""

    host: str
    message: FromAgent


@dataclass(frozen=True, slots=True)
class Lost:
    """The agent of a host is given up; it ends its ranks and itself, if it lives, when it finds that out."""

    host: str
    why: str


class Crew(Protocol):
    """Agents as they are given orders: real, simulated, or Ray's."""

    @property
    def hosts(self) -> list[str]:
        """Hosts of agents that have not been given up."""
        ...

    def start(self, host: str) -> None:
        """Starts the agent of a host; one that cannot be started is lost soon."""
        ...

    def stop(self, host: str) -> None:
        """Has the agent of a host end, which is not used any more and has no rank."""
        ...

    def send_to(self, hosts: Iterable[str], message: ToAgent) -> None:
        """Sends the message to the agents of these hosts; nothing happens where there is none."""
        ...

    def tell_each_other(self) -> None:
        """Lets all agents know who may be the next driver."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The job has ended; `text` says why, "" = as it should."""

    exit_code: int
    text: str = ""


# ── what the user is told ────────────────────────────────────────────────────────────────────────────────────────────


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def difference(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """What discovery has changed, by host its slots."""
    parts = [f"host {host} with {count(slots, 'slot')} is new" for host, slots in after.items() if host not in before]
    parts += [f"host {host} is gone" for host in before if host not in after]
    parts += [
        f"host {host} has {count(slots, 'slot')} instead of {before[host]}"
        for host, slots in after.items()
        if before.get(host, slots) != slots
    ]
    return "; ".join(parts)


def shortened(text: str, limit: int = 2000) -> str:
    """Cut a line for the user that tells of very many hosts."""
    return text if len(text) <= limit else f"{text[:limit]} …"


def announcement(form: Form) -> str:
    """A generation, with its members by host."""
    hosts = Counter(member.host for member in form.members)  # in the order of ranks
    placed = ", ".join(f"{number} on {host}" for host, number in hosts.items())
    new = sum(member.is_new for member in form.members)
    fresh = f", {new} of them new" if 0 < new < len(form.members) else ""
    return f"generation {form.number}: {count(len(form.members), 'rank')} ({placed}){fresh}"


def with_ranks(lost: Collection[Worker]) -> str:
    """Which ranks are gone with a host; "" = none."""
    ranks = [str(worker.rank) for worker in lost if worker.rank is not None and worker.phase is not Phase.DISMISSED]
    return f" with rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" if ranks else ""


_NOBODY = 0  # no process has this number


class MemberList:
    """The processes of a job, and which of them are members of its present generation.

    Attributes:
        workers: by number; who has ended is not among them.
        generation: the present one's number; 0 = none has begun.
        members: of the present generation, by rank, dead ones too.
        has_succeeded: a member of the present generation has done its work.
        has_state: somebody has said that it holds the job's state.
    """

    def __init__(self) -> None:
        self.workers: dict[int, Worker] = {}
        self.generation = 0
        self.members: tuple[int, ...] = ()
        self.has_succeeded = False
        self.has_state = False
        self._numbers = 0
        self._places: dict[int, tuple[str, int]] = {}
        self._ranks: dict[int, int] = {}

    def add(self, host: str, slot: int, now_s: float) -> Worker:
        """A new process."""
        self._numbers += 1
        self._places[self._numbers] = host, slot
        worker = self.workers[self._numbers] = Worker(number=self._numbers, host=host, slot=slot, since_s=now_s)
        return worker

    def take_over(self, workers: Sequence[Worker], generation: int, members: Sequence[int]) -> None:
        """Goes on where another driver has been lost; see `JobMembers.take_over`."""
        for worker in workers:
            self.workers[worker.number] = worker
            self._places[worker.number] = worker.host, worker.slot
        self._numbers = max([0, *self.workers, *members])
        self.has_state = any(worker.has_state for worker in workers)
        there = [number for number in members if number in self.workers]
        # Who had not been told of the generation when the driver was lost never was in it.
        told = [number for number in there if self.workers[number].generation == generation]
        for rank, number in enumerate(members):
            if number in self.workers:
                self.workers[number].generation, self.workers[number].rank = generation, rank
                self._ranks[number] = rank
        self.generation = generation
        self.members = tuple(number if number in told else _NOBODY for number in members)
        self.has_succeeded = bool(self.of_generation(Phase.FINISHED))

    def begin(self, members: list[Worker], now_s: float) -> None:
        """The next generation, with these members in the order of their ranks."""
        self.generation += 1
        self.members = tuple(worker.number for worker in members)
        self.has_succeeded = False
        for rank, worker in enumerate(members):
            worker.rank, worker.generation = rank, self.generation
            self._ranks[worker.number] = rank
            worker.enter(Phase.MEMBER, now_s)

    def label(self, number: int) -> str:
        """How a process, which may have ended, is called in the output: its rank, as far as it has one."""
        host, slot = self._places.get(number, ("?", 0))
        return str(self._ranks.get(number, f"{host}:{slot}"))

    def is_of(self, host: str, number: int) -> bool:
        """Whether the process is or was there."""
        return self._places.get(number, ("", 0))[0] == host

    def place(self, number: int) -> str:
        """Its host and slot as a name for a folder."""
        host, slot = self._places.get(number, ("unknown", 0))
        return f"{host}.{slot}"

    def present(self, *phases: Phase) -> list[Worker]:
        """Processes in one of these phases."""
        return [worker for worker in self.workers.values() if worker.phase in phases]

    def of_generation(self, *phases: Phase) -> list[Worker]:
        """Members of the present generation that are there, in one of these phases; by rank."""
        found = (self.workers[number] for number in self.members if number in self.workers)
        return [worker for worker in found if worker.phase in phases]

    @property
    def survivors(self) -> list[Worker]:
        """Members that go on."""
        return [worker for worker in self.of_generation(Phase.MEMBER, Phase.WAITING) if not worker.is_leaving]

    @property
    def wanted(self) -> list[Worker]:
        """Processes that are, or may become, members."""
        active = self.present(Phase.STARTING, Phase.WAITING, Phase.MEMBER)
        return [worker for worker in active if not worker.is_leaving]

    def mark_leaving(self, usable: Mapping[str, int], most: int | None) -> None:
        """Says of each process whether it is to leave.

        Args:
            usable: slots by host.
            most: how many ranks there may be; the youngest leave where hosts have come back before those who replace
                their ranks were there. None = any number.
        """
        for worker in self.present(Phase.STARTING, Phase.WAITING, Phase.MEMBER):
            worker.is_leaving = worker.slot >= usable.get(worker.host, 0)
        for worker in sorted(self.wanted, key=seniority)[most:] if most is not None else ():
            worker.is_leaving = True

    @property
    def is_running(self) -> bool:
        """Members of the present generation have not asked for another one."""
        return bool(self.of_generation(Phase.MEMBER))

    @property
    def newcomers(self) -> list[Worker]:
        """Who waits, and was in no member of the present generation."""
        waiting = self.present(Phase.WAITING)
        return [worker for worker in waiting if worker.number not in self.members and not worker.is_leaving]

    @property
    def is_diminished(self) -> bool:
        """A member of the present generation has died, or is to leave while others stay."""
        there = self.of_generation(*Phase)
        if len(there) < len(self.members):
            return True
        leave = any(worker.is_leaving for worker in there)
        return leave and any(worker.phase is not Phase.STARTING for worker in self.wanted)

    def candidates(self, most: int | None) -> list[Worker]:
        """Of those who wait, who would be the members of the next generation, at most so many.

        Who is to leave stays while nobody else holds the job's state: it hands it over first.
        """
        waiting = self.present(Phase.WAITING)
        wanted = [worker for worker in waiting if not worker.is_leaving]
        if any(worker.has_state for worker in wanted):
            return wanted
        leaving = sorted((worker for worker in waiting if worker.is_leaving and worker.has_state), key=seniority)
        if most is not None:
            leaving = leaving[: max(1, most - len(wanted))]
            wanted = wanted[: most - len(leaving)]
        return wanted + leaving

    def dismissible(self) -> Iterator[Worker]:
        """Those who are to leave and wait to be told so."""
        is_state_kept = any(worker.has_state for worker in self.wanted)
        for worker in self.present(Phase.WAITING):
            if worker.is_leaving and (is_state_kept or not worker.has_state):
                yield worker

    def free_slots(self, host: str, slots: int) -> list[int]:
        """Places where no process is."""
        taken = {worker.slot for worker in self.workers.values() if worker.host == host}
        return [slot for slot in range(slots) if slot not in taken]


class JobMembers:
    """Decides who starts, who belongs to the next generation, who is given up, and when the job has ended.

    Each method tells of events, in the order in which they have happened; the crew is told at once what follows.

    Attributes:
        policy: what holds for the whole job.
        pool: hosts that discovery has found.
        member_list: the processes.
        agents: by host; False = being started.
        end: of the job; None = it goes on.
    """

    def __init__(self, policy: Policy, crew: Crew, say: Callable[[str], None], rng: random.Random) -> None:
        """Nothing has happened yet.

        Args:
            policy: what holds for the whole job.
            crew: does what is decided.
            say: shows a line to the user.
            rng: for how long hosts are left out.
        """
        self.policy, self.pool = policy, HostPool(policy, rng)
        self._crew, self._say = crew, say
        self.member_list = MemberList()
        self.end: End | None = None
        self.agents: dict[str, bool] = {}
        self._told = Change(0)  # of what members have been told in this generation
        self._lost = self._told_lost = ""  # how the first member died
        self._failure: tuple[str, RankEnd] | None = None  # of this generation, the first
        self._ended_well = self._ended_badly = False  # a process has, before the first generation
        self._host_problem = ""  # the newest, for the user
        self._reasons: set[str] = set()  # of failures, that the user has been told
        self._short_since_s: float | None = None
        self._quorum = Quorum()
        self._enough_since_s: float | None = None
        self._longest_s = 0.0

    def take_over(self, reports: Mapping[str, Up], now_s: float) -> bool:
        """Before anything else: goes on where another driver has been lost.

        Args:
            reports: what agents have said that have come, by host; those of the crew's hosts can be reached.
            now_s: the time.

        Returns:
            Whether this is the side of a network that may have come apart which goes on. Before the first generation
            there is no such side.
        """
        newest = newest_generation(reports)
        there = [report for report in reports.values() if report.host in self._crew.hosts]
        self.agents.update(dict.fromkeys(self._crew.hosts, True))
        self._longest_s = max((report.patience_s for report in there), default=0.0)
        self._lost = "the driver was lost"
        self._failure = "the driver", RankEnd(exit_code=1, reason="it was lost")
        self.pool.remember(newest.left_out, now_s)
        workers = [replace(worker, since_s=now_s) for report in there for worker in report.ranks]
        self.member_list.take_over(workers, newest.number, newest.workers)
        # If somebody held the state when the generation began nobody goes on without it.
        self.member_list.has_state = self.member_list.has_state or newest.has_state
        self._quorum.take_over(newest, self.member_list.workers)
        return bool(newest.number) and not self._quorum.is_lost

    def found(self, hosts: Mapping[str, int], now_s: float) -> None:
        """Discovery says which hosts there are, with how many slots each."""
        before = self.pool.known
        self.pool.find(hosts)
        if before and before != self.pool.known:
            self._say(shortened(difference(before, self.pool.known)))
        self.tick(now_s)

    def answer(self, events: Iterable[Heard | Lost], now_s: float) -> None:
        """Agents have said something, or are given up, all at one time as far as anybody knows.

        What follows is decided once: a decision looks at all ranks, and one for each of a thousand that ask at the
        same time would take many seconds.
        """
        for event in events:
            if self.end is not None:
                return
            if isinstance(event, Lost):
                self._lose_agent(event.host, event.why, now_s)
            else:
                self._hear(event.host, event.message, now_s)
        self.tick(now_s)

    def tick(self, now_s: float) -> None:
        """Decides all that follows from what is known; to be called often, as limits are looked after here, too."""
        for step in (self._start_and_end, self._advance, self._tell, self._wait_for_others):
            if self.end is None:
                step(now_s)

    def _hear(self, host: str, message: FromAgent, now_s: float) -> None:
        listed = self.member_list
        match message:
            case Up():
                self._crew.tell_each_other()
                if host in self.agents:
                    self.agents[host] = True
                return
            case Told(number):
                self._quorum.inform(number, lambda worker: listed.is_of(host, worker))
                return
            case Beat():
                return
        worker = listed.workers.get(message.worker)
        if worker is None or worker.host != host:
            return  # it was given up
        match message:
            case Relayed(message=Join(has_state=has_state, attendee=attendee)):
                if worker.phase in (Phase.DISMISSED, Phase.FINISHED):
                    self._dismiss(worker)
                else:
                    worker.attendee = attendee
                    worker.has_state = worker.has_state or has_state
                    listed.has_state = listed.has_state or has_state
                    worker.enter(Phase.WAITING, now_s)
            case Relayed(message=Patience(seconds)):  # others, too, may take so long
                self._longest_s = max(self._longest_s, seconds)
            case Relayed(message=Finished()):  # it may still live for a while
                if worker.phase is Phase.MEMBER:
                    worker.enter(Phase.FINISHED, now_s)
                    listed.has_succeeded = True
            case Ended(end=end):
                del listed.workers[worker.number]
                self._quorum.died(worker.number)
                if worker.phase is Phase.MEMBER:
                    self._lost = self._lost or f"{worker.label} {end.text}"
                if worker.phase is Phase.FINISHED and end.exit_code:
                    self._say(f"{worker.label} {end.text}, but it had done its work")
                elif worker.phase is Phase.MEMBER and end.exit_code == 0 and not worker.is_leaving:
                    listed.has_succeeded = True
                elif worker.phase not in (Phase.DISMISSED, Phase.FINISHED):
                    self._lose(worker, end, now_s)

    def _lose_agent(self, host: str, why: str, now_s: float) -> None:
        """The agent of that host, and all its ranks, are gone or cannot be reached."""
        if self.agents.pop(host, None) is None:
            return
        lost = [worker for worker in self.member_list.workers.values() if worker.host == host]
        for worker in lost:
            del self.member_list.workers[worker.number]
        self._host_problem = problem = f"host {host} is lost ({why})"
        self._lost = self._lost or problem
        self._failure = self._failure or (f"host {host}", RankEnd(exit_code=1, reason=why))
        what = self._left_out(host, now_s) if host in self.pool.usable else ""
        self._say(f"{problem}{with_ranks(lost)}{what}{self._go_on()}")
        self._quorum.lose([worker.number for worker in lost])
        if self.policy.has_successors and self._quorum.is_lost and not self.member_list.has_succeeded:
            why = "too many ranks cannot be reached, and may go on without this side (--on-driver-loss go-on)"
            self._end(self._failed(why))

    @property
    def _leave_s(self) -> float:
        """How long a member may take to leave its generation."""
        return max(self.policy.leave_s, min(2 * self._longest_s, self.policy.timeout_s))

    def _lose(self, worker: Worker, end: RankEnd, now_s: float) -> None:
        """A process has failed, or ended before it was a member; its host may be left out for that."""
        if end.exit_code == 0:
            self._ended_well = True
            if self.member_list.generation == 0:
                return
            end = RankEnd(exit_code=1, reason="it ended before it was a member")
        self._failure = self._failure or (worker.label, end)
        self._ended_badly = True
        if worker.verdict:
            text = worker.verdict
        elif worker.is_leaving:
            text = f"{end.text}; it was to leave"
        elif end.reason and end.reason in self._reasons:
            text = "failed for the same reason"
        else:
            text = end.text
        self._reasons.add(end.reason)
        settled = worker.phase is Phase.MEMBER and now_s - worker.since_s >= self.policy.settled_s
        if settled:
            self.pool.clear(worker.host)
        drop = self.policy.on_failure is OnFailure.DROP_HOST
        if not drop and not settled and (worker.generation == 0 or not end.is_signal):
            drop = self.pool.strike(worker.host)
        usable = self.pool.usable
        if drop and worker.host in usable:
            what = self._left_out(worker.host, now_s)
        elif worker.slot < usable.get(worker.host, 0) and self._may_start():
            what = "; replaced in place"
        else:
            what = ""
        self._say(f"{worker.label} {text}{what}{self._go_on()}")

    def _may_start(self) -> bool:
        """Whether a rank that starts now would find anybody who goes on with it."""
        if self.member_list.has_succeeded or (self._ended_well and not self.member_list.generation):
            return False
        if self.member_list.generation == 0:
            return not self._ended_badly or bool(self.member_list.present(Phase.WAITING))
        return bool(self.member_list.of_generation(Phase.MEMBER, Phase.WAITING))

    def _start_and_end(self, now_s: float) -> None:
        for host in self.pool.take_back(now_s):
            self._say(f"host {host} is used again")
        self._send_away(now_s)
        self._end(self._reached_end())
        if self.end is None and self._may_start():
            self._take_on(now_s)

    def _tell(self, now_s: float) -> None:
        """Members hear of each change once, and of the first death how it happened: they may wait for who has died."""
        del now_s
        listed = self.member_list
        if listed.is_running and not listed.has_succeeded:
            change = Change.ADDED if listed.newcomers else Change(0)
            change |= Change.REMOVED if listed.is_diminished else Change(0)
            lost = self._lost if len(listed.of_generation(*Phase)) < len(listed.members) else ""
            if (new := change & ~self._told) or lost != self._told_lost:
                self._told, self._told_lost = self._told | new, lost
                members = listed.of_generation(Phase.MEMBER)
                tell = Relay(tuple(worker.number for worker in members), Changed(new, lost))
                self._crew.send_to(dict.fromkeys(worker.host for worker in members), tell)
        if self._quorum.settle() and self.policy.has_successors:
            self._crew.send_to(self._crew.hosts, Settle(number=listed.generation, older=self._quorum.older))

    def _send_away(self, now_s: float) -> None:
        """Has processes leave for which there is no room any more, and stops agents that have no ranks any more."""
        usable = self.pool.usable
        self.member_list.mark_leaving(usable, self.policy.max_ranks)
        for worker in self.member_list.present(Phase.STARTING):
            if worker.is_leaving:
                self._send(worker, KillRank(worker=worker.number, at_once=False))
                worker.enter(Phase.DISMISSED, now_s)
        for worker in list(self.member_list.dismissible()):
            self._dismiss(worker)
            worker.enter(Phase.DISMISSED, now_s)
        for worker in self.member_list.present(Phase.DISMISSED):
            if now_s - worker.since_s > self.policy.leave_s:
                self._send(worker, KillRank(worker=worker.number, at_once=True))
                worker.since_s = now_s
        for host in [host for host in self.agents if host not in usable]:
            if all(worker.host != host for worker in self.member_list.workers.values()):
                del self.agents[host]
                self._crew.stop(host)

    def _take_on(self, now_s: float) -> None:
        """Starts agents and ranks where there is room."""
        usable, most = self.pool.usable, self.policy.max_ranks
        room = sum(usable.values()) if most is None else most - len(self.member_list.wanted)
        for host, slots in usable.items():
            if room <= 0:  # there may be thousands of hosts
                break
            free = self.member_list.free_slots(host, slots)[:room]
            if free and host not in self.agents:
                self.agents[host] = False
                self._crew.start(host)
            room -= len(free)
            for slot in free if self.agents.get(host) else ():
                worker = self.member_list.add(host, slot, now_s)
                self._send(worker, StartRank(worker=worker.number, slot=slot))

    def _reached_end(self) -> End | None:
        """The end, if nobody is left, or all have done what they can."""
        member_list, slots = self.member_list, sum(self.pool.usable.values())
        if member_list.generation:
            if member_list.of_generation(Phase.MEMBER, Phase.FINISHED):
                return None
            if member_list.has_succeeded:
                return End(exit_code=0)
            if not member_list.of_generation(Phase.WAITING) and self._failure is not None:
                return self._failed("all ranks of the job have failed")
        elif self._host_problem and self.policy.hosts_stay and slots < self.policy.start_ranks:
            return End(
                exit_code=1,
                text=f"{self.policy.start_ranks} ranks are to begin, and the hosts that are left have {slots} slots: "
                f"mend that{f', or give -np {slots}' if slots >= self.policy.min_ranks else ''}",
            )
        elif not member_list.workers:
            if self._ended_badly:
                return self._failed("no rank has come as far as to join the job")
            if self._ended_well:
                return End(exit_code=0)
            if self._host_problem and not self.agents and not slots:
                return End(exit_code=1, text=f"{self._host_problem}; no host is left")
        return None

    def _wait_for_others(self, now_s: float) -> None:
        """Ends the job if ranks have waited for others for too long, or no others can come."""
        if self.member_list.is_running or self.member_list.present(Phase.FINISHED):
            self._short_since_s = None
            return
        self._short_since_s = now_s if self._short_since_s is None else self._short_since_s
        least = self.policy.min_ranks if self.member_list.generation else self.policy.start_ranks
        came = len(self.member_list.candidates(self.policy.max_ranks))
        if self.policy.hosts_stay and self._most_candidates(now_s) < least:
            gone = sorted(self._gone(now_s))
            self._end(
                self._failed(
                    f"{came} of at least {least} ranks are there, and no others can come: {', '.join(gone[:3])} "
                    f"{'is' if len(gone) == 1 else 'are'} left out for good, as a rank failed there or it was lost; "
                    "--on-failure replace-rank starts another rank in its place, --blacklist-cooldown-range takes "
                    "hosts back, --host-discovery-script finds others, --min-np goes on with fewer"
                )
            )
        elif now_s - self._short_since_s > self.policy.timeout_s:
            problem = f"; {self._host_problem}" if self._host_problem else ""
            text = (
                f"{came} of at least {least} ranks came within {self.policy.timeout_s:g} s; --elastic-timeout waits "
                f"longer, --min-np goes on with fewer{problem}"
            )
            self._end(End(exit_code=1, text=text))

    def _gone(self, now_s: float) -> list[str]:
        """Hosts that are left out for good."""
        return [host for host, (_, left_s) in self.pool.left_out(now_s).items() if left_s is None]

    def _most_candidates(self, now_s: float) -> int:
        """How many ranks there may ever be in the next generation, if no other host comes."""
        gone = self._gone(now_s)
        slots = sum(slots for host, slots in self.pool.known.items() if host not in gone)
        return slots + sum(worker.host in gone for worker in self.member_list.candidates(None))

    def _failed(self, text: str) -> End:
        """The end for this reason, with the exit code of what failed first."""
        if self._failure is None:
            return End(exit_code=1, text=text)
        label, end = self._failure
        return End(exit_code=end.exit_code or 1, text=f"{text}; the first that failed was {label}: it {end.text}")

    def _left_out(self, host: str, now_s: float) -> str:
        """Leaves the host out, and says for how long."""
        cooldown_s = self.pool.drop(host, now_s)
        how_long = "from now on" if cooldown_s is None else f"for {cooldown_s:.0f} s"
        return f"; host {host} is left out {how_long}"

    def _go_on(self) -> str:
        """Says how many ranks go on."""
        usable = self.pool.usable
        left = len([worker for worker in self.member_list.survivors if worker.host in usable])
        return f", {left} go{'es' * (left == 1)} on" if left else ""

    def _advance(self, now_s: float) -> None:
        """Begins the next generation once all members of this one have left it."""
        listed = self.member_list
        if listed.is_running:
            asked = [worker.since_s for worker in listed.of_generation(Phase.WAITING)]
            if asked and now_s - min(asked) > self._leave_s:
                for worker in listed.of_generation(Phase.MEMBER):
                    if not worker.verdict:
                        worker.verdict = f"did not leave its generation within {self._leave_s:g} s and was killed"
                        self._send(worker, KillRank(worker=worker.number, at_once=True))
            return
        if listed.has_succeeded:
            return  # those who have done their work have not ended yet
        candidates = listed.candidates(self.policy.max_ranks)
        if listed.has_state and not any(worker.has_state for worker in candidates):
            if not any(worker.has_state for worker in listed.workers.values()):
                self._end(self._failed("nobody is left who holds the state of the job"))
            return
        if len(candidates) < (self.policy.min_ranks if listed.generation else self.policy.start_ranks):
            self._enough_since_s = None
            return
        self._enough_since_s = now_s if self._enough_since_s is None else self._enough_since_s
        coming = any(not worker.is_leaving for worker in listed.present(Phase.STARTING)) or not all(
            self.agents.values()
        )
        if not listed.generation and coming and now_s - self._enough_since_s < self.policy.start_grace_s:
            return
        if self.policy.has_successors and not self._quorum.permits([worker.number for worker in candidates]):
            return  # those who are dismissed have not ended yet
        if self.policy.reset_limit is not None and listed.generation > self.policy.reset_limit:
            text = f"--reset-limit {self.policy.reset_limit}: the job would begin anew once more than that"
            self._end(End(exit_code=1, text=text))
            return
        self._form(candidates, now_s)

    def _form(self, candidates: list[Worker], now_s: float) -> None:
        member_list = self.member_list
        members = ranked(candidates, list(self.pool.known))
        member_list.begin(members, now_s)
        self._quorum.begin(member_list.generation, member_list.members)
        form = Form(
            number=member_list.generation,
            workers=member_list.members,
            members=tuple(Member(host=each.host, slot=each.slot, is_new=not each.has_state) for each in members),
            attendees=tuple(each.attendee for each in members),
            older=self._quorum.older if self.policy.has_successors else None,
            has_state=any(each.has_state for each in members),
            left_out=self.pool.left_out(now_s),
        )
        # To all agents where another driver may be needed, else to those of members.
        hosts = self._crew.hosts if self.policy.has_successors else [member.host for member in form.members]
        self._crew.send_to(dict.fromkeys(hosts), form)
        self._say(announcement(form))
        self._told, self._lost, self._told_lost = Change(0), "", ""
        self._enough_since_s = None
        self._failure, self._host_problem = None, ""

    def _end(self, end: End | None) -> None:
        if end is not None:
            self.end = end
            for worker in self.member_list.present(Phase.WAITING):
                self._dismiss(worker)

    def _dismiss(self, worker: Worker) -> None:
        """Answers a rank that waits for a generation that it is not wanted any more."""
        self._send(worker, Relay((worker.number,), Dismissal()))

    def _send(self, worker: Worker, message: ToAgent) -> None:
        self._crew.send_to([worker.host], message)


# ── how long a driver that takes over waits ──────────────────────────────────────────────────────────────────────────

ADOPT_S = 30.0
"""How long a driver that takes over waits for more agents than it needs; those that have tried others before may need
some time."""

GATHER_S = 120.0
"""How long it waits for as many as it needs: one agent finds the end of a connection at once, another one silence."""


def newest_generation(reports: Mapping[str, Up]) -> Form:
    """The newest generation that any agent has reported."""
    known = [report.generation for report in reports.values()]
    return max(known, key=lambda form: (form.number, -len(form.older or ())), default=NO_GENERATION)


def has_waited(for_s: float, reports: Mapping[str, Up], expected: Collection[int]) -> bool:
    """Whether a driver that takes over has waited for long enough.

    Args:
        for_s: how long it has.
        reports: of agents that have come.
        expected: numbers of those that have not.
    """
    newest, quorum = newest_generation(reports), Quorum()
    quorum.take_over(newest, [worker.number for report in reports.values() for worker in report.ranks])
    if not newest.number or quorum.is_lost:  # it could not go on with these
        return for_s > GATHER_S
    return not expected or for_s > ADOPT_S
