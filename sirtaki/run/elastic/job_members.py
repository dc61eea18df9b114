"""Membership rules of an elastic job: decide which ranks start, become members or are given up, and when the job ends.

A generation is a set of ranks that train together until a rank fails, leaves or joins. An agent is a process that
starts the ranks of a host. Messages of agents are the inputs of the rules, and orders to agents are the outputs. This
module uses no sockets, processes or clocks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from msgspec import Struct

from sirtaki.comm.control.members import Member
from sirtaki.engine.membership import Change, Changed, Dismissal, Finished, FromRank, Join, Patience
from sirtaki.machine import signal_name
from sirtaki.measures import counted


class ProcessPhase(Enum):
    """State of a rank's process, from its start to its end."""

    STARTING = "starting"  # The process was started, and has not yet asked to take part in training.
    WAITING = "waiting"  # The process has asked to take part in the next generation (set of ranks that train together).
    MEMBER = "member"  # The process is a member of the current generation (set of ranks that train together).
    FINISHED = "finished"  # The process has completed its work.
    DISMISSED = "dismissed"  # The process was asked or forced to end.


@dataclass(slots=True, kw_only=True)
class RankRecord:
    """A running process of the job.

    Attributes:
        number: id of the process in this job.
        rank: rank of the process in its newest generation (set of members). None before its first generation.
        generation: number of the process's newest generation; 0 before the first.
        has_state: True if the process holds the training state, such as weights.
        is_leaving: True if the process must end, because its host has fewer slots (places for ranks) now.
        since_s: time at which the current phase of the process began, in seconds.
        verdict: why the process was killed, as a clause. "" if it was not killed.
        member: description that the process sent, with the addresses at which it listens for other members.
    """

    number: int
    host: str
    slot: int
    phase: ProcessPhase = ProcessPhase.STARTING
    rank: int | None = None
    generation: int = 0
    has_state: bool = False
    is_leaving: bool = False
    since_s: float = 0.0
    verdict: str = ""
    member: Member = Member()  # noqa: RUF009 - a shared default is safe, because `Member` is frozen

    @property
    def label(self) -> str:
        """Return the name of the process for messages to the user: its rank, host and slot (place for a rank on the
        host).
        """
        who = "a new rank" if self.rank is None else f"rank {self.rank}"
        return f"{who} (host {self.host}, slot {self.slot})"

    def enter(self, phase: ProcessPhase, now_s: float) -> None:
        """Set the phase of the process, and the time at which the phase began."""
        self.phase, self.since_s = phase, now_s


def seniority(worker: RankRecord) -> tuple[bool, int, int, int]:
    """Return a sort key for processes, which sorts those that hold the training state (such as weights) first.

    Processes with the state are sorted by newest generation (set of members) and rank, new ones by age.
    """
    return not worker.has_state, -worker.generation, 0 if worker.rank is None else worker.rank, worker.number


def ranked(workers: Iterable[RankRecord], hosts: Sequence[str]) -> list[RankRecord]:
    """Return workers (processes of ranks) in the order of their next ranks. Ranks of a host are adjacent. Workers that
    hold the training state (such as weights) come first, in the order of their former ranks.

    Args:
        workers: members of the next generation (set of ranks that train together).
        hosts: all hosts. Their order decides between hosts whose workers have neither state nor a former rank.
    """
    place = {host: number for number, host in enumerate(hosts)}

    def own(worker: RankRecord) -> tuple[bool, int, int, int, int]:
        return *seniority(worker)[:3], place.get(worker.host, len(place)), worker.slot

    ordered = sorted(workers, key=own)
    first: dict[str, int] = {}
    for number, worker in enumerate(ordered):
        first.setdefault(worker.host, number)
    # `sorted` is stable, so that the order within a host is kept.
    return sorted(ordered, key=lambda worker: first[worker.host])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How the process of a rank ended.

    Attributes:
        exit_code: exit code as in a shell: 128 + the signal's number if a signal killed the process.
        reason: why the process failed, as reported by the process or by its agent. "" if neither reported a reason.
    """

    exit_code: int
    reason: str = ""

    @property
    def is_signal(self) -> bool:
        """Return whether a signal killed the process."""
        return self.exit_code > 128

    @property
    def text(self) -> str:
        """Return how the process ended, as a clause."""
        if self.is_signal:
            return f"was killed by {signal_name(self.exit_code - 128)}"
        if not self.exit_code:
            return "ended"
        return f"failed ({self.reason or f'exit code {self.exit_code}'})"


COOLDOWN_S = (30.0, 600.0)
"""Shortest and longest time in seconds for which a host is excluded after a failure, by default.

They apply if failed ranks are replaced on the same host.
"""


class OnFailure(Enum):
    """What the job does with a host after a rank on it has failed."""

    REPLACE_RANK = "replace-rank"
    DROP_HOST = "drop-host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Settings of an elastic job: numbers of ranks, and treatment of failed ranks and hosts.

    Attributes:
        start_ranks: number of ranks that the first generation (set of members) waits for.
        min_ranks: minimum size of later generations.
        max_ranks: maximum number of ranks. None for the number of slots.
        timeout_s: maximum seconds to wait for `min_ranks` ranks.
        reset_limit: maximum number of elastic restarts. None for no limit.
        on_failure: action after the failure of a rank.
        cooldown_s: shortest and longest time for which a failed host is excluded. None to exclude it permanently.
        leave_s: seconds after which a rank is killed if it has not ended after its dismissal, or has not requested the
            next generation although another member has. In the second case, the limit is longer if a rank has computed
            long without polling: twice that time, at most `timeout_s`.
        start_grace_s: seconds that the first generation still waits for starting ranks after enough ranks are ready.
        strikes: number of consecutive early failures of ranks on a host after which the host is excluded. A failure is
            early if the rank has trained for less than `settled_s`.
        has_successors: True if an agent (process that starts ranks on a host) starts a new driver (launcher process)
            when the driver is lost. Then, after a network split, all processes on one side must end.
        hosts_stay: True if the set of hosts is fixed, without host discovery.
        settled_s: training time of a rank, in seconds, after which earlier failures on its host are forgotten.
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
"""Excluded hosts: {host: (how often it was excluded, remaining seconds of its exclusion)}.

None as seconds = permanent.
"""


@dataclass(slots=True)
class _Record:
    """Failures of ranks on a host, and the time until which the host gets no ranks."""

    strikes: int = 0
    drops: int = 0
    until_s: float = 0.0
    is_dropped: bool = False


class HostPool:
    """Hosts that the discovery script lists, in the order of their first listing, with failures of ranks and
    exclusions.
    """

    def __init__(self, policy: Policy, rng: random.Random) -> None:
        self._policy, self._rng = policy, rng
        self._found: dict[str, int] = {}
        self._records: dict[str, _Record] = {}

    def find(self, hosts: Mapping[str, int]) -> None:
        """Set the hosts, with their slots (numbers of ranks), as listed by host discovery. Hosts listed before keep
        their order.
        """
        kept = {host: hosts[host] for host in self._found if host in hosts}
        self._found = kept | {host: slots for host, slots in hosts.items() if host not in kept}

    @property
    def usable(self) -> dict[str, int]:
        """Return the number of slots (places for ranks) of each host that is not excluded."""
        return {host: slots for host, slots in self._found.items() if not self._record(host).is_dropped}

    @property
    def known(self) -> dict[str, int]:
        """Return the number of slots (places for ranks) of each host, including excluded hosts."""
        return dict(self._found)

    def strike(self, host: str) -> bool:
        """Count an early failure of a rank on a host, soon after the rank's start.

        Return whether the host must be excluded.
        """
        record = self._record(host)
        record.strikes += 1
        return record.strikes >= self._policy.strikes

    def clear(self, host: str) -> None:
        """Forget the failures on a host, after a rank on it has trained long enough."""
        self._record(host).strikes = 0

    def drop(self, host: str, now_s: float) -> float | None:
        """Start no further rank on a host for some time (exclude it).

        Returns:
            Duration of the exclusion in seconds, doubled at each exclusion, with up to 10 % jitter. None if the host is
            excluded permanently.
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
        """Allow ranks again on hosts whose exclusion time has passed, and return these hosts."""
        back = [host for host in self._found if self._record(host).is_dropped and now_s >= self._record(host).until_s]
        for host in back:
            self._record(host).is_dropped = False
        return back

    def left_out(self, now_s: float) -> LeftOut:
        """Return the hosts on which no rank may start now, with the remaining time."""
        return {
            host: (record.drops, None if record.until_s == float("inf") else max(0.0, record.until_s - now_s))
            for host, record in self._records.items()
            if record.is_dropped
        }

    def remember(self, left_out: LeftOut, now_s: float) -> None:
        """Exclude the hosts that a lost driver (launcher process) had excluded. `left_out` is the result of its method
        `left_out`.
        """
        for host, (drops, left_s) in left_out.items():
            record = self._record(host)
            record.is_dropped, record.drops = True, drops
            record.until_s = float("inf") if left_s is None else now_s + left_s

    def _record(self, host: str) -> _Record:
        return self._records.setdefault(host, _Record())


@dataclass(slots=True, kw_only=True)
class _Ballot:
    """A generation (set of ranks that train together) that some process may consider the newest one of the job.

    Attributes:
        members: members in rank order.
        dead: members whose processes are known to have ended.
        unreachable: members on lost hosts, which may be dead or alive.
        informed: members whose agents have received a newer generation.
    """

    number: int
    members: Sequence[int]
    dead: set[int] = field(default_factory=set)
    unreachable: set[int] = field(default_factory=set)
    informed: set[int] = field(default_factory=set)

    def is_decided_by(self, workers: Set[int]) -> bool:
        """Return whether `workers` (processes of ranks) are a majority of the members. A majority continues without the
        remaining members.

        With exactly half of the members, the half with rank 0 is the majority.
        """
        twice = 2 * len(workers)
        return twice > len(self.members) or (twice == len(self.members) and self.members[0] in workers)

    def is_decided_without(self, *workers: Collection[int]) -> bool:
        """Return whether a majority of the members remains without `workers` and the members known to be dead."""
        return self.is_decided_by(set(self.members).difference(self.dead, *workers))


class Quorum:
    """Majority rule for network splits: a new generation (set of ranks that train together) may begin only if
    unreachable ranks cannot continue training on their own.
    """

    def __init__(self) -> None:
        """Create the rule for a job in which no generation (set of ranks that train together) has begun."""
        self._ballots: list[_Ballot] = []

    @property
    def older(self) -> tuple[tuple[int, ...], ...]:
        """Return the members of each older generation (set of ranks that train together) that some process may still
        consider the newest.
        """
        return tuple(tuple(ballot.members) for ballot in self._ballots[:-1])

    @property
    def is_lost(self) -> bool:
        """Return whether unreachable ranks may continue training without this side of a network split, because they may
        be a majority.
        """
        return any(ballot.is_decided_by(ballot.unreachable - ballot.dead) for ballot in self._ballots)

    def permits(self, candidates: Collection[int]) -> bool:
        """Return whether `candidates` may train together, because the other ranks cannot continue on their own."""
        return not any(ballot.is_decided_without(candidates) for ballot in self._ballots)

    def begin(self, number: int, members: Sequence[int]) -> None:
        """Add a new generation (set of ranks that train together) with these members."""
        self._ballots.append(_Ballot(number=number, members=members))

    def take_over(self, newest: FormGeneration, present: Collection[int]) -> None:
        """Continue with the newest generation (set of ranks that train together) of a lost driver (launcher process).

        Args:
            newest: newest generation. It also lists the members of older generations, because processes that missed the
                newest one may still train in them.
            present: workers that can be reached.
        """
        for members in [*(newest.older or ()), newest.workers]:
            gone = set(members).difference(present)
            self._ballots.append(_Ballot(number=newest.number, members=members, unreachable=gone))

    def lose(self, workers: Collection[int]) -> None:
        """Record that `workers` (processes of ranks) are on lost hosts, and may be dead or alive."""
        for ballot in self._ballots:
            ballot.unreachable.update(set(workers).intersection(ballot.members))

    def died(self, worker: int) -> None:
        """Record that the process of `worker` is known to have ended."""
        for ballot in self._ballots:
            if worker in ballot.members:
                ballot.dead.add(worker)

    def inform(self, number: int, is_there: Callable[[int], bool]) -> None:
        """Record that the agent (process that starts the ranks of a host) has received generation `number` (set of
        ranks).

        Args:
            number: number of the received generation.
            is_there: returns whether a worker runs or ran on the agent's host.
        """
        for ballot in self._ballots:
            if ballot.number < number:
                ballot.informed.update(filter(is_there, ballot.members))

    def drop_decided(self) -> bool:
        """Remove older generations (sets of ranks) whose members cannot continue on their own any more. Return whether
        any was removed.
        """
        older = [ballot for ballot in self._ballots[:-1] if ballot.is_decided_without(ballot.informed)]
        has_settled = len(older) < len(self._ballots) - 1
        if has_settled:
            self._ballots = [*older, self._ballots[-1]]
        return has_settled


# ── messages between the driver and the agents ───────────────────────────────────────────────────────────────────────

KILL_GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL for a rank that must end."""

AgentAddress = tuple[str, int]
Agents = Sequence[tuple[int, Sequence[AgentAddress]]]
"""Agents (processes that start ranks): id, and addresses at which a driver (launcher process) would listen if this
agent started one.
"""


class StartRank(Struct, tag=True, frozen=True, kw_only=True):
    """Order to an agent (which starts the ranks of a host): start a process for a rank in `slot`, a numbered place for
    a rank. `worker` is the id of the process, unique in the job.
    """

    worker: int
    slot: int


class KillRank(Struct, tag=True, frozen=True, kw_only=True):
    """Order to an agent (which starts the ranks of a host): end the process of a rank and its children. If `at_once`,
    kill it without SIGTERM.
    """

    worker: int
    at_once: bool


class Relay(Struct, tag=True, frozen=True):
    """Order to agents (each starts the ranks of a host): forward `message` to each of `workers` (processes of ranks) on
    their host.
    """

    workers: tuple[int, ...]
    message: Dismissal | Changed


class FormGeneration(Struct, tag=True, frozen=True, kw_only=True):
    """Order to agents (each starts the ranks of a host): tell waiting ranks that they train together now, as a new
    generation. All sequences are in rank order.

    Attributes:
        older: members of older generations that some process may still consider the newest (`Quorum.older`). None if
            the job has no way to replace a lost driver (launcher process).
        has_state: True if a member holds the training state, such as weights.
        left_out: excluded hosts, with the remaining time of their exclusion.
    """

    number: int
    workers: tuple[int, ...]
    members: tuple[Member, ...] = ()
    older: tuple[tuple[int, ...], ...] | None = None
    has_state: bool = False
    left_out: LeftOut = {}


NO_GENERATION = FormGeneration(number=0, workers=())
"""Value for the newest generation (set of ranks that train together) before the first one begins."""


class KeepGenerations(Struct, tag=True, frozen=True, kw_only=True):
    """Order to all agents (each starts the ranks of a host): store the older generations (sets of ranks) that still
    matter.

    Some process may still consider them the newest. A new driver needs them for its majority rule (`Quorum`).
    """

    number: int
    older: tuple[tuple[int, ...], ...]


class KnownAgents(Struct, tag=True, frozen=True):
    """Order to an agent (which starts the ranks of a host): store the list of all agents of the job, including the
    receiver.
    """

    agents: Agents


class EndAll(Struct, tag=True, frozen=True):
    """Order to an agent (which starts the ranks of a host): end all ranks, then exit. Training ranks are killed after
    `grace_s` seconds.
    """

    grace_s: float = KILL_GRACE_S


class Heartbeat(Struct, tag=True, frozen=True):
    """Message without content by which a driver (launcher process) or an agent (which starts the ranks of a host) shows
    that it is alive.
    """


class RegisterAgent(Struct, tag=True, frozen=True, kw_only=True):
    """First report of an agent (which starts the ranks of a host) to a driver (launcher process): the complete state of
    the agent and its ranks.

    Attributes:
        places: addresses at which a new driver would listen if this agent started one.
        ranks: ranks that run on the host.
        patience_s: longest time in seconds that any rank computed without polling; 0 if no long time was reported.
        generation: newest generation that the agent has received.
    """

    host: str
    places: Sequence[AgentAddress] = ()
    ranks: Sequence[RankRecord] = ()
    patience_s: float = 0.0
    generation: FormGeneration = NO_GENERATION


class GenerationAck(Struct, tag=True, frozen=True):
    """Report of an agent (which starts the ranks of a host) to the driver (launcher process): it has received
    generation `number` (a set of ranks), and has forwarded it to its ranks.
    """

    number: int


class Relayed(Struct, tag=True, frozen=True):
    """Message of a rank that an agent (which starts the ranks of a host) forwards to the driver (launcher process)."""

    worker: int
    message: FromRank


class RankEnded(Struct, tag=True, frozen=True, kw_only=True):
    """Report of an agent (which starts the ranks of a host) to the driver (launcher process): the process of a rank has
    ended.
    """

    worker: int
    end: RankEnd


ToAgent = StartRank | KillRank | Relay | FormGeneration | KeepGenerations | KnownAgents | EndAll | Heartbeat
FromAgent = RegisterAgent | GenerationAck | Relayed | RankEnded | Heartbeat


@dataclass(frozen=True, slots=True)
class AgentMessage:
    """A message to the driver (launcher process), and the host whose agent (process that starts ranks) has sent it."""

    host: str
    message: FromAgent


@dataclass(frozen=True, slots=True)
class Lost:
    """Event: the driver (launcher process) has given up the agent of a host (the process that starts its ranks). An
    agent that is still alive ends its ranks and exits when it detects the closed connection.
    """

    host: str
    why: str


class Crew(Protocol):
    """Interface to the agents, each of which starts the ranks of a host. Implemented for processes on hosts, for
    simulated agents, and for Ray actors.
    """

    @property
    def hosts(self) -> list[str]:
        """Return the hosts whose agents (processes that start ranks) have not been given up."""
        ...

    def start(self, host: str) -> None:
        """Start the agent (process that starts ranks) of a host.

        A failed start is reported later as the event `Lost`.
        """
        ...

    def stop(self, host: str) -> None:
        """End the agent (process that starts ranks) of a host on which no rank runs or will start."""
        ...

    def send_to(self, hosts: Iterable[str], message: ToAgent) -> None:
        """Send a message to the agents (processes that start ranks) of `hosts`. Hosts without an agent are ignored."""
        ...

    def broadcast_agents(self) -> None:
        """Send the list of all agents (processes that start ranks) to every agent.

        Agents need the list to find or start a new driver (launcher process) if this driver is lost.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """Result of an ended job: its exit code, and the reason why it ended as `text` ("" if the job was completed)."""

    exit_code: int
    text: str = ""


# ── messages to the user ──────────────────────────────────────────────────────────────────────────────────────────────


def difference(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Describe in words which hosts and slots (places for ranks) were added or removed."""
    parts = [f"host {host} with {counted(slots, 'slot')} is new" for host, slots in after.items() if host not in before]
    parts += [f"host {host} was removed" for host in before if host not in after]
    parts += [
        f"host {host} has {counted(slots, 'slot')} instead of {before[host]}"
        for host, slots in after.items()
        if before.get(host, slots) != slots
    ]
    return "; ".join(parts)


def shortened(text: str, limit: int = 2000) -> str:
    """Cut a message to `limit` characters, because it may list very many hosts."""
    return text if len(text) <= limit else f"{text[:limit]} …"


def announcement(form: FormGeneration) -> str:
    """Describe in words a new generation (set of ranks that train together), with its number of ranks on each host."""
    # The counter's hosts are in the order of their first rank.
    hosts = Counter(member.node for member in form.members)
    placed = ", ".join(f"{number} on {host}" for host, number in hosts.items())
    new = sum(not member.has_state for member in form.members)
    fresh = f", {new} of them new" if 0 < new < len(form.members) else ""
    return f"generation {form.number}: {counted(len(form.members), 'rank')} ({placed}){fresh}"


def with_ranks(lost: Collection[RankRecord]) -> str:
    """Return a clause for a message to the user that lists the ranks that were lost with a host. "" if no rank was
    lost.
    """
    ranks = [
        str(worker.rank) for worker in lost if worker.rank is not None and worker.phase is not ProcessPhase.DISMISSED
    ]
    return f" with rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" if ranks else ""


_NOBODY = 0  # A process number that is never assigned. It replaces the number of a dead process in a list of members.


class MemberList:
    """All processes of a job, and the members of its current generation (set of ranks that train together).

    Attributes:
        workers: running processes, by number.
        generation: number of the current generation; 0 before the first.
        members: numbers of the current generation's members in rank order, including dead ones.
        has_succeeded: True if a member of the current generation has completed its work.
        has_state: True if some process has reported that it holds the training state, such as weights.
    """

    def __init__(self) -> None:
        self.workers: dict[int, RankRecord] = {}
        self.generation = 0
        self.members: tuple[int, ...] = ()
        self.has_succeeded = False
        self.has_state = False
        self._numbers = 0
        self._places: dict[int, tuple[str, int]] = {}
        self._ranks: dict[int, int] = {}

    def add(self, host: str, slot: int, now_s: float) -> RankRecord:
        """Add a new process, and return its record."""
        self._numbers += 1
        self._places[self._numbers] = host, slot
        worker = self.workers[self._numbers] = RankRecord(number=self._numbers, host=host, slot=slot, since_s=now_s)
        return worker

    def take_over(self, workers: Sequence[RankRecord], generation: int, members: Sequence[int]) -> None:
        """Take over the processes that a lost driver (launcher process) had started."""
        for worker in workers:
            self.workers[worker.number] = worker
            self._places[worker.number] = worker.host, worker.slot
        self._numbers = max([0, *self.workers, *members])
        self.has_state = any(worker.has_state for worker in workers)
        there = [number for number in members if number in self.workers]
        # Processes that are not in `told` had not received the generation (set of ranks) when the driver (launcher
        # process) was lost. They were never members.
        told = [number for number in there if self.workers[number].generation == generation]
        for rank, number in enumerate(members):
            if number in self.workers:
                self.workers[number].generation, self.workers[number].rank = generation, rank
                self._ranks[number] = rank
        self.generation = generation
        self.members = tuple(number if number in told else _NOBODY for number in members)
        self.has_succeeded = bool(self.of_generation(ProcessPhase.FINISHED))

    def begin(self, members: list[RankRecord], now_s: float) -> None:
        """Make `members`, which are in rank order, the current generation (set of ranks that train together)."""
        self.generation += 1
        self.members = tuple(worker.number for worker in members)
        self.has_succeeded = False
        for rank, worker in enumerate(members):
            worker.rank, worker.generation = rank, self.generation
            self._ranks[worker.number] = rank
            worker.enter(ProcessPhase.MEMBER, now_s)

    def label(self, number: int) -> str:
        """Return the prefix of output lines of a process, which may have ended: its rank, or its host and slot if it
        has no rank yet.
        """
        host, slot = self._places.get(number, ("?", 0))
        return str(self._ranks.get(number, f"{host}:{slot}"))

    def is_of(self, host: str, number: int) -> bool:
        """Return whether the process runs or ran on `host`."""
        return self._places.get(number, ("", 0))[0] == host

    def place(self, number: int) -> str:
        """Return the name of the output folder of a process, made of its host and slot."""
        host, slot = self._places.get(number, ("unknown", 0))
        return f"{host}.{slot}"

    def present(self, *phases: ProcessPhase) -> list[RankRecord]:
        """Return the running processes that are in one of these phases."""
        return [worker for worker in self.workers.values() if worker.phase in phases]

    def of_generation(self, *phases: ProcessPhase) -> list[RankRecord]:
        """Return the running members of the current generation (set of ranks that train together) that are in one of
        these phases, in rank order.
        """
        found = (self.workers[number] for number in self.members if number in self.workers)
        return [worker for worker in found if worker.phase in phases]

    @property
    def survivors(self) -> list[RankRecord]:
        """Return the members of the current generation (set of ranks that train together) that
        remain for the next one.
        """
        return [
            worker for worker in self.of_generation(ProcessPhase.MEMBER, ProcessPhase.WAITING) if not worker.is_leaving
        ]

    @property
    def wanted(self) -> list[RankRecord]:
        """Return the processes that are members or may become members."""
        active = self.present(ProcessPhase.STARTING, ProcessPhase.WAITING, ProcessPhase.MEMBER)
        return [worker for worker in active if not worker.is_leaving]

    def mark_leaving(self, usable: Mapping[str, int], most: int | None) -> None:
        """Decide for each process whether it must leave the job, and set `is_leaving`.

        Args:
            usable: slots of each host that is not excluded.
            most: maximum number of ranks; None for no limit. The youngest processes leave first.
        """
        for worker in self.present(ProcessPhase.STARTING, ProcessPhase.WAITING, ProcessPhase.MEMBER):
            worker.is_leaving = worker.slot >= usable.get(worker.host, 0)
        for worker in sorted(self.wanted, key=seniority)[most:] if most is not None else ():
            worker.is_leaving = True

    @property
    def is_running(self) -> bool:
        """Return whether some member still trains: it has not asked yet for the next generation (set of ranks that
        train together).
        """
        return bool(self.of_generation(ProcessPhase.MEMBER))

    @property
    def newcomers(self) -> list[RankRecord]:
        """Return the processes that wait to train and are not members of the current generation (set of ranks that
        train together).
        """
        waiting = self.present(ProcessPhase.WAITING)
        return [worker for worker in waiting if worker.number not in self.members and not worker.is_leaving]

    @property
    def is_diminished(self) -> bool:
        """Return whether a member of the current generation (set of ranks that train together) has died, or must leave
        while at least one other member stays.
        """
        there = self.of_generation(*ProcessPhase)
        if len(there) < len(self.members):
            return True
        leave = any(worker.is_leaving for worker in there)
        return leave and any(worker.phase is not ProcessPhase.STARTING for worker in self.wanted)

    def candidates(self, most: int | None) -> list[RankRecord]:
        """Return the members of the next generation (set of ranks that train together), chosen from the waiting
        processes.

        If a process that must leave is the only one that holds the training state (such as weights), it stays for one
        more generation, to send the state to the other members.

        Args:
            most: maximum number of ranks; None for no limit.
        """
        waiting = self.present(ProcessPhase.WAITING)
        wanted = [worker for worker in waiting if not worker.is_leaving]
        if any(worker.has_state for worker in wanted):
            return wanted
        leaving = sorted((worker for worker in waiting if worker.is_leaving and worker.has_state), key=seniority)
        if most is not None:
            leaving = leaving[: max(1, most - len(wanted))]
            wanted = wanted[: most - len(leaving)]
        return wanted + leaving

    def dismissible(self) -> Iterator[RankRecord]:
        """Return the waiting processes that must leave and may be dismissed."""
        is_state_kept = any(worker.has_state for worker in self.wanted)
        for worker in self.present(ProcessPhase.WAITING):
            if worker.is_leaving and (is_state_kept or not worker.has_state):
                yield worker

    def free_slots(self, host: str, slots: int) -> list[int]:
        """Return the numbers of the slots (places for ranks) of a host in which no process runs."""
        taken = {worker.slot for worker in self.workers.values() if worker.host == host}
        return [slot for slot in range(slots) if slot not in taken]


class JobMembers:
    """Membership rules of an elastic job: decide which ranks start, train together in the next generation, or are given
    up, and when the job ends.

    Methods receive events in the order in which they occur, and send the resulting orders to agents immediately.

    Attributes:
        policy: settings of the job.
        pool: hosts that host discovery lists, with their failures and exclusions.
        member_list: processes of the job, and members of the current generation.
        agents: for each host with an agent, True if the agent is running, False while it starts.
        end: result of the job. None while the job continues.
    """

    def __init__(self, policy: Policy, crew: Crew, say: Callable[[str], None], rng: random.Random) -> None:
        """Create rules for a job without hosts and processes.

        Args:
            policy: settings of the job.
            crew: sends orders to agents.
            say: prints a line for the user.
            rng: source of the random jitter of exclusion times.
        """
        self.policy, self.pool = policy, HostPool(policy, rng)
        self._crew, self._print = crew, say
        self.member_list = MemberList()
        self.end: JobEnd | None = None
        self.agents: dict[str, bool] = {}
        self._notified = Change(0)  # Membership changes of which current members were notified.
        # End (such as "exited with 1") of the first member that has died since the last elastic restart.
        self._lost = self._notified_lost = ""
        self._failure: tuple[str, RankEnd] | None = None  # The first failure since the last elastic restart.
        # True if a process has completed its work (`_ended_well`), or has failed (`_ended_badly`), before the first
        # generation began.
        self._ended_well = self._ended_badly = False
        self._host_problem = ""  # Newest problem of a host, for the message that ends the job.
        self._reasons: set[str] = set()  # Reasons for failures that were already printed.
        self._short_since_s: float | None = None
        self._quorum = Quorum()
        self._enough_since_s: float | None = None
        self._longest_s = 0.0

    def take_over(self, reports: Mapping[str, RegisterAgent], now_s: float) -> bool:
        """Continue a job whose driver (launcher process) was lost. Called before all other methods.

        Args:
            reports: first reports of agents (each starts the ranks of a host), by host.
            now_s: current time.

        Returns:
            True if this driver may continue the job. After a network split, only one side may continue. False if no
            generation has begun yet.
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
        # Record that there is a training state if a member held it when the generation began: the job cannot continue
        # without it.
        self.member_list.has_state = self.member_list.has_state or newest.has_state
        self._quorum.take_over(newest, self.member_list.workers)
        return bool(newest.number) and not self._quorum.is_lost

    def found(self, hosts: Mapping[str, int], now_s: float) -> None:
        """Process the hosts, with their slots (numbers of ranks), that host discovery has listed."""
        before = self.pool.known
        self.pool.find(hosts)
        if before and before != self.pool.known:
            self._print(shortened(difference(before, self.pool.known)))
        self.tick(now_s)

    def answer(self, events: Iterable[AgentMessage | Lost], now_s: float) -> None:
        """Process messages of agents (each starts the ranks of a host) and losses of agents that occurred at the same
        time.

        The rules decide once, after all events. Every decision examines all ranks, so that one decision for each of a
        thousand simultaneous requests would take many seconds.
        """
        for event in events:
            if self.end is not None:
                return
            if isinstance(event, Lost):
                self._lose_agent(event.host, event.why, now_s)
            else:
                self._process_message(event.host, event.message, now_s)
        self.tick(now_s)

    def tick(self, now_s: float) -> None:
        """Start, dismiss or kill ranks as the current state requires. Called often, because time limits are checked
        here, too.
        """
        for step in (self._start_and_end, self._advance, self._notify_members, self._wait_for_others):
            if self.end is None:
                step(now_s)

    def _process_message(self, host: str, message: FromAgent, now_s: float) -> None:
        listed = self.member_list
        match message:
            case RegisterAgent():
                self._crew.broadcast_agents()
                if host in self.agents:
                    self.agents[host] = True
                return
            case GenerationAck(number):
                self._quorum.inform(number, lambda worker: listed.is_of(host, worker))
                return
            case Heartbeat():
                return
        worker = listed.workers.get(message.worker)
        if worker is None or worker.host != host:
            return  # Ignore the message: its process was given up earlier.
        match message:
            case Relayed(message=Join(member=member)):
                if worker.phase in (ProcessPhase.DISMISSED, ProcessPhase.FINISHED):
                    self._dismiss(worker)
                else:
                    worker.member = member
                    worker.has_state = worker.has_state or member.has_state
                    listed.has_state = listed.has_state or member.has_state
                    worker.enter(ProcessPhase.WAITING, now_s)
            # Extend the limit for all ranks: other ranks may compute as long without polling.
            case Relayed(message=Patience(seconds)):
                self._longest_s = max(self._longest_s, seconds)
            case Relayed(message=Finished()):  # Mark the process as finished. It may still run for a while.
                if worker.phase is ProcessPhase.MEMBER:
                    worker.enter(ProcessPhase.FINISHED, now_s)
                    listed.has_succeeded = True
            case RankEnded(end=end):
                del listed.workers[worker.number]
                self._quorum.died(worker.number)
                if worker.phase is ProcessPhase.MEMBER:
                    self._lost = self._lost or f"{worker.label} {end.text}"
                if worker.phase is ProcessPhase.FINISHED and end.exit_code:
                    self._print(f"{worker.label} {end.text} after it had completed its work")
                elif worker.phase is ProcessPhase.MEMBER and end.exit_code == 0 and not worker.is_leaving:
                    listed.has_succeeded = True
                elif worker.phase not in (ProcessPhase.DISMISSED, ProcessPhase.FINISHED):
                    self._lose(worker, end, now_s)

    def _lose_agent(self, host: str, why: str, now_s: float) -> None:
        """Record that the agent (process that starts ranks) and the ranks of a host have ended or are unreachable."""
        if self.agents.pop(host, None) is None:
            return
        lost = [worker for worker in self.member_list.workers.values() if worker.host == host]
        for worker in lost:
            del self.member_list.workers[worker.number]
        self._host_problem = problem = f"host {host} is lost ({why})"
        self._lost = self._lost or problem
        self._failure = self._failure or (f"host {host}", RankEnd(exit_code=1, reason=why))
        what = self._left_out(host, now_s) if host in self.pool.usable else ""
        self._print(f"{problem}{with_ranks(lost)}{what}{self._go_on()}")
        self._quorum.lose([worker.number for worker in lost])
        if self.policy.has_successors and self._quorum.is_lost and not self.member_list.has_succeeded:
            why = "too many ranks cannot be reached, and may continue without this side (--on-driver-loss go-on)"
            self._end(self._failed(why))

    @property
    def _leave_s(self) -> float:
        """Return how many seconds a rank may take to stop training for an elastic restart, before it is killed."""
        return max(self.policy.leave_s, min(2 * self._longest_s, self.policy.timeout_s))

    def _lose(self, worker: RankRecord, end: RankEnd, now_s: float) -> None:
        """Record that a process has failed, or has ended before it was a member. Exclude its host if the
        policy requires it.
        """
        if end.exit_code == 0:
            self._ended_well = True
            if self.member_list.generation == 0:
                return
            end = RankEnd(exit_code=1, reason="it ended before it joined a generation")
        self._failure = self._failure or (worker.label, end)
        self._ended_badly = True
        if worker.verdict:
            text = worker.verdict
        elif worker.is_leaving:
            text = f"{end.text}; it was about to be dismissed"
        elif end.reason and end.reason in self._reasons:
            text = "failed for the same reason"
        else:
            text = end.text
        self._reasons.add(end.reason)
        settled = worker.phase is ProcessPhase.MEMBER and now_s - worker.since_s >= self.policy.settled_s
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
        self._print(f"{worker.label} {text}{what}{self._go_on()}")

    def _may_start(self) -> bool:
        """Return whether a rank that is started now can still take part in training."""
        if self.member_list.has_succeeded or (self._ended_well and not self.member_list.generation):
            return False
        if self.member_list.generation == 0:
            return not self._ended_badly or bool(self.member_list.present(ProcessPhase.WAITING))
        return bool(self.member_list.of_generation(ProcessPhase.MEMBER, ProcessPhase.WAITING))

    def _start_and_end(self, now_s: float) -> None:
        for host in self.pool.take_back(now_s):
            self._print(f"host {host} is used again")
        self._dismiss_surplus(now_s)
        self._end(self._reached_end())
        if self.end is None and self._may_start():
            self._start_ranks(now_s)

    def _notify_members(self, now_s: float) -> None:
        """Notify the members when new ranks wait, when a member leaves, and when the first member dies.

        A member may wait for messages of the dead member, and must stop waiting.
        """
        del now_s
        listed = self.member_list
        if listed.is_running and not listed.has_succeeded:
            change = Change.ADDED if listed.newcomers else Change(0)
            change |= Change.REMOVED if listed.is_diminished else Change(0)
            lost = self._lost if len(listed.of_generation(*ProcessPhase)) < len(listed.members) else ""
            if (new := change & ~self._notified) or lost != self._notified_lost:
                self._notified, self._notified_lost = self._notified | new, lost
                members = listed.of_generation(ProcessPhase.MEMBER)
                tell = Relay(tuple(worker.number for worker in members), Changed(new, lost))
                self._crew.send_to(dict.fromkeys(worker.host for worker in members), tell)
        if self._quorum.drop_decided() and self.policy.has_successors:
            self._crew.send_to(self._crew.hosts, KeepGenerations(number=listed.generation, older=self._quorum.older))

    def _dismiss_surplus(self, now_s: float) -> None:
        """End processes whose slot (place for a rank) was removed, and stop agents (processes that start ranks) on
        hosts without ranks.
        """
        usable = self.pool.usable
        self.member_list.mark_leaving(usable, self.policy.max_ranks)
        for worker in self.member_list.present(ProcessPhase.STARTING):
            if worker.is_leaving:
                self._send(worker, KillRank(worker=worker.number, at_once=False))
                worker.enter(ProcessPhase.DISMISSED, now_s)
        for worker in list(self.member_list.dismissible()):
            self._dismiss(worker)
            worker.enter(ProcessPhase.DISMISSED, now_s)
        for worker in self.member_list.present(ProcessPhase.DISMISSED):
            if now_s - worker.since_s > self.policy.leave_s:
                self._send(worker, KillRank(worker=worker.number, at_once=True))
                worker.since_s = now_s
        for host in [host for host in self.agents if host not in usable]:
            if all(worker.host != host for worker in self.member_list.workers.values()):
                del self.agents[host]
                self._crew.stop(host)

    def _start_ranks(self, now_s: float) -> None:
        """Start ranks in free slots (places for ranks), and agents (processes that start ranks) on hosts that have
        none.
        """
        usable, most = self.pool.usable, self.policy.max_ranks
        room = sum(usable.values()) if most is None else most - len(self.member_list.wanted)
        for host, slots in usable.items():
            if room <= 0:  # Skip the remaining hosts: there may be thousands.
                break
            free = self.member_list.free_slots(host, slots)[:room]
            if free and host not in self.agents:
                self.agents[host] = False
                self._crew.start(host)
            room -= len(free)
            for slot in free if self.agents.get(host) else ():
                worker = self.member_list.add(host, slot, now_s)
                self._send(worker, StartRank(worker=worker.number, slot=slot))

    def _reached_end(self) -> JobEnd | None:
        """Return the result of the job if no rank is left, or if no rank can do further work. None while the job
        continues.
        """
        member_list, slots = self.member_list, sum(self.pool.usable.values())
        if member_list.generation:
            if member_list.of_generation(ProcessPhase.MEMBER, ProcessPhase.FINISHED):
                return None
            if member_list.has_succeeded:
                return JobEnd(exit_code=0)
            if not member_list.of_generation(ProcessPhase.WAITING) and self._failure is not None:
                return self._failed("all ranks of the job have failed")
        elif self._host_problem and self.policy.hosts_stay and slots < self.policy.start_ranks:
            return JobEnd(
                exit_code=1,
                text=f"the job needs {self.policy.start_ranks} ranks to start, but the remaining hosts have {slots} "
                f"slots: repair the host{f', or use -np {slots}' if slots >= self.policy.min_ranks else ''}",
            )
        elif not member_list.workers:
            if self._ended_badly:
                return self._failed("no rank was able to join the job")
            if self._ended_well:
                return JobEnd(exit_code=0)
            if self._host_problem and not self.agents and not slots:
                return JobEnd(exit_code=1, text=f"{self._host_problem}; no host is left")
        return None

    def _wait_for_others(self, now_s: float) -> None:
        """End the job if ranks have waited too long for `min_ranks` ranks, or if no further rank can start."""
        if self.member_list.is_running or self.member_list.present(ProcessPhase.FINISHED):
            self._short_since_s = None
            return
        self._short_since_s = now_s if self._short_since_s is None else self._short_since_s
        least = self.policy.min_ranks if self.member_list.generation else self.policy.start_ranks
        came = len(self.member_list.candidates(self.policy.max_ranks))
        if self.policy.hosts_stay and self._most_candidates(now_s) < least:
            gone = sorted(self._gone(now_s))
            self._end(
                self._failed(
                    f"{came} of at least {least} ranks are ready, and no more can start: {', '.join(gone[:3])} "
                    f"{'is' if len(gone) == 1 else 'are'} excluded permanently after a failure; "
                    "--on-failure replace-rank starts another rank in place of a failed one, "
                    "--blacklist-cooldown-range ends exclusions, --host-discovery-script finds more hosts, --min-np "
                    "continues with fewer ranks"
                )
            )
        elif now_s - self._short_since_s > self.policy.timeout_s:
            problem = f"; {self._host_problem}" if self._host_problem else ""
            text = (
                f"{came} of at least {least} ranks were ready within {self.policy.timeout_s:g} s; --elastic-timeout "
                f"waits longer, --min-np continues with fewer ranks{problem}"
            )
            self._end(JobEnd(exit_code=1, text=text))

    def _gone(self, now_s: float) -> list[str]:
        """Return the hosts that are excluded permanently."""
        return [host for host, (_, left_s) in self.pool.left_out(now_s).items() if left_s is None]

    def _most_candidates(self, now_s: float) -> int:
        """Return the maximum number of ranks after the next elastic restart if no further host is found."""
        gone = self._gone(now_s)
        slots = sum(slots for host, slots in self.pool.known.items() if host not in gone)
        return slots + sum(worker.host in gone for worker in self.member_list.candidates(None))

    def _failed(self, text: str) -> JobEnd:
        """Return the result of a job that failed for the reason `text`, with the exit code of the first failed
        process.
        """
        if self._failure is None:
            return JobEnd(exit_code=1, text=text)
        label, end = self._failure
        return JobEnd(exit_code=end.exit_code or 1, text=f"{text}; the first failure: {label} {end.text}")

    def _left_out(self, host: str, now_s: float) -> str:
        """Exclude a host, and return a clause that says for how long."""
        cooldown_s = self.pool.drop(host, now_s)
        how_long = "permanently" if cooldown_s is None else f"for {cooldown_s:.0f} s"
        return f"; host {host} is excluded {how_long}"

    def _go_on(self) -> str:
        """Return a clause that says how many ranks continue, for messages to the user."""
        usable = self.pool.usable
        left = len([worker for worker in self.member_list.survivors if worker.host in usable])
        return f", {left} continue{'s' * (left == 1)}" if left else ""

    def _advance(self, now_s: float) -> None:
        """Begin the next generation (set of ranks that train together) if all members have stopped training and enough
        ranks wait.
        """
        listed = self.member_list
        if listed.is_running:
            asked = [worker.since_s for worker in listed.of_generation(ProcessPhase.WAITING)]
            if asked and now_s - min(asked) > self._leave_s:
                for worker in listed.of_generation(ProcessPhase.MEMBER):
                    if not worker.verdict:
                        worker.verdict = f"did not leave its generation within {self._leave_s:g} s and was killed"
                        self._send(worker, KillRank(worker=worker.number, at_once=True))
            return
        if listed.has_succeeded:
            return  # Wait until the processes that have completed their work have ended.
        candidates = listed.candidates(self.policy.max_ranks)
        if listed.has_state and not any(worker.has_state for worker in candidates):
            if not any(worker.has_state for worker in listed.workers.values()):
                self._end(self._failed("no remaining rank holds the state of the job"))
            return
        if len(candidates) < (self.policy.min_ranks if listed.generation else self.policy.start_ranks):
            self._enough_since_s = None
            return
        self._enough_since_s = now_s if self._enough_since_s is None else self._enough_since_s
        coming = any(not worker.is_leaving for worker in listed.present(ProcessPhase.STARTING)) or not all(
            self.agents.values()
        )
        if not listed.generation and coming and now_s - self._enough_since_s < self.policy.start_grace_s:
            return
        if self.policy.has_successors and not self._quorum.permits([worker.number for worker in candidates]):
            return  # Wait until the dismissed processes have ended.
        if self.policy.reset_limit is not None and listed.generation > self.policy.reset_limit:
            text = f"--reset-limit {self.policy.reset_limit}: the job would need one more reset"
            self._end(JobEnd(exit_code=1, text=text))
            return
        self._form(candidates, now_s)

    def _form(self, candidates: list[RankRecord], now_s: float) -> None:
        member_list = self.member_list
        members = ranked(candidates, list(self.pool.known))
        member_list.begin(members, now_s)
        self._quorum.begin(member_list.generation, member_list.members)
        form = FormGeneration(
            number=member_list.generation,
            workers=member_list.members,
            members=tuple(
                replace(each.member, node=each.host, slot=each.slot, number=each.number, has_state=each.has_state)
                for each in members
            ),
            older=self._quorum.older if self.policy.has_successors else None,
            has_state=any(each.has_state for each in members),
            left_out=self.pool.left_out(now_s),
        )
        # Send the new generation (set of ranks) to the agents that start its ranks. If an agent may have to replace a
        # lost driver (launcher process), send it to all agents, because the replacement must know it.
        hosts = self._crew.hosts if self.policy.has_successors else [member.node for member in form.members]
        self._crew.send_to(dict.fromkeys(hosts), form)
        self._print(announcement(form))
        self._notified, self._lost, self._notified_lost = Change(0), "", ""
        self._enough_since_s = None
        self._failure, self._host_problem = None, ""

    def _end(self, end: JobEnd | None) -> None:
        if end is not None:
            self.end = end
            for worker in self.member_list.present(ProcessPhase.WAITING):
                self._dismiss(worker)

    def _dismiss(self, worker: RankRecord) -> None:
        """Tell a waiting rank that it must exit, because the job does not need it any more."""
        self._send(worker, Relay((worker.number,), Dismissal()))

    def _send(self, worker: RankRecord, message: ToAgent) -> None:
        self._crew.send_to([worker.host], message)


# ── how long a driver that takes over waits ──────────────────────────────────────────────────────────────────────────

ADOPT_S = 30.0
"""Seconds for which a new driver (launcher process) waits for further agents (processes that start ranks) although a
majority has connected.

Some agents may first have tried to reach other drivers after the old driver was lost.
"""

GATHER_S = 120.0
"""Seconds for which a new driver (launcher process) waits for a majority of the ranks after the old driver was lost.

An agent may detect the loss of the old driver only when its connection times out.
"""


def newest_generation(reports: Mapping[str, RegisterAgent]) -> FormGeneration:
    """Return the newest generation (set of ranks that train together) that any agent has reported."""
    known = [report.generation for report in reports.values()]
    return max(known, key=lambda form: (form.number, -len(form.older or ())), default=NO_GENERATION)


def has_waited(for_s: float, reports: Mapping[str, RegisterAgent], expected: Collection[int]) -> bool:
    """Return whether a new driver (launcher process), after the old one was lost, has waited long enough for agents
    (processes that start ranks).

    Args:
        for_s: seconds since the new driver began to wait.
        reports: reports of agents that have connected.
        expected: ids of agents that have not connected yet.
    """
    newest, quorum = newest_generation(reports), Quorum()
    quorum.take_over(newest, [worker.number for report in reports.values() for worker in report.ranks])
    # Wait the full time: the job cannot continue with the ranks of only these agents.
    if not newest.number or quorum.is_lost:
        return for_s > GATHER_S
    return not expected or for_s > ADOPT_S
