"""The rules of membership: single stories, and the parts that decide by themselves."""

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest

from sirtaki.comm.control.members import Member
from sirtaki.engine.membership import Change, Changed, Dismissal, Finished, Join, Patience
from sirtaki.run.elastic.job_members import (
    AgentMessage,
    FormGeneration,
    FromAgent,
    HostPool,
    JobEnd,
    JobMembers,
    KillRank,
    Lost,
    OnFailure,
    Policy,
    ProcessPhase,
    Quorum,
    RankEnd,
    RankEnded,
    RankRecord,
    RegisterAgent,
    Relay,
    Relayed,
    StartRank,
    ToAgent,
    difference,
    ranked,
    with_ranks,
)

KILLED = RankEnd(exit_code=137)
RAISED = RankEnd(exit_code=3, reason="ValueError: a bad batch")
WELL = RankEnd(exit_code=0)


@dataclass(frozen=True)
class Agent:
    """An agent was started, or stopped."""

    host: str
    starts: bool


class Story:
    """A job whose agents start at once, and whose ranks do what the test says; it is the crew of its rules.

    Attributes:
        all: what the rules have had done: messages to agents, agents started and stopped, lines for the user, the end.
        sent: messages with the hosts that they went to.
    """

    def __init__(self, hosts: dict[str, int] | None = None, **policy: Any) -> None:
        self.now_s, self.hosts, self.said = 0.0, list[str](), list[str]()
        self.all, self.sent, self._up = list[Any](), list[tuple[list[str], ToAgent]](), list[str]()
        held = Policy(**{"start_ranks": 2, "min_ranks": 2, **policy})
        self.members = JobMembers(held, self, self.said.append, random.Random(0))
        if hosts is not None:
            self.find(hosts)

    # ── the crew ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, host: str) -> None:
        self.all.append(Agent(host, True))
        self.hosts.append(host)
        self._up.append(host)

    def stop(self, host: str) -> None:
        self.all.append(Agent(host, False))
        self.hosts.remove(host)

    def send_to(self, hosts: Iterable[str], message: ToAgent) -> None:
        self.all.append(message)
        self.sent.append((sorted(hosts), message))

    def broadcast_agents(self) -> None:
        pass

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────────

    def does(self, event: Callable[..., None], *args: Any) -> list[Any]:
        """Apply an event. Return the actions of the rules. Requested agents exist at once."""
        before = len(self.all)
        event(*args, self.now_s)
        while self._up:
            host = self._up.pop(0)
            self.members.answer([AgentMessage(host, RegisterAgent(host=host))], self.now_s)
        if self.members.end is not None and self.members.end not in self.all:
            self.all.append(self.members.end)
        return self.all[before:]

    def find(self, hosts: dict[str, int]) -> list[Any]:
        return self.does(self.members.found, hosts)

    def hear(self, worker: int, *messages: FromAgent) -> list[Any]:
        return self.does(self.members.answer, [AgentMessage(self.host_of(worker), message) for message in messages])

    def join(self, *workers: int, has_state: bool = False) -> list[Any]:
        said = Join(member=Member(has_state=has_state))
        return [each for worker in workers for each in self.hear(worker, Relayed(worker, said))]

    def end(self, worker: int, how: RankEnd) -> list[Any]:
        return self.hear(worker, RankEnded(worker=worker, end=how))

    def lose(self, host: str, why: str) -> list[Any]:
        return self.does(self.members.answer, [Lost(host, why)])

    def wait(self, seconds: float) -> list[Any]:
        self.now_s += seconds
        return self.does(self.members.tick)

    def host_of(self, worker: int) -> str:
        return self.members.member_list.place(worker).rpartition(".")[0]


def of(kind: type, actions: list[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def agents(actions: list[Any], *, starts: bool = True) -> list[str]:
    return [each.host for each in of(Agent, actions) if each.starts is starts]


def changes(actions: list[Any]) -> list[Relay]:
    return [each for each in of(Relay, actions) if isinstance(each.message, Changed)]


def dismissed(actions: list[Any]) -> list[int]:
    return [worker for each in of(Relay, actions) if isinstance(each.message, Dismissal) for worker in each.workers]


def new_in(form: FormGeneration) -> set[int]:
    return {worker for worker, member in zip(form.workers, form.members, strict=True) if not member.has_state}


def running(hosts: dict[str, int], **policy: Any) -> Story:
    """Return a job in its first generation, with a rank in every slot."""
    story = Story(hosts, **policy)
    story.join(*range(1, sum(hosts.values()) + 1))
    assert story.members.member_list.generation == 1
    return story


def test_the_first_generation_begins_once_all_that_have_started_have_joined() -> None:
    story = Story({"a": 2, "b": 1})
    started = [(hosts, message) for hosts, message in story.sent if isinstance(message, StartRank)]
    ranks = [("a", 0), ("a", 1), ("b", 0)]
    assert started == [([host], StartRank(worker=n, slot=slot)) for n, (host, slot) in enumerate(ranks, start=1)]
    assert of(FormGeneration, story.join(3, 2)) == []
    (form,) = of(FormGeneration, story.join(1))
    assert (form.number, form.workers, new_in(form)) == (1, (1, 2, 3), {1, 2, 3})


def test_the_first_generation_does_not_wait_for_a_missing_rank_for_ever() -> None:
    story = Story({"a": 3}, start_grace_s=10.0)
    story.join(1, 2)
    assert of(FormGeneration, story.wait(9.0)) == []
    assert of(FormGeneration, story.wait(2.0))[0].workers == (1, 2)
    (tell,) = changes(story.join(3))
    assert (tell.workers, tell.message.change) == ((1, 2), Change.ADDED)


def test_survivors_of_a_killed_rank_continue_at_once_and_its_successor_joins_later() -> None:
    story = running({"a": 2, "b": 2})
    actions = story.end(3, KILLED)
    assert of(StartRank, actions) == [StartRank(worker=5, slot=0)]
    assert changes(actions) == [
        Relay((1, 2, 4), Changed(Change.REMOVED, "rank 2 (host b, slot 0) was killed by SIGKILL"))
    ]
    assert story.said[-1] == ("rank 2 (host b, slot 0) was killed by SIGKILL; replaced in place, 3 continue")
    (form,) = of(FormGeneration, story.join(1, 4, 2, has_state=True))
    assert (form.number, form.workers, new_in(form)) == (2, (1, 2, 4), set())
    (tell,) = changes(story.join(5))
    assert tell == Relay((1, 2, 4), Changed(Change.ADDED))
    (form,) = of(FormGeneration, story.join(4, 2, 1, has_state=True))
    assert (form.number, form.workers, new_in(form)) == (3, (1, 2, 4, 5), {5})


def test_a_member_that_does_not_leave_its_generation_is_killed() -> None:
    story = running({"a": 3})
    story.end(1, KILLED)
    story.join(2, has_state=True)
    assert of(KillRank, story.wait(29.0)) == []
    assert of(KillRank, story.wait(2.0)) == [KillRank(worker=3, at_once=True)]
    assert of(KillRank, story.wait(2.0)) == []
    story.end(3, KILLED)
    assert "rank 2 (host a, slot 2) did not leave its generation within 30 s and was killed" in story.said[-1]
    assert of(FormGeneration, story.join(4))[0].workers == (2, 4)


@pytest.mark.parametrize(("longest_s", "limit_s"), [(12.0, 30.0), (40.0, 80.0), (1000.0, 600.0)])
def test_a_member_has_twice_the_time_that_any_has_computed_without_looking(longest_s: float, limit_s: float) -> None:
    story = running({"a": 3})
    story.hear(2, Relayed(2, Patience(longest_s)))
    story.end(1, KILLED)
    story.join(2, has_state=True)
    assert of(KillRank, story.wait(limit_s - 1.0)) == []
    assert of(KillRank, story.wait(2.0)) == [KillRank(worker=3, at_once=True)]


def test_a_host_that_discovery_takes_away_is_left_at_the_next_commit() -> None:
    story = running({"a": 2, "b": 1})
    assert changes(story.find({"a": 2})) == [Relay((1, 2, 3), Changed(Change.REMOVED))]
    assert of(FormGeneration, story.join(3, 1, has_state=True)) == []
    actions = story.join(2, has_state=True)
    assert of(FormGeneration, actions)[0].workers == (1, 2)
    assert dismissed(story.all) == [3]
    assert agents(story.end(3, WELL), starts=False) == ["b"]
    assert "host b was removed" in story.said


def test_very_many_hosts_and_slots_cause_no_delay() -> None:
    story = running({"a": 2}, max_ranks=2)
    begin_s = time.monotonic()
    actions = story.find({"a": 2} | {f"h{number}": 4096 for number in range(10_000)})
    assert of(StartRank, actions) == agents(actions) == []
    assert len(story.said[-1]) < 3000
    assert time.monotonic() - begin_s < 5.0


def test_a_reported_fact_is_not_reported_again() -> None:
    story = running({"a": 2})
    for worker in (1, 2):
        story.end(worker, RankEnd(exit_code=1, reason="ValueError: a bad batch"))
    assert [line.partition(";")[0] for line in story.said[1:3]] == [
        "rank 0 (host a, slot 0) failed (ValueError: a bad batch)",
        "rank 1 (host a, slot 1) failed for the same reason",
    ]


def test_a_rank_to_be_dismissed_hands_the_state_over_first() -> None:
    story = running({"a": 1}, start_ranks=1, min_ranks=1)
    story.find({"b": 1})
    story.join(1, has_state=True)  # and nobody else is there: it goes on
    assert story.members.member_list.members == (1,)
    story.join(2)
    (form,) = of(FormGeneration, story.join(1, has_state=True))
    assert (form.workers, new_in(form)) == ((1, 2), {2})
    story.join(1, has_state=True)
    (form,) = of(FormGeneration, story.join(2, has_state=True))
    assert form.workers == (2,)
    assert 1 in dismissed(story.all)


def test_a_rank_that_fails_again_and_again_leaves_its_host_out() -> None:
    story = running({"a": 2, "b": 1}, cooldown_s=(10.0, 100.0))
    for worker in (3, 4):
        story.end(worker, RAISED)
    assert story.said[-1].endswith("replaced in place, 2 continue")
    assert of(StartRank, story.end(5, RAISED)) == []
    assert "host b is excluded for" in story.said[-1]
    assert of(StartRank, story.wait(12.0)) == [StartRank(worker=6, slot=0)]
    assert "host b is used again" in story.said


def test_a_killed_rank_that_had_joined_is_no_mark_against_its_host() -> None:
    story = running({"a": 2}, min_ranks=1)
    for _ in range(10):
        alive = [worker.number for worker in story.members.member_list.of_generation(ProcessPhase.MEMBER)]
        story.end(alive[-1], KILLED)
        story.join(alive[0], has_state=True)
        story.join(max(story.members.member_list.workers))
        story.join(alive[0], has_state=True)
        assert len(story.members.member_list.members) == 2


def test_horovods_policy_drops_the_host_for_good() -> None:
    story = running({"a": 2, "b": 2}, on_failure=OnFailure.DROP_HOST)
    story.end(3, KILLED)
    assert story.said[-1] == (
        "rank 2 (host b, slot 0) was killed by SIGKILL; host b is excluded permanently, 2 continue"
    )
    assert of(FormGeneration, story.join(4, 1, 2, has_state=True))[0].workers == (1, 2)
    assert dismissed(story.all) == [4]
    assert of(StartRank, story.wait(1e5)) == []


def test_all_have_failed_is_the_failure_of_the_first() -> None:
    story = running({"a": 2})
    story.end(2, RAISED)
    (end,) = of(JobEnd, story.end(1, RankEnd(exit_code=1, reason="PeerLostError: rank 1 died")))
    assert end.exit_code == 3
    assert "the first failure: rank 1 (host a, slot 1) failed (ValueError: a bad batch)" in end.text


def test_a_job_has_succeeded_once_all_have_reported_and_one_has_finished() -> None:
    story = running({"a": 3})
    story.hear(1, Relayed(1, Finished()))
    assert of(JobEnd, story.end(1, WELL)) == []
    story.end(2, KILLED)
    assert len(of(StartRank, story.all)) == 3  # nobody is started for a job that is nearly over
    assert of(JobEnd, story.join(3, has_state=True)) == [JobEnd(exit_code=0)]
    assert dismissed(story.all) == [3]


def test_the_limit_of_resets_holds() -> None:
    story = running({"a": 3}, min_ranks=1, reset_limit=1)
    story.end(1, KILLED)
    assert of(FormGeneration, story.join(2, 3, has_state=True))
    story.end(2, KILLED)
    (end,) = of(JobEnd, story.join(3, has_state=True))
    assert "--reset-limit 1: the job would need one more reset" in end.text


def test_a_lost_host_is_reported_in_one_line_and_dropped() -> None:
    story = running({"a": 1, "b": 2}, min_ranks=1, cooldown_s=(30.0, 60.0))
    story.lose("b", "it is silent")
    assert story.said[-1].startswith("host b is lost (it is silent) with ranks 1, 2; host b is excluded for 3")
    assert story.said[-1].endswith(" s, 1 continues")
    assert of(FormGeneration, story.join(1, has_state=True))[0].workers == (1,)
    assert agents(story.wait(40.0)) == ["b"]


def test_a_host_that_cannot_be_reached_does_not_keep_another_one_from_starting_and_without_any_the_job_ends() -> None:
    story = Story({"a": 1, "b": 1}, start_ranks=1, min_ranks=1)
    assert of(JobEnd, story.lose("a", "ssh ended with exit code 255")) == []
    (end,) = of(JobEnd, story.lose("b", "ssh ended with exit code 255"))
    assert end == JobEnd(exit_code=1, text="host b is lost (ssh ended with exit code 255); no host is left")


def test_a_hosts_message_about_a_rank_of_another_host_is_ignored() -> None:
    story = running({"a": 1, "b": 1})
    story.does(story.members.answer, [AgentMessage("b", RankEnded(worker=1, end=WELL))])
    assert 1 in story.members.member_list.workers
    story.does(story.members.answer, [Lost("b", "it is silent"), AgentMessage("b", RankEnded(worker=2, end=WELL))])
    assert story.members.end is None


def taken_over(
    reported: dict[int, tuple[ProcessPhase, int]],
    members: tuple[int, ...],
    *,
    generation: int = 5,
    has_state: bool = True,
) -> tuple[Story, bool]:
    """Return a job with one rank per host, whose new driver gets these processes: phase and generation of each."""
    story = Story(start_ranks=1, min_ranks=1)
    newest, reports = FormGeneration(number=generation, workers=members, has_state=True), dict[str, RegisterAgent]()
    for rank, (number, (phase, own)) in enumerate(reported.items()):
        host = f"h{number}"
        worker = RankRecord(
            number=number, host=host, slot=0, phase=phase, generation=own, rank=rank, has_state=has_state
        )  # fmt: skip
        reports[host] = RegisterAgent(host=host, ranks=[worker], generation=newest)
    story.hosts = list(reports)
    goes_on = story.members.take_over(reports, 0.0)
    story.find({f"h{number}": 1 for number in members})
    return story, goes_on


def test_a_new_driver_continues_with_more_than_half_of_the_members() -> None:
    member = ProcessPhase.MEMBER, 5
    for there, expected in (((1, 2, 3), True), ((2, 3), True), ((3,), False)):
        assert taken_over(dict.fromkeys(there, member), (1, 2, 3))[1] is expected
    for there, expected in (((1, 2), True), ((2, 3), False)):
        assert taken_over(dict.fromkeys(there, member), (1, 2, 3, 4))[1] is expected
    assert not taken_over({}, (), generation=0)[1]


def test_members_lost_with_the_driver_are_reported_and_replaced() -> None:
    story, _ = taken_over(dict.fromkeys((1, 2), (ProcessPhase.MEMBER, 5)), (1, 2, 3))
    assert Relay((1, 2), Changed(Change.REMOVED, "the driver was lost")) in story.all
    assert StartRank(worker=4, slot=0) in story.all
    assert of(FormGeneration, story.join(1, 2, has_state=True))[0].number == 6


def test_a_generation_that_only_some_members_have_received_is_abandoned() -> None:
    story, goes_on = taken_over(
        {1: (ProcessPhase.MEMBER, 5), 2: (ProcessPhase.WAITING, 4), 3: (ProcessPhase.MEMBER, 5)}, (1, 2, 3)
    )
    assert goes_on
    assert changes(story.all)[0].message.lost == "the driver was lost"
    assert of(FormGeneration, story.join(1, 3, has_state=True))[0].workers == (1, 2, 3)


def test_members_that_are_not_synchronised_yet_do_not_continue_without_those_with_the_state() -> None:
    story, goes_on = taken_over(dict.fromkeys((2, 3), (ProcessPhase.MEMBER, 5)), (1, 2, 3), has_state=False)
    assert goes_on
    (end,) = of(JobEnd, story.join(2, 3))
    assert "no remaining rank holds the state" in end.text


def test_a_new_driver_trusts_the_newest_generation_and_keeps_its_dropped_hosts() -> None:
    before = FormGeneration(number=4, workers=(1, 3, 4), older=(), has_state=True)
    for older, expected in ((((1, 3, 4),), False), ((), True)):  # 3 and 4 may go on: they know of no other generation
        newest = FormGeneration(number=5, workers=(1, 2), older=older, has_state=True, left_out={"z": (2, None)})
        story = Story(start_ranks=2, min_ranks=1, has_successors=True)
        story.hosts = ["a", "b"]
        reports = {
            host: RegisterAgent(host=host, generation=form, ranks=[
                RankRecord(number=number, host=host, slot=0, phase=phase, generation=form.number, has_state=True)
            ])
            for host, number, form, phase in (
                ("a", 1, newest, ProcessPhase.MEMBER), ("b", 2, before, ProcessPhase.WAITING),
            )
        }  # fmt: skip
        assert story.members.take_over(reports, 0.0) is expected
    story.find({"a": 1, "b": 1, "z": 1})
    assert story.members.member_list.generation == 5
    assert "z" not in story.hosts


def test_waiting_has_an_end_which_running_puts_off() -> None:
    story = running({"a": 2}, timeout_s=10.0)
    assert of(JobEnd, story.wait(99.0)) == []
    story.end(2, KILLED)
    story.join(1, has_state=True)
    assert of(JobEnd, story.wait(9.9)) == []
    assert "1 of at least 2 ranks were ready within 10 s" in of(JobEnd, story.wait(0.6))[0].text


def test_where_no_rank_can_be_added_the_job_ends_and_names_the_remedy() -> None:
    story = running({"a": 2}, hosts_stay=True, on_failure=OnFailure.DROP_HOST)
    story.end(2, KILLED)
    (end,) = of(JobEnd, story.join(1, has_state=True))
    assert "1 of at least 2 ranks are ready, and no more can start: a is excluded permanently" in end.text
    assert all(f" --{option} " in end.text for option in ("on-failure", "host-discovery-script", "min-np"))
    assert "the first failure: rank 1 (host a, slot 1) was killed by SIGKILL" in end.text
    assert end.exit_code == 137


def test_a_permanently_lost_host_is_not_awaited_before_or_after_the_first_generation() -> None:
    drop = {"hosts_stay": True, "on_failure": OnFailure.DROP_HOST}
    story = running({"a": 2, "b": 2}, start_ranks=4, min_ranks=3, **drop)
    story.lose("b", "its connection broke")
    story.join(1, has_state=True)
    (end,) = of(JobEnd, story.join(2, has_state=True))
    assert "b is excluded permanently" in end.text
    assert "host b failed (its connection broke)" in end.text
    story = Story({"a": 1, "b": 1}, start_ranks=2, min_ranks=1, **drop)
    story.join(1)
    (end,) = of(JobEnd, story.end(2, RAISED))
    assert "1 of at least 2 ranks are ready" in end.text
    assert end.exit_code == 3


@pytest.mark.parametrize(
    "policy",
    [
        {"on_failure": OnFailure.DROP_HOST},  # discovery may find others
        {"on_failure": OnFailure.REPLACE_RANK, "hosts_stay": True},
        {"on_failure": OnFailure.DROP_HOST, "hosts_stay": True, "cooldown_s": (5.0, 5.0)},
        {"on_failure": OnFailure.DROP_HOST, "hosts_stay": True, "cooldown_s": (600.0, 600.0)},
    ],
)
def test_where_further_ranks_are_possible_they_are_awaited(policy: dict[str, Any]) -> None:
    story = running({"a": 1, "b": 1}, timeout_s=10.0, **policy)
    story.end(2, KILLED)
    assert of(JobEnd, [*story.join(1, has_state=True), *story.wait(9.9)]) == []
    (end,) = of(JobEnd, story.wait(0.6))
    assert "1 of at least 2 ranks were ready within 10 s; --elastic-timeout waits longer" in end.text


def test_ranks_that_hand_their_state_over_count_although_their_host_is_dropped_for_good() -> None:
    story = running(
        {"a": 2, "b": 2}, start_ranks=4, min_ranks=3, hosts_stay=True, on_failure=OnFailure.DROP_HOST, max_ranks=4
    )
    story.lose("b", "its connection broke")
    assert of(JobEnd, story.all) == []
    story = running({"a": 3, "b": 1}, start_ranks=4, min_ranks=2, hosts_stay=True, on_failure=OnFailure.DROP_HOST)
    story.end(4, KILLED)
    story.end(3, KILLED)  # both hosts are out, and two ranks live
    (form,) = of(FormGeneration, story.join(1, 2, has_state=True))
    assert form.workers == (1, 2)
    assert of(JobEnd, story.all) == []


def test_failures_of_generations_before_are_forgotten() -> None:
    story = running({"a": 2})
    story.end(1, RAISED)
    story.join(3)
    story.join(2, has_state=True)
    story.end(2, KILLED)
    assert of(JobEnd, story.end(3, KILLED))[0].exit_code == 137


def test_a_rank_that_has_only_started_is_ended_gently_and_killed_if_it_does_not_end() -> None:
    story = Story({"a": 1, "b": 1}, start_ranks=9)
    story.join(1)
    actions = story.find({"c": 1})
    assert dismissed(actions) == [1]
    assert of(KillRank, actions) == [KillRank(worker=2, at_once=False)]
    assert of(KillRank, story.wait(30.0)) == []
    assert of(KillRank, story.wait(0.1))[0] == KillRank(worker=1, at_once=True)
    assert agents(story.end(1, KILLED), starts=False) == ["a"]


def test_a_death_is_reported_after_a_dismissal_and_only_once() -> None:
    story = running({"a": 1, "b": 1, "c": 1})
    assert changes(story.find({"a": 1, "b": 1}))[0].message.change == Change.REMOVED
    (tell,) = changes(story.end(2, KILLED))
    assert (tell.workers, tell.message.change) == ((1, 3), Change(0))
    assert tell.message.lost == "rank 1 (host b, slot 0) was killed by SIGKILL"
    assert changes(story.wait(1.0)) == []


def test_simultaneous_events_lead_to_one_decision() -> None:
    story = running({"a": 2})
    both = [AgentMessage("a", Relayed(worker, Join(member=Member(has_state=True)))) for worker in (1, 2)]
    assert len(of(FormGeneration, story.does(story.members.answer, both))) == 1
    assert changes(story.all) == []


def test_changes_are_described_in_words() -> None:
    story = running({"a": 2, "b": 1}, min_ranks=1)
    assert story.said == ["generation 1: 3 ranks (2 on a, 1 on b)"]
    story.end(1, KILLED)
    story.join(2, 3, has_state=True)
    story.join(4)
    story.join(2, 3, has_state=True)
    assert story.said[-1] == "generation 3: 3 ranks (2 on a, 1 on b), 1 of them new"
    text = difference({"a": 1, "b": 2, "c": 1}, {"a": 1, "b": 3, "d": 1})
    assert text == "host d with 1 slot is new; host c was removed; host b has 3 slots instead of 2"
    gone = RankRecord(number=1, host="a", slot=0, rank=5, phase=ProcessPhase.DISMISSED)
    assert with_ranks([RankRecord(number=1, host="a", slot=0, rank=4), gone]) == " with rank 4"


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (RankEnd(exit_code=137), "was killed by SIGKILL"),
        (RankEnd(exit_code=128 + 99), "was killed by signal 99"),
        (RankEnd(exit_code=3), "failed (exit code 3)"),
        (RankEnd(exit_code=1, reason="ValueError: x"), "failed (ValueError: x)"),
        (RankEnd(exit_code=0), "ended"),
    ],
)
def test_ends_in_words(end: RankEnd, text: str) -> None:
    assert end.text == text


# ── the order of ranks ───────────────────────────────────────────────────────────────────────────────────────────────


def worker(number: int, host: str, slot: int = 0, rank: int | None = None, *, generation: int = 1) -> RankRecord:
    old = rank is not None
    return RankRecord(
        number=number, host=host, slot=slot, rank=rank, has_state=old, generation=generation if old else 0,
        phase=ProcessPhase.WAITING,
    )  # fmt: skip


WAS_MEMBER = worker(1, "a")
WAS_MEMBER.rank, WAS_MEMBER.generation = 0, 1


@pytest.mark.parametrize(
    ("workers", "order"),
    [
        ([worker(1, "b"), worker(2, "a", 1), worker(3, "a", 0), worker(4, "c")], [3, 2, 1, 4]),
        ([worker(1, "b", rank=0), worker(2, "a", rank=1), worker(3, "b", 1), worker(4, "c")], [1, 3, 2, 4]),
        ([WAS_MEMBER, worker(2, "a", 1, rank=1), worker(3, "b", rank=2)], [2, 1, 3]),  # who has no state is not first
        ([worker(1, "a", rank=0, generation=3), worker(2, "b", rank=1, generation=4)], [2, 1]),
    ],
)
def test_old_ranks_keep_their_order_and_new_ones_follow_hosts_and_slots(workers: list, order: list[int]) -> None:
    random.Random(0).shuffle(workers)
    assert [each.number for each in ranked(workers, ["a", "b", "c"])] == order


def test_a_rank_that_hands_over_its_state_counts_within_the_limit() -> None:
    story = running({"a": 2}, max_ranks=2)
    story.find({"b": 2})
    story.join(3, 4)
    (form,) = of(FormGeneration, story.join(1, 2, has_state=True))
    assert (form.workers, new_in(form)) == ((1, 3), {3})
    story.join(1, has_state=True)
    (form,) = of(FormGeneration, story.join(3, has_state=True))
    assert (form.workers, dismissed(story.all)) == ((3, 4), [1, 2])


def test_the_youngest_leave_where_there_are_too_many() -> None:
    story = running({"a": 1, "b": 1}, max_ranks=2)
    story.find({"a": 1})
    story.find({"a": 2})  # and one is started there before the other host is back
    story.find({"a": 2, "b": 1})
    assert of(KillRank, story.all) == [KillRank(worker=3, at_once=False)]


# ── hosts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def pool(cooldown_s: tuple[float, float] | None = (10.0, 60.0)) -> HostPool:
    found = HostPool(Policy(start_ranks=1, min_ranks=1, cooldown_s=cooldown_s), random.Random(1))
    found.find({"a": 1, "b": 2})
    return found


def test_a_dropped_host_stays_away_longer_each_time_or_for_good() -> None:
    hosts, times_s = pool(), []
    for _ in range(5):
        times_s.append(hosts.drop("a", 0.0))
        assert list(hosts.usable) == ["b"]
        assert hosts.take_back(times_s[-1] - 0.1) == []
        assert hosts.take_back(times_s[-1]) == ["a"]
    assert times_s == [pytest.approx(wanted, rel=0.1) for wanted in (10, 20, 40, 60, 60)]
    assert max(times_s) <= 60.0
    hosts = pool(None)
    assert hosts.drop("a", 0.0) is None
    assert hosts.take_back(1e9) == []


def test_three_strikes_in_a_row_are_one_too_many() -> None:
    hosts = pool()
    assert [hosts.strike("a") for _ in range(2)] == [False, False]
    hosts.clear("a")
    assert [hosts.strike("a") for _ in range(3)] == [False, False, True]
    assert not hosts.strike("b")


def test_a_new_driver_keeps_the_dropped_hosts() -> None:
    first, second = pool((10.0, 1000.0)), pool((10.0, 1000.0))
    first.drop("b", 0.0)
    assert first.take_back(12.0) == ["b"]
    left_s = first.drop("b", 12.0)
    assert left_s is not None
    second.remember(first.left_out(15.0), 100.0)
    assert second.usable == {"a": 1}
    assert second.take_back(100.0 + left_s - 3.1) == []
    assert second.take_back(100.0 + left_s - 2.9) == ["b"]
    third_s = second.drop("b", 200.0)
    assert third_s is not None
    assert third_s > 30.0


# ── of two sides of a network that has come apart one goes on at most ────────────────────────────────────────────────


def driver(*generations: tuple[int, ...]) -> Quorum:
    """Return the quorum of a driver that has formed these generations, none of which an agent has confirmed."""
    quorum = Quorum()
    for number, members in enumerate(generations, start=1):
        quorum.begin(number, members)
    return quorum


def successor(present: tuple[int, ...], *lists: tuple[int, ...]) -> Quorum:
    quorum = Quorum()
    quorum.take_over(FormGeneration(number=1, workers=lists[-1], older=lists[:-1]), present)
    return quorum


@pytest.mark.parametrize("size", range(1, 7))
def test_of_a_driver_and_unreachable_members_one_side_continues(size: int) -> None:
    members = tuple(range(10, 10 + size))
    for count in range(size + 1):
        for gone in combinations(members, count):
            old = driver(members)
            old.lose(gone)
            new = successor(gone, members)
            assert old.is_lost is not new.is_lost


def test_members_that_have_certainly_died_do_not_continue() -> None:
    quorum = driver((1, 2, 3, 4))
    quorum.lose([2, 3, 4])
    assert quorum.is_lost
    quorum.died(2)
    assert not quorum.is_lost  # 3 and 4 are half, without the first


def test_until_enough_members_confirm_a_generation_the_one_before_counts() -> None:
    quorum = driver((1, 2, 3), (1, 4, 5, 6, 2, 3))
    assert quorum.older == ((1, 2, 3),)
    quorum.lose([2, 3])
    assert quorum.is_lost
    quorum = driver((1, 2, 3), (1, 4, 5, 6, 2, 3))
    quorum.inform(2, lambda worker: worker == 1)
    assert not quorum.drop_decided()
    quorum.inform(2, lambda worker: worker == 2)
    assert quorum.drop_decided()
    assert quorum.older == ()
    quorum.lose([2, 3])
    assert not quorum.is_lost


def test_a_new_driver_must_have_a_quorum_of_each_generation_that_counts() -> None:
    lists = (1, 2, 3, 4, 5), (1, 6, 7, 8, 2, 3)
    assert successor((1, 6, 7, 8), *lists).is_lost
    assert not successor((2, 3, 4, 5), lists[0]).is_lost
    assert not successor((1, 2, 3, 6, 7, 8), *lists).is_lost


def test_a_generation_begins_without_those_only_that_could_not_continue() -> None:
    quorum = driver((1, 2, 3, 4, 5))
    assert quorum.permits([1, 2, 3])
    assert not quorum.permits([1, 2])
    quorum.died(3)
    assert not quorum.permits([1])
    assert quorum.permits([1, 2])
