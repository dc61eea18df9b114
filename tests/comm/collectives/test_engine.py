"""Operations from any thread in any order run once, can be awaited by any thread, are recorded, and always end."""

import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.meshes import among, at_once, until

from sirtaki.comm import recorder, timeline
from sirtaki.comm.collectives import engine as engine_module
from sirtaki.comm.collectives.engine import EagerEngine, EagerWork, Pending, trace_operations
from sirtaki.comm.collectives.operations import CollectiveKind, Signature
from sirtaki.comm.control.communicator import Communicator
from sirtaki.errors import CommError

SIZE = 3


def signature(name: str, **rest: Any) -> Signature:
    return Signature(
        name=name, kind=CollectiveKind.ALLREDUCE, shapes=((2,),), dtypes=("float32",), **{"op": "sum", **rest}
    )


def submit(engine: EagerEngine, name: str, value: float = 1.0, *, wake: bool = True) -> EagerWork:
    return engine.submit(signature(name), [torch.full((2,), value)], wake=wake)


def on_engines(act: Callable[[EagerEngine], Any], *, size: int = SIZE) -> list[Any]:
    """Call `act` with each rank's engine in a thread. Return the results. Engines are closed together."""

    def run(comm: Communicator) -> Any:
        engine = EagerEngine(comm, comm.failures)
        result = act(engine)
        assert engine.close()
        assert not engine._thread.is_alive()
        return result

    return among(size, run)


def test_operations_in_any_order_from_any_thread_give_each_its_result() -> None:
    def act(engine: EagerEngine) -> None:
        own = random.Random(engine.rank)
        names = [f"n{number}" for number in range(40)]
        own.shuffle(names)
        found: dict[str, float] = {}

        def some(part: list[str], waits: bool) -> None:
            works = {name: submit(engine, name, float(name[1:]), wake=not waits) for name in part}
            for name in own.sample(part, len(part)):
                assert engine.finish(works[name])
                found[name] = float(works[name].results[0][0])

        at_once(some, [names[at::4] for at in range(4)], [False, False, True, True])
        assert found == {name: SIZE * float(name[1:]) for name in names}
        assert engine.rounds.completed == 40

    on_engines(act)


def test_tensors_on_several_devices_without_cuda_need_no_event() -> None:
    """The device "meta" stands for another accelerator than CUDA."""
    tensors = [torch.ones(2), torch.ones(2, device="meta")]
    described = Signature.of(tensors, name="a", kind=CollectiveKind.ALLREDUCE)
    assert described.device == "mixed"
    assert EagerWork(described, tensors).written is None


def test_a_silently_submitted_operation_runs_when_another_one_is_awaited() -> None:
    def act(engine: EagerEngine) -> None:
        if engine.rank == 0:
            left = submit(engine, "left", wake=False)
            engine.finish(submit(engine, "waited", wake=False))
        else:
            engine.finish(submit(engine, "waited", wake=False))
            left = submit(engine, "left")
        until(left.is_done)

    on_engines(act, size=2)


def test_a_name_is_under_way_until_it_is_done() -> None:
    def act(engine: EagerEngine) -> None:
        if engine.rank == 0:
            work = submit(engine, "a")
            assert "a" in engine.pending
            assert "b" not in engine.pending
            assert len(engine.pending) == 1
            assert engine.pending.describe() == "has submitted a"
            waits = engine.pending.oldest_wait()
            assert waits is not None
            assert "'a'" in waits.what
            with pytest.raises(ValueError, match="same name"):
                submit(engine, "a")
            submit(engine, "go")
        else:
            engine.finish(submit(engine, "go"))
            work = submit(engine, "a")
        engine.finish(work)
        assert (len(engine.pending), engine.pending.describe(), engine.pending.oldest_wait()) == (0, "", None)

    on_engines(act, size=2)


def test_an_interrupted_wait_leaves_the_operation_in_flight() -> None:
    def act(engine: EagerEngine) -> None:
        asked = []
        if engine.rank == 0:
            work = submit(engine, "a")
            assert not engine.finish(work, lambda: bool(asked.append(1)) or len(asked) == 2)
            assert len(asked) == 2
            assert "a" in engine.pending
            submit(engine, "go")
        else:
            engine.finish(submit(engine, "go"))
            work = submit(engine, "a")
        assert engine.finish(work, lambda: False)

    on_engines(act, size=2)


def test_a_waiting_operation_is_known_with_its_name_and_start() -> None:
    def act(engine: EagerEngine) -> None:
        assert engine.awaited is None
        if engine.rank == 0:
            begin_s = time.monotonic()
            thread = threading.Thread(target=lambda: engine.finish(submit(engine, "a", wake=False)))
            thread.start()
            until(lambda: engine.awaited is not None)
            assert engine.awaited is not None
            assert engine.awaited[0] == "a"
            assert begin_s <= engine.awaited[1] <= time.monotonic()
            submit(engine, "go")
            thread.join()
        else:
            engine.finish(submit(engine, "go"))
            engine.finish(submit(engine, "a"))
        assert engine.awaited is None

    on_engines(act, size=2)


def test_a_join_is_awaited_from_the_last_progress_of_the_others() -> None:
    looked = threading.Event()

    def act(engine: EagerEngine) -> None:
        if engine.rank == 0:
            join = engine.join((0,))
            first = engine.pending.oldest_wait()
            assert first is not None
            assert first.what == "join()"
            time.sleep(0.01)
            engine.pending.last_progress_s = time.monotonic()
            second = engine.pending.oldest_wait()
            assert second is not None
            assert second.since_s >= first.since_s + 0.01
            looked.set()
        else:
            assert looked.wait(10.0)
            join = engine.join((0,))
        engine.finish(join)

    on_engines(act, size=2)


def test_pending_operations_fail_when_a_rank_leaves_and_no_new_ones_begin() -> None:
    def act(comm: Communicator) -> None:
        engine = EagerEngine(comm, comm.failures)
        work = submit(engine, "alone") if comm.rank == 0 else None
        assert engine.close()
        if work is not None:
            with pytest.raises(CommError, match="shut down while"):
                work.wait(0.0)
        with pytest.raises(CommError, match=r"its process set .* is being closed"):
            submit(engine, "late")

    among(2, act)


def test_a_lost_job_ends_waits_threads_and_later_calls() -> None:
    def act(comm: Communicator) -> None:
        engine = EagerEngine(comm, comm.failures)
        if comm.rank == 0:
            work = submit(engine, "a")
            threading.Timer(0.05, lambda: comm.failures.report(CommError("rank 1 has ended"))).start()
            with pytest.raises(CommError, match="rank 1 has ended"):
                engine.finish(work)
            with pytest.raises(CommError, match="rank 1 has ended"):
                engine.finish(EagerWork(signature("b"), []), lambda: False)
            with pytest.raises(CommError, match="rank 1 has ended"):
                submit(engine, "b")
            with pytest.raises(CommError, match="rank 1 has ended"):
                engine.join((0,))
        else:
            comm.failures.report(CommError("rank 1 has ended"))
        assert not engine.close(timeout_s=2.0)
        assert not engine._thread.is_alive() or comm.rank == 1

    among(2, act)


def test_an_interrupt_in_a_round_fails_the_job_and_all_pending_operations() -> None:
    def act(comm: Communicator) -> None:
        engine = EagerEngine(comm, comm.failures)

        def interrupted(works: object, mine: object, **_: object) -> bool:
            raise comm.failures.error or KeyboardInterrupt()

        engine.rounds.run = interrupted  # type: ignore[method-assign, assignment]
        work = submit(engine, "a", wake=False)
        with pytest.raises(KeyboardInterrupt):
            engine.finish(work)
        with pytest.raises(CommError, match=r"eager operations failed on rank \d \(.*\): KeyboardInterrupt"):
            work.wait(0.0)
        assert comm.failures.error is not None
        assert not engine.close(timeout_s=0.1)

    among(1, act)


def work(name: str) -> EagerWork:
    tensors = [torch.zeros(2)]
    return EagerWork(Signature.of(tensors, name=name, kind=CollectiveKind.ALLREDUCE, op="sum"), tensors)


def test_the_reason_why_a_rank_cannot_take_part_is_reported_although_it_leaves() -> None:
    pending = Pending("")
    unable = EagerWork(Signature(name="unable", kind=CollectiveKind.ALLREDUCE, problem="no such rows"), [])
    pending.add(unable, wake=False)
    pending.add(work("able"), wake=False)
    pending.close()
    there = pending.snapshot(0.0)
    assert there is not None
    assert list(there[0]) == ["unable"]
    pending.reject("unable", "Rank 0 cannot take part")
    assert len(pending) == 0


class Noting:
    """A timeline that keeps its entries."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, float, float, dict[str, Any]]] = []
        self.overlaps: list[tuple[str, float, float, dict[str, Any]]] = []

    def span(self, track: str, name: str, begin_s: float, end_s: float, **arguments: Any) -> None:
        self.spans.append((track, name, begin_s, end_s, arguments))

    def overlapping(self, name: str, begin_s: float, end_s: float, **arguments: Any) -> None:
        self.overlaps.append((name, begin_s, end_s, arguments))


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Noting:
    noting = Noting()
    monkeypatch.setattr(timeline, "current", noting)
    return noting


def test_the_negotiation_of_each_begins_when_it_was_submitted_on_the_other_clock(
    trace: Noting,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: time.perf_counter() + 1000.0)
    monkeypatch.setattr(engine_module, "time", other)
    early = work("early")
    early.submitted_s = time.monotonic() - 5.0
    begin_s = other.perf_counter()
    trace_operations([early.signature], [early], begin_s)
    ((name, submitted_s, negotiated_s, arguments),) = trace.overlaps
    assert (name, arguments) == ("NEGOTIATE_ALLREDUCE", {"operation": "early"})
    assert negotiated_s == begin_s
    assert begin_s - submitted_s == pytest.approx(5.0, abs=1.0)


def test_a_rank_that_has_joined_negotiated_nothing(trace: Noting) -> None:
    mine = work("a")
    others = Signature.of([torch.zeros(2)], name="b", kind=CollectiveKind.ALLREDUCE, op="sum")
    trace_operations([mine.signature, others], [mine, None], 0.0)
    assert [arguments["operation"] for _, _, _, arguments in trace.overlaps] == ["a"]
    assert len(trace.spans) == 3


def test_a_recorder_gets_this_ranks_operations_with_times_on_one_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[Any] = []
    mine = work("a")
    mine.submitted_s = time.monotonic() - 5.0
    agreed_s = time.perf_counter()
    monkeypatch.setattr(recorder, "current", SimpleNamespace(operation=heard.append))
    trace_operations([mine.signature] * 2, [mine, None], agreed_s)
    (told,) = heard
    assert (told.name, told.kind, told.agreed_s) == ("a", "ALLREDUCE", agreed_s)
    assert agreed_s - told.submitted_s == pytest.approx(5.0, abs=1.0)
    assert agreed_s <= told.done_s <= time.perf_counter()
    assert told.n_bytes == sum(tensor.numel() * tensor.element_size() for tensor in mine.tensors)
