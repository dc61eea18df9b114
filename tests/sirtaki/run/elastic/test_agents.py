"""Agents: their rules, the processes that they start, how a driver starts, hears and loses them, how they find one."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from sirtaki.comm.control import mesh_rendezvous
from sirtaki.comm.control.mesh_rendezvous import Attendee, listen
from sirtaki.engine.membership import Change, Changed, Finished, Join, Member, Patience, Proof
from sirtaki.errors import CommError, ConfigError
from sirtaki.json_channel import JsonChannel
from sirtaki.launchers import AGENT
from sirtaki.run.elastic import agent, agent_crew
from sirtaki.run.elastic.agent import (
    DRIVER,
    DRIVER_SILENT_S,
    KILL_GRACE_S,
    LEAVE_GRACE_S,
    AgentConfig,
    AgentRules,
    Beat,
    EndAll,
    Ended,
    FromAgent,
    KnownAgents,
    Patient,
    RankProcess,
    Succession,
    ToAgent,
    Told,
    Up,
    agents_key,
    end_grace_s,
    reach_driver,
)
from sirtaki.run.elastic.agent_crew import (
    AGENT_SILENT_S,
    REMEMBERED_S,
    AgentCrew,
    AgentList,
    AgentRecord,
    AgentStart,
    DriverEndpoint,
    ElasticJob,
    Heard,
    Lost,
    StartedAgent,
    Switchboard,
    new_endpoint,
)
from sirtaki.run.elastic.job_members import Dismiss, Form, KillRank, Phase, RankEnd, Settle, StartRank, Tell
from sirtaki.run.host_check import PROBLEM, Need
from sirtaki.run.rank_channel import Event, Message

PROOF = Proof(job="job", secret="hidden")
HERE = Attendee(host=("a",), places=(("127.0.0.1", 5),))
LATE_S = 20.0


def until(true: Callable[[], object]) -> Any:
    deadline_s = time.monotonic() + LATE_S
    while not (found := true()):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    return found


# ── rules ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def form(number: int, older: tuple[tuple[int, ...], ...] | None) -> Form:
    members = tuple(Member(host="a", slot=slot, is_new=False) for slot in (1, 2))
    return Form(number=number, workers=(7, 9), members=members, attendees=(HERE, HERE), older=older, has_state=True)


class Actions:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.to_driver: list[FromAgent] = []
        self.to_ranks: list[Any] = []

    def start_rank(self, worker: int, slot: int) -> None:
        if slot == 13:
            raise OSError("no such program")

    def ask_to_end(self, worker: int) -> None:
        self.done.append(("ask to end", worker))

    def kill(self, worker: int) -> None:
        self.done.append(("kill", worker))

    def tell_rank(self, worker: int, message: object) -> None:
        self.to_ranks.append((worker, message))

    def tell_driver(self, message: FromAgent) -> None:
        self.to_driver.append(message)


@pytest.fixture
def actions() -> Actions:
    return Actions()


@pytest.fixture
def rules(actions: Actions) -> AgentRules:
    """Of an agent with one rank."""
    rules = AgentRules(actions, host="a", proof=PROOF, now_s=0.0)
    rules.hear_driver(StartRank(worker=7, host="a", slot=1), 0.0)
    return rules


def test_a_driver_that_knows_nothing_is_told_how_far_all_are(actions: Actions, rules: AgentRules) -> None:
    rules.hear_rank(7, Join(has_state=True, attendee=HERE))
    rules.hear_rank(7, Patience(40.0))
    assert actions.to_driver[-1] == Patient(worker=7, seconds=40.0)
    rules.hear_driver(form(3, ((5, 7),)), 1.0)
    assert (actions.to_ranks[-1][0], actions.to_ranks[-1][1].rank) == (7, 0)
    assert actions.to_driver[-1] == Told(3)
    rules.meet_driver([("a", 1)], 2.0)
    report = actions.to_driver[-1]
    assert isinstance(report, Up)
    (told,) = report.ranks
    assert (told.number, told.slot, told.phase, told.generation, told.rank) == (7, 1, Phase.MEMBER, 3, 0)
    assert (told.has_state, told.attendee, report.patience_s) == (True, HERE, 40.0)
    assert report.generation == Form(number=3, workers=(7, 9), older=((5, 7),), has_state=True)
    assert msgspec.json.decode(msgspec.json.encode(report), type=FromAgent) == report
    for number in (2, 3):  # the former has passed
        rules.hear_driver(Settle(number=number, older=()), 3.0)
        rules.meet_driver([], 4.0)
        assert (actions.to_driver[-1].generation.older == ()) is (number == 3)


def test_nobody_asks_for_an_answer_where_no_driver_follows(actions: Actions, rules: AgentRules) -> None:
    rules.hear_driver(form(3, None), 1.0)
    assert actions.to_driver == []


def test_what_concerns_ranks_that_are_not_there_changes_nothing(actions: Actions, rules: AgentRules) -> None:
    for message in (KillRank(worker=9, host="a", at_once=True), Dismiss(worker=9, host="a")):
        rules.hear_driver(message, 1.0)
    rules.hear_driver(Tell(workers=(7, 9), change=Change.ADDED), 1.0)
    assert actions.done == []
    assert actions.to_ranks == [(7, Changed(Change.ADDED))]


def test_a_rank_is_asked_to_end_before_it_is_killed(actions: Actions, rules: AgentRules) -> None:
    rules.hear_driver(KillRank(worker=7, host="a", at_once=False), 1.0)
    rules.tick(1.0 + KILL_GRACE_S - 0.1)
    assert actions.done == [("ask to end", 7)]
    rules.tick(1.0 + KILL_GRACE_S)
    assert actions.done[-1] == ("kill", 7)
    rules.rank_ended(7, RankEnd(exit_code=137))
    assert actions.to_driver[-1] == Ended(worker=7, end=RankEnd(exit_code=137))


def test_a_rank_that_cannot_be_started_has_ended(actions: Actions, rules: AgentRules) -> None:
    rules.hear_driver(StartRank(worker=8, host="a", slot=13), 0.0)
    assert actions.to_driver[-1] == Ended(worker=8, end=RankEnd(exit_code=127, reason="no such program"))
    assert list(rules.ranks) == [7]


def test_a_silent_driver_is_given_up_but_not_by_who_was_stopped_itself(rules: AgentRules) -> None:
    for now_s in range(1, int(DRIVER_SILENT_S) + 1):
        assert rules.tick(float(now_s))
    assert not rules.tick(DRIVER_SILENT_S + 0.5)
    assert rules.tick(1000.0)


def test_at_the_end_who_trains_may_take_its_time_to_write_and_who_waits_for_others_may_not(
    actions: Actions, rules: AgentRules
) -> None:
    rules.hear_driver(form(3, None), 1.0)
    rules.hear_driver(StartRank(worker=8, host="a", slot=2), 1.0)
    rules.hear_driver(EndAll(LEAVE_GRACE_S), 1.0)
    assert rules.ends
    assert actions.done == [("ask to end", 7), ("ask to end", 8)]
    rules.tick(1.0 + KILL_GRACE_S)
    assert actions.done[2:] == [("kill", 8)]  # which has not begun to train
    rules.hear_rank(7, Join(has_state=True, attendee=HERE))
    assert actions.done[3:] == [("kill", 7)]


@pytest.mark.parametrize(
    ("number", "environ", "expected_s"),
    [
        (signal.SIGTERM, {"SIRTAKI_CHECKPOINT_DIR": "/shared"}, LEAVE_GRACE_S),
        (signal.SIGINT, {"SIRTAKI_CHECKPOINT_DIR": "/shared"}, KILL_GRACE_S),
        (signal.SIGTERM, {}, KILL_GRACE_S),
        (None, {"SIRTAKI_CHECKPOINT_DIR": "/shared"}, KILL_GRACE_S),
    ],
)
def test_ranks_that_write_checkpoints_have_time_for_it_when_the_job_is_told_to_go(
    number: int | None, environ: dict[str, str], expected_s: float
) -> None:
    assert end_grace_s(number, environ) == expected_s


# ── processes of ranks ───────────────────────────────────────────────────────────────────────────────────────────────

Capture = pytest.CaptureFixture[bytes]


def rank(code: str) -> RankProcess:
    return RankProcess(7, [sys.executable, "-c", code], {"PATH": "/usr/bin:/bin"}, hosts="one")


def end_of(process: RankProcess) -> RankEnd:
    until(process.has_ended)
    end = process.bury()
    process.drain(5.0)
    return end


def test_lines_are_marked_with_the_worker_and_unfinished_ones_as_such(capfdbinary: Capture) -> None:
    assert end_of(rank("import sys; print('a'); print('b'); sys.stdout.write('c')")) == RankEnd(exit_code=0)
    assert capfdbinary.readouterr().out == b"[7] a\n[7] b\n[7] c\x1f\x1e\n"


def test_what_it_has_said_of_its_end_is_kept_and_marked_as_its_own(capfdbinary: Capture) -> None:
    text = Message(event=Event.FAILED, rank=0, pid=1, host="h", exit_code=1, reason="ValueError: x").encode()
    end = end_of(rank(f"import sys; sys.stderr.write({text!r}); sys.exit(1)"))
    assert end == RankEnd(exit_code=1, reason="ValueError: x")
    assert b"failed 7 1 1 h " in capfdbinary.readouterr().err


def test_what_it_has_started_ends_with_it(capfdbinary: Capture) -> None:
    code = "import os, subprocess; print(subprocess.Popen(['sleep', '300']).pid, flush=True); os.kill(os.getpid(), 9)"
    assert end_of(rank(code)).exit_code == 137
    command = Path(f"/proc/{int(capfdbinary.readouterr().out.split()[-1])}/cmdline")
    until(lambda: not command.exists() or "sleep" not in command.read_text(errors="ignore"))


def test_it_talks_through_a_socket_of_its_own() -> None:
    code = f"""
import os, socket
from sirtaki.engine.membership import Finished, ToRank
from sirtaki.json_channel import JsonChannel
JsonChannel(socket.socket(fileno=int(os.environ["{AGENT}"].split(",")[0])), ToRank).send(Finished())
"""
    process = rank(code)
    assert until(process.channel.receive) == [Finished()]
    end_of(process)


# ── a real agent, told by the test what a driver would tell it ───────────────────────────────────────────────────────


def job_of(*command: str, agents: AgentStart = AgentStart(), start_s: float = 20.0) -> ElasticJob:  # noqa: B008  # frozen
    return ElasticJob(command=command, carried={}, interface=None, one_host=True, agents=agents, agent_start_s=start_s)


def crew_of(job: ElasticJob, *, plan: str = "") -> AgentCrew:
    def pump(name: str, stream: Any) -> None:
        with stream as lines:
            for _ in lines:
                pass

    return AgentCrew(job, new_endpoint(None, one_host=True), pump, environ=os.environ, plan=plan)


def events(crew: AgentCrew, count: int) -> list[Heard | Lost]:
    found: list[Heard | Lost] = []
    until(lambda: found.extend(crew.look(0.05)) or len(found) >= count)
    return found


@pytest.fixture
def crew() -> Iterator[AgentCrew]:
    crew = crew_of(job_of(sys.executable, "-c", "import time; time.sleep(60)"))
    crew.start("localhost")
    (up,) = events(crew, 1)
    assert isinstance(up, Heard)
    assert isinstance(up.message, Up)
    yield crew
    crew.close()


@pytest.mark.parametrize(("at_once", "exit_code"), [(True, 137), (False, 143)])
def test_it_ends_a_rank_as_it_is_told(crew: AgentCrew, at_once: bool, exit_code: int) -> None:
    crew.send_to(["localhost"], StartRank(worker=5, host="localhost", slot=0))
    crew.send_to(["localhost"], KillRank(worker=5, host="localhost", at_once=at_once))
    assert events(crew, 1) == [Heard("localhost", Ended(worker=5, end=RankEnd(exit_code=exit_code)))]


def test_its_end_is_that_of_its_ranks(crew: AgentCrew) -> None:
    crew.send_to(["localhost"], StartRank(worker=5, host="localhost", slot=0))
    crew.send_to(["localhost"], EndAll())
    ended, lost = events(crew, 2)
    assert isinstance(ended, Heard)
    assert lost == Lost("localhost", "its agent is gone")
    assert crew.hosts == []


@pytest.mark.parametrize("plan", ["", "{}"])
def test_an_agent_that_may_have_another_driver_by_now_is_not_killed_by_the_one_that_has_lost_it(plan: str) -> None:
    code = """
import json, socket, sys, time
from sirtaki.engine.membership import Proof
from sirtaki.run.elastic.agent import reach_driver
told = json.loads(sys.stdin.readline())
reach_driver([tuple(place) for place in told["places"]], proof=Proof(**told["proof"]), number=1).close()
time.sleep(60)
"""
    crew = crew_of(job_of("x", agents=_Program(code)), plan=plan)
    crew.start("a")
    assert events(crew, 1) == [Lost("a", "its agent is gone")]
    process = crew._leaving[0]._process  # type: ignore[attr-defined]
    crew.send_to(["a"], EndAll())
    with mock.patch.object(agent_crew, "end_grace_s", return_value=-2.0):
        crew.close()
    assert (process.poll() is None) is bool(plan)
    process.kill()
    process.wait()


def test_an_agent_that_is_told_what_it_does_not_understand_ends(crew: AgentCrew) -> None:
    crew.send_to(["localhost"], Finished())  # type: ignore[arg-type]  # which is a rank's
    assert isinstance(events(crew, 1)[0], Lost)


class _Program(AgentStart):
    """Starts a program of the test's instead of an agent."""

    def __init__(self, code: str) -> None:
        super().__init__()
        object.__setattr__(self, "template", code)

    def words(self, host: str, environ: Any = None) -> list[str]:
        return [sys.executable, "-c", self.template]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit(255)", "ended with exit code 255"),
        ("import time; time.sleep(3.0)", "its agent has not answered within 0.5 s"),
        (f"import sys; print({PROBLEM!r} + 'no script', file=sys.stderr); raise SystemExit(1)", "no script"),
    ],
)
def test_an_agent_that_does_not_come_is_given_up_with_the_reason(code: str, why: str) -> None:
    start_s = 0.5 if "sleep" in code else 20.0
    crew = crew_of(job_of("x", agents=_Program(code), start_s=start_s))
    crew.start("a")
    (lost,) = events(crew, 1)
    assert isinstance(lost, Lost)
    assert lost.why.endswith(why)
    crew.close()


def test_a_host_that_lacks_what_ranks_need_says_so_before_it_understands_the_rest() -> None:
    need = Need(folder="/", script="", interfaces=(), versions={"Sirtaki": "0.0"})
    line = msgspec.json.encode({"need": need, "of another version": 1}) + b"\n"
    shown: list[bytes] = []
    started = started_agent([sys.executable, "-m", "sirtaki.run.elastic.agent"], shown, line)
    until(started.why_ended)
    assert "Sirtaki" in started.why_ended()
    started.wait(LATE_S)
    assert shown == []


def started_agent(words: list[str], shown: list[bytes], line: bytes = b"told\n") -> StartedAgent:
    def pump(name: str, stream: Any) -> None:
        with stream as lines:
            shown.extend(lines)

    return StartedAgent("a", 1, words, os.environ, line, pump)


def test_what_says_why_it_does_not_come_is_kept_and_the_rest_is_shown(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\nprintf 'Welcome\\nssh: connect to host a port 22: Connection refused\\n' >&2; exit 255\n"
    )
    ssh.chmod(0o755)
    shown: list[bytes] = []
    started = started_agent([str(ssh)], shown)
    started.wait(LATE_S)
    assert shown == [b"Welcome\n"]
    assert started.why_ended() == (
        "ssh: connect to host a port 22: Connection refused: start sshd there, or name its port with --ssh-port"
    )


def test_a_command_that_does_not_end_is_killed() -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(input(), flush=True); time.sleep(60)"
    )
    shown: list[bytes] = []
    started = started_agent([sys.executable, "-c", code], shown)
    until(lambda: shown == [b"told\n"])
    begin_s = time.monotonic()
    started.wait(0.1)
    assert time.monotonic() - begin_s < 10.0
    assert started.why_ended().endswith("ended with exit code -9")


# ── the command lines that start agents ──────────────────────────────────────────────────────────────────────────────

WORDS = [sys.executable, "-m", "sirtaki.run.elastic.agent"]


def test_on_this_machine_it_is_a_child() -> None:
    assert AgentStart().is_child("localhost")
    assert AgentStart().words("localhost", {"PYTHONPATH": "x"}) == WORDS


def test_elsewhere_ssh_starts_it_without_asking_for_a_password() -> None:
    words = AgentStart(ssh=("-p", "2222")).words("node1", {"PYTHONPATH": "/my code"})
    assert words[0] == "ssh"
    assert words[-4:-1] == ["-p", "2222", "node1"]
    assert "BatchMode=yes" in words
    assert words[-1] == f"exec env 'PYTHONPATH=/my code' {' '.join(WORDS)}"


def test_within_a_slurm_allocation_srun_does() -> None:
    start = AgentStart(slurm_hosts=frozenset({"node1"}))
    words = start.words("node1", {})
    assert words[0] == "srun"
    assert "--nodelist=node1" in words
    assert words[-3:] == WORDS
    assert "--cpu-bind=none" not in words  # which is a warning where nothing binds
    assert "--cpu-bind=none" in start.words("node1", {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1"})
    assert start.words("node2", {})[0] == "ssh"


def test_a_given_command_gets_host_and_command_at_their_places() -> None:
    start = AgentStart(template="kubectl exec -i pod-{host} -- {command}")
    assert start.words("localhost", {}) == ["kubectl", "exec", "-i", "pod-localhost", "--", *WORDS]
    assert not start.is_child("localhost")
    assert AgentStart(template="sh -c 'cd / && {command}'").words("a", {})[-1] == f"cd / && {' '.join(WORDS)}"
    with pytest.raises(ConfigError, match=r"no \{command\}"):
        AgentStart(template="kubectl exec {host}").words("a", {})


# ── who is given up, in time that the test tells ─────────────────────────────────────────────────────────────────────


class Channel:
    def __init__(self) -> None:
        self.sent: list[ToAgent] = []
        self.closed = False

    def send(self, message: Any) -> None:
        self.sent.append(msgspec.json.decode(message[4:], type=ToAgent) if isinstance(message, bytes) else message)

    def close(self) -> None:
        self.closed = True


def come(agents: AgentList, host: str) -> Channel:
    there = agents.agents[host] = AgentRecord(host, agents.next_number(), now_s=0.0)
    there.channel = Channel()
    places = ((host, there.number),)
    agents.hear(
        there, Up(host=host, places=places, ranks=[], patience_s=0.0, generation=Form(number=0, workers=())), 0.0
    )
    return there.channel


@pytest.fixture
def agents() -> AgentList:
    return AgentList(expected=(), numbers=4, start_s=60.0, tells=True, now_s=0.0)


def test_who_is_silent_is_given_up_and_the_others_remember_it_for_a_while(agents: AgentList) -> None:
    silent, other = come(agents, "a"), come(agents, "b")
    for now_s in range(1, 11):
        agents.hear(agents.agents["b"], Beat(), float(now_s))
        assert other.sent[-1] == Beat()
        assert list(agents.tick(float(now_s))) == []
    assert list(agents.tick(AGENT_SILENT_S + 0.1)) == [Lost("a", "it has been silent for 10 s")]
    assert agents.hosts == ["b"]
    assert silent.closed
    assert EndAll() not in silent.sent  # it may be that side which goes on
    agents.tell_each_other()
    assert isinstance(other.sent[-1], KnownAgents)
    assert [number for number, _ in other.sent[-1].agents] == [6, 5]
    agents.agents["b"].heard_s = 10.0 + REMEMBERED_S
    list(agents.tick(11.0 + REMEMBERED_S))
    agents.tell_each_other()
    assert [number for number, _ in other.sent[-1].agents] == [6]


def test_a_driver_that_was_stopped_itself_blames_nobody(agents: AgentList) -> None:
    come(agents, "a")
    assert list(agents.tick(1000.0)) == []
    assert list(agents.tick(1004.0)) == []


# ── how agents and drivers find each other ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def board() -> Iterator[Switchboard[str]]:
    board: Switchboard[str] = Switchboard(DriverEndpoint(proof=PROOF, listeners=tuple(listen(["127.0.0.1"]))))
    yield board
    board.close()


def joined(board: Switchboard[str], number: int) -> tuple[JsonChannel[Any], JsonChannel[Any]]:
    """Both ends of the connection of a newcomer: the board's and its own."""
    found: list[tuple[int, socket.socket]] = []
    own: list[socket.socket] = []
    thread = threading.Thread(target=lambda: own.append(reach_driver(board.places, proof=PROOF, number=number)))
    thread.start()
    until(lambda: list(board.look(0.01, lambda *newcomer: found.append(newcomer))) or found)
    thread.join()
    assert found[0][0] == number
    return JsonChannel(found[0][1], FromAgent), JsonChannel(own[0], ToAgent)


def heard(board: Switchboard[str], timeout_s: float) -> list[str]:
    return list(board.look(timeout_s, lambda *_: pytest.fail("nobody has come")))


def test_a_newcomer_is_heard_until_it_is_not_and_gets_what_had_no_room(board: Switchboard[str]) -> None:
    channel, other = joined(board, 7)
    board.watch(channel, "seven")
    other.send(Told(1))
    assert heard(board, LATE_S) == ["seven"]
    assert channel.receive() == [Told(1)]
    assert heard(board, 0.0) == []
    while not channel.has_unsent:
        channel.send(Form(number=1, workers=tuple(range(100_000))))
    board.watch(channel, "seven")
    assert heard(board, 0.05) == []
    while channel.has_unsent:
        other.receive()
        for _ in heard(board, 0.0):
            channel.flush()
    board.watch(channel, "seven")
    assert heard(board, 0.0) == []  # there is room, but nothing to be sent
    board.disconnect(channel)
    board.disconnect(channel)
    other.send(Told(2))
    assert heard(board, 0.05) == []
    for end in (channel, other):
        end.close()
    board.watch(channel, "seven")  # which is closed
    assert heard(board, 0.0) == []


def test_any_thread_wakes_it(board: Switchboard[str]) -> None:
    begun_s = time.monotonic()
    for _ in range(100_000):  # more than a socket has room for
        board.wake()
    assert heard(board, 60.0) == []
    threading.Timer(0.05, board.wake).start()
    while time.monotonic() < begun_s + 0.05:
        heard(board, 0.01)
    assert heard(board, 60.0) == []
    assert time.monotonic() < begun_s + 30.0


def test_each_job_has_a_secret_of_its_own_and_one_of_one_host_listens_on_loopback_only() -> None:
    first, second = new_endpoint(None, one_host=True), new_endpoint(None)
    assert first.proof.secret != second.proof.secret
    assert first.proof.job != second.proof.job
    assert first.proof.secret not in repr(first)
    assert [listener.getsockname()[0] for listener in first.listeners] == ["127.0.0.1"]
    assert second.listeners[0].getsockname()[0] == "127.0.0.1"
    for listener in (*first.listeners, *second.listeners):
        listener.close()


def test_a_driver_that_is_not_there_is_looked_for_for_so_long_only() -> None:
    (listener,) = listen(["127.0.0.1"])
    place = listener.getsockname()[:2]
    listener.close()
    begin_s = time.monotonic()
    with pytest.raises(CommError, match="cannot be reached at 127"):
        reach_driver([place], proof=PROOF, number=1, timeout_s=0.3)
    assert time.monotonic() - begin_s < 5.0


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Succession]]:
    """Three agents' ways to find the next driver."""
    monkeypatch.setattr(agent, "CANDIDATE_S", 0.3)
    need = Need(folder="/", script="", interfaces=(), versions={})
    found = [
        Succession(
            AgentConfig(
                need=need, host=f"h{number}", number=number, places=(), proof=PROOF, command=(), environ={},
                folder="/", hosts="one", interface=None, plan="{}",
            )
        )
        for number in (1, 2, 3)
    ]  # fmt: skip
    yield found
    for own in found:
        own.close()


def serve(found: Succession, started: list[Succession]) -> None:
    """In the place of a process that would listen at the agent's port."""
    started.append(found)
    duplicates = [socket.fromfd(each.fileno(), each.family, each.type) for each in found._listeners]
    acceptor = mesh_rendezvous.Acceptor(duplicates, key=agents_key(PROOF), own=DRIVER, expected=[1, 2, 3])
    threading.Timer(3.0, lambda: [sock.close() for sock in acceptor.close().values()]).start()


@pytest.mark.parametrize("gone", [False, True])
def test_the_lowest_number_that_is_there_starts_it_and_the_others_find_it(three: list[Succession], gone: bool) -> None:
    started: list[Succession] = []
    found: list[socket.socket | None] = [None] * 3
    known = [(number, own.places) for number, own in enumerate(three, start=1)]
    if gone:
        three[0].close()

    def look(index: int) -> None:
        found[index] = three[index].find_driver(known)

    with (
        mock.patch.object(Succession, "_start_driver", lambda self, agents: serve(self, started)),
        mock.patch.object(agent, "CANDIDATE_S", 0.5 if gone else 2.5),
    ):
        threads = [threading.Thread(target=look, args=[index]) for index in (2, 1, 0)[: 2 if gone else 3]]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join()
    assert started == [three[gone]]
    for sock in found[gone:]:
        assert sock is not None
        sock.close()


def test_an_agent_that_was_told_of_nobody_finds_nobody(three: list[Succession]) -> None:
    assert three[0].find_driver([]) is None


@pytest.mark.slow
def test_an_agent_whose_driver_goes_on_without_it_starts_no_other_one(three: list[Succession]) -> None:
    with mock.patch.object(agent, "CONNECT_S", 0.3), mock.patch("subprocess.Popen") as start:
        start.return_value.poll.return_value = None
        for _ in range(2):
            assert three[0].find_driver([(1, three[0].places)]) is None
        start.assert_called_once()
