"""A rank in simulated time. It trains, commits and recovers by the product's code, over a simulated mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from simulation.network import Address, End, Message, Process

from sirtaki.comm.control import mesh
from sirtaki.comm.control.communicator import Array, Op
from sirtaki.comm.control.members import Member
from sirtaki.comm.control.mesh import BEATS, FrameKind, Header, Inbox, Sending
from sirtaki.engine.generations import LONG_S, AgentNews
from sirtaki.engine.membership import Change, Dismissal, Finished, Formed, Join, Patience
from sirtaki.torch.elastic.state import Commits, HeldCommits, RankStatus, plan_recovery

if TYPE_CHECKING:
    from simulation.histories import World

HEARTBEAT_S = 30.0
MEET_S = 60.0
LEAVE_S = 5.0
CONNECT_AGAIN_S = 0.05
POLL_S = 0.2
COMMIT_EVERY = 2

Steps = Iterator[None]


class LostError(Exception):
    """A rank of the generation is lost."""


class HostsUpdatedError(Exception):
    """All ranks leave the generation, because hosts have changed."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__()
        self.skip_sync = skip_sync


_SENT = Sending()
_SENT.done = True


class Mesh:
    """Connections of one rank in one generation. It forwards each loss that it detects to all ranks, like `Links`."""

    def __init__(self, rank: Rank, number: int, own: int, size: int) -> None:
        self._process, self.number, self.rank, self.size = rank, number, own, size
        self.ends: dict[int, End] = {}
        self._inboxes = [Inbox() for _ in range(size)]
        self._said_bye: set[int] = set()
        self.failure = ""
        self._sequence = 0
        self._silent_beats, self._is_peer_alive = 0, False
        self.is_open = True

    def add(self, other: int, end: End) -> None:
        self.ends[other] = end
        end.on_message = lambda message: self._receive(other, message)
        end.on_close = lambda: self._closed(other)

    def start_beating(self) -> None:
        if self.size > 1:
            self._process.later(HEARTBEAT_S / BEATS, self._beat)

    def _beat(self) -> None:
        if not self.is_open or self.failure:
            return
        self.ends[(self.rank + 1) % self.size].send({"kind": "alive"})
        before = (self.rank - 1) % self.size
        self._silent_beats = 0 if self._is_peer_alive or before in self._said_bye else self._silent_beats + 1
        self._is_peer_alive = False
        if self._silent_beats >= BEATS:
            self._lose(before, "silent")
        self._process.later(HEARTBEAT_S / BEATS, self._beat)

    def _receive(self, other: int, message: Message) -> None:
        if other == (self.rank - 1) % self.size:
            self._is_peer_alive = True
        if message["kind"] == "data":
            payload = memoryview(message["payload"])
            header = Header(FrameKind.DATA, 0, message["sequence"], 0, len(payload))
            self._inboxes[other].deliver(header, payload)
        elif message["kind"] == "lost":
            self.failure = self.failure or message["why"]
        elif message["kind"] == "bye":
            self._said_bye.add(other)
        self._process.wake()

    def _closed(self, other: int) -> None:
        if self.is_open and other not in self._said_bye:
            self._lose(other, f"rank {other} has ended")

    def _lose(self, lost: int, why: str) -> None:
        if not self.failure:
            self.failure = why
            self.tell(lost, why)
            self._process.wake()

    def tell(self, lost: int, why: str) -> None:
        for other, end in self.ends.items():
            if other != lost:
                end.send({"kind": "lost", "why": why})

    def close(self, *, met: bool = True) -> None:
        """Close the connections. Send a last message first, if all ranks were connected."""
        self.is_open = False
        for end in list(self.ends.values()):
            if met:
                end.send({"kind": "bye"})
            end.close()

    # ── see Exchange ─────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, array: Array, rank: int) -> Sending:
        message = {"kind": "data", "sequence": self._sequence, "payload": array.tobytes()}
        self.ends[rank].send(message)
        return _SENT

    def receive(self, array: Array, rank: int) -> Steps:
        view = memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        yield from self._inboxes[rank].receive(view, self._sequence)

    # ── for the rank ─────────────────────────────────────────────────────────────────────────────────────────────

    def wait(self, steps: Steps) -> Steps:
        """Wait until the operation is complete. Raise LostError if the generation fails."""
        while next(steps, True) is not True:
            if self.failure:
                raise LostError(self.failure)
            yield
        if self.failure:
            raise LostError(self.failure)

    def gather(self, *mine: int) -> Iterator[None]:
        """Gather one row from each rank into `gathered`, as `all_gather` does."""
        self._sequence += 1
        self.gathered = np.empty((self.size, len(mine)), dtype=np.int64)
        self.gathered[self.rank] = mine
        yield from self.wait(mesh.gather(self, self.gathered.reshape(-1), [len(mine)] * self.size))

    def barrier(self) -> Steps:
        self._sequence += 1
        yield from self.wait(mesh.disseminate(self, np.empty(0, dtype=np.uint8), Op.AND))

    def broadcast(self, array: Array) -> Steps:
        self._sequence += 1
        yield from self.wait(mesh.broadcast(self, array, 0))


class Rank(Process):
    """A rank: one process of the training script."""

    def __init__(self, world: World, host: str, worker: int) -> None:
        super().__init__(world.network, host, f"worker {worker}")
        self.world, self.worker = world, worker
        self.step = self.value = 0
        self.commits = Commits(random_state=lambda: None)
        self._save()
        self.has_state = False
        self.mesh: Mesh | None = None
        self._news = AgentNews()
        self._messages: list[Message] = []

    def begin(self, agent: End) -> None:
        self.agent = agent
        agent.on_message = self._receive
        agent.on_close = lambda: self.exit(137)
        self._script = self._run()
        self.later(self.sim.rng.uniform(*self.world.plan.start_s), self.wake)

    def note(self, what: str, **more: Any) -> None:
        self.world.history.note(what, self.worker, **more)

    def died(self) -> None:
        self.note("gone", code=self.exit_code)

    def wake(self) -> None:
        """Resume the script, which polls what it waits for."""
        self.deliver(self._go_on)

    def _go_on(self) -> None:
        next(self._script, None)

    def _receive(self, message: Message) -> None:
        if self._has_met and self.mesh is not None:
            self._news.update([message])  # type: ignore[list-item]  # it stands for JSON here
            self.mesh.failure = self.mesh.failure or self._news.lost
        else:
            self._messages.append(message)
        self.wake()

    def _sleep(self, seconds: float) -> Steps:
        until_s = self.sim.now_s + seconds
        self.later(seconds, self._go_on)
        while self.sim.now_s < until_s - 1e-9:
            yield

    # ── see Generations and AgentClient ──────────────────────────────────────────────────────────────────────────

    def _run(self) -> Steps:
        number, restored, wants_sync = 0, False, True
        while True:
            answer = yield from self._join()
            if isinstance(answer, Dismissal):
                self.exit(0)
                return
            number = answer.membership.generation
            members = tuple(self.world.owners[each.addresses[0]] for each in answer.membership.members)
            try:
                yield from self._meet(answer, members)
                mesh = self.mesh
                assert mesh is not None
                self.note("met", number=number, members=members, rank=mesh.rank)
                out_of_step = yield from self._settle(mesh, restored=restored, wants_sync=wants_sync)
                if out_of_step:
                    yield from self._share(mesh)
                restored = False
                yield from self._train(mesh, number)
                self.note("finished")
                self.agent.send(Finished())
                mesh.close()
                yield from self._sleep(self.sim.rng.uniform(0.0, 1.0))
                self.exit(0)
                return
            except HostsUpdatedError as interrupt:
                wants_sync = not interrupt.skip_sync
                yield from self._leave_together()
            except LostError as err:
                if self.mesh is not None and self._has_met:
                    self._put_back()
                    restored = wants_sync = True
                    self.mesh.tell(self.mesh.rank, str(err))
                if self.mesh is not None:
                    self.mesh.close(met=self._has_met)
            self._has_met = False
            self.mesh = None
            self.note("left", number=number)
            yield from self._sleep(self.sim.rng.uniform(0.0, 0.3))

    _has_met = False

    def _join(self) -> Iterator[None]:
        self._address = self.network.port(self.host)
        self.world.owners[self._address] = self.worker
        member = Member(host=(self.host,), addresses=(self._address,), has_state=self.has_state)
        self.agent.send(Join(member=member))
        until_s = self.sim.now_s + self.world.policy.timeout_s + 30.0
        self.later(self.world.policy.timeout_s + 30.0, self._go_on)
        while True:
            messages, self._messages = self._messages, []
            if (answer := self._news.update(messages)) is not None:
                return answer
            if self.sim.now_s >= until_s - 1e-9:
                self.exit(1)
            yield

    def _meet(self, answer: Formed, members: Sequence[int]) -> Steps:
        """Connect to lower ranks, and wait for connections of higher ranks, as `connect_members` does."""
        number, own = answer.membership.generation, answer.rank
        mesh = self.mesh = Mesh(self, number, own, len(members))
        meeting = Meeting(self, mesh, answer.membership.mesh_name)
        self.network.listeners[self._address] = meeting
        until_s = self.sim.now_s + MEET_S
        self.later(MEET_S, self._go_on)
        for other in range(own):
            place: Address = answer.membership.members[other].addresses[0]
            while other not in mesh.ends:
                yield from self._check_meeting(mesh, until_s)
                tried = meeting.try_to_reach(place, other)
                while not tried:
                    yield
                if other not in mesh.ends:
                    yield from self._sleep(CONNECT_AGAIN_S)
        while len(mesh.ends) < mesh.size - 1:
            yield from self._check_meeting(mesh, until_s)
            yield from self._sleep(POLL_S)
        self.network.listeners.pop(self._address, None)
        mesh.start_beating()
        self._has_met = True

    def _check_meeting(self, mesh: Mesh, until_s: float) -> Steps:
        """Raise LostError if the generation has lost a member, or the time is up."""
        messages, self._messages = self._messages, []
        self._news.update(messages)
        if self._news.lost or self.sim.now_s >= until_s - 1e-9:
            self.network.listeners.pop(self._address, None)
            raise LostError(self._news.lost or "they did not come")
        yield from ()

    # ── see settling ─────────────────────────────────────────────────────────────────────────────────────────────

    def _settle(self, mesh: Mesh, *, restored: bool, wants_sync: bool) -> Iterator[None]:
        standing = self.commits.newest.number, self.commits.completed
        yield from mesh.gather(self.has_state, restored, *standing, wants_sync)
        everybody = [
            RankStatus(
                has_state=bool(has_state),
                restored=bool(back),
                standing=HeldCommits(written=int(written), completed=int(completed)),
                wants_sync=bool(wants),
                process_sets=(),
                optimizers=(),
            )
            for has_state, back, written, completed, wants in mesh.gathered
        ]
        settlement = plan_recovery(everybody, everybody[mesh.rank])
        if settlement.back_to is not None:
            self.commits.drop_after(settlement.back_to)
            self._put_back()
        self.commits.count_from(settlement.count_from)
        return settlement.out_of_step

    def _share(self, mesh: Mesh) -> Steps:
        state = np.array([self.step, self.value], dtype=np.int64)
        yield from mesh.broadcast(state)
        self.step, self.value = map(int, state)
        self._save()
        yield from mesh.barrier()
        self.commits.completed = self.commits.newest.number
        self.has_state = True

    def _save(self) -> None:
        self.commits.write({"step": self.step, "value": self.value})

    def _put_back(self) -> None:
        tree = self.commits.newest.tree
        self.step, self.value = tree["step"], tree["value"]

    # ── the script ───────────────────────────────────────────────────────────────────────────────────────────────

    def _train(self, mesh: Mesh, number: int) -> Steps:
        rng, plan = self.sim.rng, self.world.plan
        self.note("train", number=number, step=self.step, value=self.value)
        while True:
            is_long = rng.random() < plan.long_step_share
            seconds = rng.uniform(20.0, 50.0) if is_long else rng.uniform(*plan.step_s)
            yield from self._sleep(seconds)
            if seconds > LONG_S:
                self.agent.send(Patience(seconds))
            yield from mesh.gather(self.step, self.value)
            parent = self.value
            self.step += 1
            self.value = hash((parent, self.step, number, mesh.size)) & (2**62 - 1)
            self.note("step", number=number, parent=parent, value=self.value)
            if self.step % COMMIT_EVERY == 0:
                yield from self._commit(mesh, number)
                if self.world.is_stopping and mesh.gathered[:, 1].any():
                    return

    def _commit(self, mesh: Mesh, number: int) -> Steps:
        self._save()
        yield from mesh.gather(self._news.change.value, self.world.is_stopping)
        gathered = mesh.gathered
        self.commits.completed = self.commits.newest.number
        yield from mesh.barrier()
        self.note("commit", number=number, step=self.step, value=self.value)
        changes = Change(0)
        for change, _ in gathered:
            changes |= Change(int(change))
        if changes and not gathered[:, 1].any():
            raise HostsUpdatedError(skip_sync=changes == Change.REMOVED)

    def _leave_together(self) -> Steps:
        mesh = self.mesh
        assert mesh is not None
        until_s = self.sim.now_s + LEAVE_S
        self.later(LEAVE_S, self._go_on)
        barrier = mesh.barrier()
        try:
            while next(barrier, True) is not True:
                if self.sim.now_s >= until_s - 1e-9:
                    mesh.tell(mesh.rank, "others do not leave")
                    break
                yield
        except LostError:
            pass
        mesh.close()


class Meeting:
    """Accepts connections of higher ranks, as `handshake` does."""

    def __init__(self, process: Rank, mesh: Mesh, name: str) -> None:
        self.process, self._mesh, self._name = process, mesh, name

    def offer(self, key: str, own: int, other: int, end: End) -> bool:
        mesh = self._mesh
        if key != self._name or other != mesh.rank or own in mesh.ends or not mesh.rank < own < mesh.size:
            return False
        mesh.add(own, end)
        self.process.wake()
        return True

    def try_to_reach(self, place: Address, other: int) -> list[bool]:
        """Try once to connect. The returned list is not empty after the attempt has ended."""
        over: list[bool] = []

        def reached(end: End | None) -> None:
            if end is not None:
                if self._mesh.is_open and self.process.mesh is self._mesh:
                    self._mesh.add(other, end)
                else:
                    end.close()
            over.append(True)
            self.process.wake()

        process = self.process
        own = self._mesh.rank
        process.network.connect(
            process, place, key=self._name, own=own, other=other, then=reached, silence_s=HEARTBEAT_S
        )
        return over
