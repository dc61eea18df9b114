"""Recordings of a running job: operators, modules, memory, gradients."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import recordings
from hypothesis import given
from hypothesis import strategies as st
from rank_jobs import OVER_MESH, UNTUNED, Job, Play, RankCase, integration, on_ranks
from torch import nn

from sirtaki.analysis import recorder as profiling
from sirtaki.analysis.memory import MemoryReplay
from sirtaki.analysis.operators import (
    ACCUMULATING,
    BACKWARD,
    LOADER,
    UNLISTED,
    ZEROING,
    ClockMap,
    LiveStorage,
    Mark,
    MemoryEvent,
    ModuleCalls,
    ProfilerEvent,
    ProfilerTrace,
    Reader,
    StepOperators,
    StepWatch,
    StepWindow,
    TensorWatch,
    address_of,
    borrowed,
    live_storages,
    map_clock,
    memory_of_step,
    operators_of,
    readers,
    with_edges,
)
from sirtaki.analysis.recorder import (
    Draft,
    JobRecorder,
    Stage,
    buffer_number,
    operators_of_drafts,
    recorded,
)
from sirtaki.analysis.recording import Holds, Operator, PhaseSpan, StepMemory
from sirtaki.autotune.model.replayer import Phase
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.comm.recorder import CopySpan, ReadyMoment, TracedIteration, TracedOperation, TracedUnit
from sirtaki.engine.settings import ProfileRequest
from sirtaki.errors import NotInitializedError, RecordingError
from sirtaki.profiler import profile
from sirtaki.uncompiled import something_is_compiled

# ── profiling ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_impossible_recording_is_rejected(monkeypatch, tmp_path) -> None:
    with pytest.raises(NotInitializedError), profile(tmp_path):
        pass
    asked = SimpleNamespace(settings=SimpleNamespace(profile=None))
    monkeypatch.setattr(profiling, "current", lambda: asked)
    with pytest.raises(ValueError, match="expected at least 1, found 0"), profile(tmp_path, iterations=0):
        pass
    asked.settings.profile = ProfileRequest(folder=str(tmp_path), iterations=2, operators=False)
    monkeypatch.setattr(profiling, "_from_environment", None)
    profiling.begin_as_set()
    begun = profiling._from_environment
    assert begun is not None
    profiling.begin_as_set()  # of the next generation of an elastic job
    assert profiling._from_environment is begun
    with pytest.raises(ValueError, match="already records this job"), profile(tmp_path):
        pass
    begun.end()


# ── job recorder ──────────────────────────────────────────────────────────────────────────────────────────────────


@on_ranks(
    "profiled",
    Job(2, env=UNTUNED),
    integration(Job(3, env={**UNTUNED, **OVER_MESH, "SIRTAKI_TRANSPORT": "gloo"})),
)
def test_a_job_is_recorded(play: Play, rank_case: RankCase) -> None:
    play(rank_case)


@on_ranks("profiled", Job(3, env={**UNTUNED, "SIRTAKI_TEST_SUBSETS": "1"}), cases="SUBSETS")
def test_a_job_with_process_sets_is_recorded(play: Play, rank_case: RankCase) -> None:
    play(rank_case)


def test_nothing_is_written_if_it_never_began(tmp_path, caplog) -> None:
    recorder = JobRecorder(ProfileRequest(folder=str(tmp_path / "recorded")))
    recorder.end()
    recorder.end()
    assert recorder.stage is Stage.ENDED
    assert caplog.text.count("nothing was recorded") == 1
    assert not (tmp_path / "recorded").exists()


# ── own recording ─────────────────────────────────────────────────────────────────────────────────────────────────

ROUTE = (TransportKind.GLOO, Algorithm.FLAT)


def draft() -> Draft:
    unit = TracedUnit(layout_number=1, layout=recordings.LAYOUT, start=0, stop=100, stream=2, route=ROUTE,
                      issued_s=1.4, began_s=None, done_s=1.8)  # fmt: skip
    ready, copies = (ReadyMoment(1, 0, 1.3), ReadyMoment(0, 2, 1.2)), (CopySpan(1.35, 1.36, 2),)
    traced = TracedIteration(source=None, number=3, profiling=False, first_ready_s=1.2, backward_ended_s=1.5,
                             end_s=1.9, ready=ready, copies=copies, units=(unit,))  # fmt: skip
    loss = TracedOperation(name="loss", kind="ALLREDUCE", submitted_s=1.95, agreed_s=1.96, done_s=1.97, n_bytes=4)
    return Draft(1.0, traced=[((0, 2), traced)], updates=[(1.9, 2.0)], number=12, end_s=2.0, operations=[loss])


def test_a_step_without_operators_has_gradients_of_all_buffers_of_the_job() -> None:
    one = recorded(draft(), None)
    assert (one.number, one.begin_s, one.end_s, one.profiling) == (12, 1.0, 2.0, False)
    assert one.spans == ((Phase.BACKWARD, 1.2, 1.5), (Phase.UPDATE, 1.9, 2.0))
    assert one.exposed_s == pytest.approx(0.4)
    assert one.collectives == (("loss", "ALLREDUCE", 1.95, 1.96, 1.97, 4),)
    assert one.copies == ((1.35, 1.36, 2),)
    buffers = [buffer_number((0, 2), number) for number in (0, 1)]
    assert one.units == ((3, buffers[1], 0, 100, ROUTE, 2, 1.4, None, 1.8),)
    assert one.ready == ((buffers[0], 2, 1.2), (buffers[1], 0, 1.3))


def test_an_unprofiled_step_has_the_operators_of_a_profiled_one() -> None:
    lender, borrower = draft(), draft()
    lender.slowed = True
    borrower.begin_s = 0.0  # its forward pass took six times as long as that of the lender
    backward = ProfilerEvent(f"{BACKWARD}AddmmBackward0", 1, 1.15, 1.45)
    seen = ProfilerTrace(
        events=[ProfilerEvent("aten::linear", 1, 1.02, 1.12), backward],
        thread=1,
        clock=ClockMap(origin_ns=0, origin_s=0.0, error_s=1e-6),
    )
    (own, lent), lanes = operators_of_drafts([lender, borrower], seen)
    assert lanes == ("training thread",)
    assert own is not None
    assert lent is not None
    names = [one.name for one in own.operators]
    assert names == [one.name for one in lent.operators] == ["aten::linear", *["AddmmBackward0"] * 2]  # a copy cuts it
    assert (own.operators[0].begin_s, own.operators[0].end_s) == (1.02, 1.12)
    assert (lent.operators[0].begin_s, lent.operators[0].end_s) == pytest.approx((0.12, 0.72))
    assert [span.phase for span in lent.spans] == [span.phase for span in own.spans]
    assert operators_of_drafts([lender, borrower], None) == ([None, None], ())
    assert not recorded(borrower, lent).slowed


# ── borrowed operators ────────────────────────────────────────────────────────────────────────────────────────────

THERE = {("begin",): 10.0, ("ready", 1): 14.0, ("ready", 0): 16.0, ("end",): 20.0}


@pytest.mark.parametrize(
    ("here", "lent"),
    [  # each part between two moments is stretched by itself; what happened in another order is no common moment
        ((100.0, 102.0, 105.0, 105.5), [(100.0, 101.0), (102.0, 105.0), (105.25, 105.5)]),
        ((0.0, 6.0, 5.0, 10.0), [(0.0, 3.0), (6.0, 6 + 4 * 2 / 6), (6 + 4 * 4 / 6, 10.0)]),
    ],
)
def test_operators_are_lent_between_moments_that_both_steps_have(here, lent) -> None:
    spans_s = ((10.0, 12.0), (14.0, 16.0), (18.0, 20.0))
    operators = tuple(Operator(f"op{n}", 0, *span_s, Phase.FORWARD, n) for n, span_s in enumerate(spans_s))
    seen = StepOperators(operators=operators, spans=(PhaseSpan(Phase.FORWARD, 10.0, 20.0),))
    found = borrowed(seen, THERE, dict(zip(THERE, here, strict=True)))
    assert [(one.begin_s, one.end_s) for one in found.operators] == [pytest.approx(pair) for pair in lent]
    assert [one.name for one in found.operators] == ["op0", "op1", "op2"]
    assert found.spans[0][1:] == (pytest.approx(here[0]), pytest.approx(here[3]))


# ── clock map ─────────────────────────────────────────────────────────────────────────────────────────────────────

EPOCH_NS = 1_795_374_239_018_036_638


def mark(true_s: float, *, early_s: float, late_s: float, ahead_s: float) -> Mark:
    """Return a mark at `true_s` of our clock, whose time is known only within these bounds."""
    return Mark(
        before_s=true_s - early_s,
        after_s=true_s + 1e-6 + late_s,
        start_ns=EPOCH_NS + round((true_s + ahead_s) * 1e9),
        duration_ns=1000,
    )


@given(
    ahead_s=st.floats(-1e3, 1e3),
    widths=st.lists(st.tuples(st.floats(0, 1e-3), st.floats(0, 1e-3)), min_size=1, max_size=8),
)
def test_the_clock_error_is_bounded_by_the_quickest_marks(ahead_s: float, widths: list[tuple[float, float]]) -> None:
    marks = [mark(50.0 + number, early_s=a, late_s=b, ahead_s=ahead_s) for number, (a, b) in enumerate(widths)]
    clock = map_clock(marks)
    told_s = clock.at(EPOCH_NS + round((52.5 + ahead_s) * 1e9))
    assert abs(told_s - 52.5) <= clock.error_s + 1e-8
    assert clock.error_s <= min(a + b for a, b in widths) / 2 + 1e-8


# ── kineto ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_operators_have_times_of_our_clock_annotations_are_none_and_numbers_join_passes() -> None:
    weight = torch.ones(300, 300, requires_grad=True)
    kineto = StepWatch()
    before_s = time.perf_counter()
    with torch.profiler.record_function("mine"):
        torch.ones(300, 300).matmul(weight * 2).sum().backward()
    after_s = time.perf_counter()
    kineto.mark()
    seen = kineto.stop()
    events = {event.name: event for event in sorted(seen.events, key=lambda event: -event.begin_s)}
    product = events["aten::matmul"]
    assert before_s - seen.clock.error_s <= product.begin_s < product.end_s <= after_s + seen.clock.error_s
    assert seen.clock.error_s < 1e-3
    assert product.lane == (False, seen.thread)
    assert "sirtaki.mark" not in events
    assert (events["mine"].annotation, product.annotation) == (True, False)
    assert events["aten::mul"].sequence == events["autograd::engine::evaluate_function: MulBackward0"].sequence >= 0


def test_a_script_that_uses_it_keeps_it() -> None:
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(RecordingError, match=r"the training script itself runs torch\.profiler"),
    ):
        StepWatch()
    StepWatch().stop()


def test_only_the_thread_that_has_switched_it_on_switches_it_off() -> None:
    watch, seen = StepWatch(), list[object]()
    asking = threading.Thread(target=lambda: seen.append(watch.stop()))
    asking.start()
    asking.join()
    assert seen == [None]
    assert watch.stop() is not None


def test_memory_is_recorded_in_order_with_its_requester() -> None:
    weight = torch.ones(1000, requires_grad=True)
    kineto = StepWatch()
    before_s = time.perf_counter()
    (weight * 2).sum().backward()
    weight.grad = None
    seen = kineto.stop()
    assert all(one.device == "cpu" and one.at_s >= before_s - seen.clock.error_s for one in seen.memory)
    assert [one.at_s for one in seen.memory] == sorted(one.at_s for one in seen.memory)
    large = [(one.n_bytes, one.operator) for one in seen.memory if abs(one.n_bytes) == 4000]
    assert large[0] == (4000, "aten::mul")
    assert sum(n_bytes for n_bytes, _ in large) == 0
    assert not any(event.name == "[memory]" for event in seen.events)


def test_inputs_of_operators_are_watched_until_the_next_mark() -> None:
    kineto = StepWatch(edges=True)
    torch.ones(4).sum()
    kineto.mark()
    torch.ones(4).prod()
    assert [(one.name, one.after) for one in kineto.stop().readers] == [("aten::ones", ()), ("aten::sum", (0,))]


# ── operators ─────────────────────────────────────────────────────────────────────────────────────────────────────

TRAINS, ENGINE = 1, 7

CLOCK = ClockMap(origin_ns=0, origin_s=0.0, error_s=0.0)


def event(name: str, begin_s: float, end_s: float, *, thread: int = TRAINS, **more: object) -> ProfilerEvent:
    return ProfilerEvent(name, thread, begin_s, end_s, **more)  # type: ignore[arg-type]


def named(name: str, begin_s: float, end_s: float) -> ProfilerEvent:
    return event(name, begin_s, end_s, annotation=True)


STEP = StepWindow(begin_s=0.0, end_s=10.0, updates=((8.0, 9.0),), cuts=())

USUAL = [
    named(LOADER + "_next", 0.5, 1.0),
    event("aten::stack", 0.6, 0.9),
    named(ZEROING + "SGD", 1.1, 1.2),
    event("aten::zero_", 1.15, 1.18),
    event("aten::linear", 2.0, 3.0, sequence=5),
    event("aten::addmm", 2.1, 2.9, sequence=6),
    event("aten::sum", 3.0, 3.5, sequence=7),
    event(BACKWARD + "SumBackward0", 4.0, 4.5, sequence=7),
    event("SumBackward0", 4.1, 4.4, sequence=7),
    event(BACKWARD + "torch::autograd::AccumulateGrad", 4.5, 6.0),
    event("aten::copy_", 7.0, 7.1),
    event("aten::add_", 8.2, 8.3),
]


def only(events: list[ProfilerEvent], step: StepWindow = STEP) -> StepOperators:
    (found,), _ = operators_of(ProfilerTrace(events=events, thread=TRAINS, clock=CLOCK), [step])
    return found


def test_phases_follow_pytorchs_names_and_nested_calls_are_ignored() -> None:
    found = only(USUAL)
    assert [(one.name, one.phase) for one in found.operators] == [
        ("aten::stack", Phase.DATA), ("aten::zero_", Phase.OTHER), ("aten::linear", Phase.FORWARD),
        ("aten::sum", Phase.FORWARD), ("SumBackward0", Phase.BACKWARD), ("AccumulateGrad", Phase.BACKWARD),
        ("aten::copy_", Phase.OTHER), ("aten::add_", Phase.UPDATE),
    ]  # fmt: skip
    assert found.spans == (
        (Phase.DATA, 0.5, 1.0), (Phase.FORWARD, 2.0, 3.5), (Phase.BACKWARD, 4.0, 6.0), (Phase.UPDATE, 8.0, 9.0),
    )  # fmt: skip


def test_work_before_the_data_is_not_forward() -> None:
    metric = event("aten::mul_", 0.1, 0.2, sequence=5)  # the number of the node that is made next
    operators = only([metric, *USUAL]).operators
    assert operators[0].phase is Phase.OTHER
    assert next(one for one in operators if one.name == "aten::linear").phase is Phase.FORWARD


def test_data_that_is_fetched_between_the_passes_leaves_the_forward_pass_before_it() -> None:
    late = [one for one in USUAL if LOADER not in one.name and one.name != "aten::stack"]
    fetched = [named(LOADER + "_next", 3.6, 3.8), event("aten::stack", 3.65, 3.7)]
    phases = {one.name: one.phase for one in only([*late, *fetched]).operators}
    assert phases["aten::linear"] is Phase.FORWARD
    assert phases["aten::stack"] is Phase.DATA


def test_an_operator_is_cut_around_copies() -> None:
    step = StepWindow(begin_s=0.0, end_s=10.0, updates=(), cuts=((4.6, 4.7), (5.0, 5.5), (5.9, 7.0)))
    pieces = [(one.begin_s, one.end_s) for one in only(USUAL, step).operators if one.name == "AccumulateGrad"]
    assert pieces == [(4.5, 4.6), (4.7, 5.0), (5.5, 5.9)]


def test_threads_and_streams_are_lanes_and_kernels_have_their_launchers_phase() -> None:
    events = [
        *USUAL,
        event(BACKWARD + "MulBackward0", 5.0, 5.2, thread=ENGINE, sequence=3),
        event("cudaLaunchKernel", 2.2, 2.3, launch=42),
        event("gemm", 2.5, 6.5, thread=20, on_device=True, launch=42),
        event("memset", 6.6, 6.7, thread=20, on_device=True, launch=43),
    ]
    found, lanes = operators_of(ProfilerTrace(events=events, thread=TRAINS, clock=CLOCK), [STEP])
    assert lanes == ("training thread", "thread 7", "stream 20 of the device")
    by_name = {one.name: one for one in found[0].operators}
    assert (by_name["MulBackward0"].lane, by_name["MulBackward0"].phase) == (1, Phase.BACKWARD)
    assert (by_name["gemm"].lane, by_name["gemm"].phase) == (2, Phase.FORWARD)
    assert by_name["memset"].phase is Phase.OTHER
    assert "cudaLaunchKernel" not in by_name  # aten::linear has called it


# ── tensor edges ──────────────────────────────────────────────────────────────────────────────────────────────────

FLOAT = 4


def tensor(number: int, storage: int, *, elements: int = 8, itemsize: int = FLOAT) -> list[Any]:
    return [number, storage, 0, elements, itemsize, "cpu"]


def node(
    number: int,
    name: str,
    *,
    inside: int = 1,
    reads: tuple[Any, ...] = (),
    makes: tuple[Any, ...] = (),
    schema: str = "",
    scope: int = 0,
    thread: int = 1,
) -> dict[str, Any]:
    attributes = {"scope": scope, "tid": thread, "op_schema": schema}
    return {
        "id": number,
        "name": name,
        "ctrl_deps": inside,
        "inputs": {"values": list(reads)},
        "outputs": {"values": list(makes)},
        "attrs": [{"name": key, "value": value} for key, value in attributes.items()],
    }


def autograd_edges(loss: torch.Tensor) -> set[tuple[str, str]]:
    """Return edges by name: (producer of a gradient, consumer)."""
    found, left = set(), [loss.grad_fn]
    while left:
        one = left.pop()
        if one is not None:
            found |= {(one.name(), other.name()) for other, _ in one.next_functions if other is not None}
            left += [other for other, _ in one.next_functions]
    return {(giver, getter.removeprefix("torch::autograd::")) for giver, getter in found}


def test_a_real_step_has_autograds_edges_and_those_of_its_forward_pass() -> None:
    first, second, batch = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1), torch.randn(3, 4)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, foreach=False)
    watch = TensorWatch()
    hidden = first(batch)
    loss = second(torch.relu(hidden) * torch.sigmoid(hidden)).sum()
    expected = autograd_edges(loss)
    loss.backward()
    optimizer.step()
    watch.stop()
    found = watch.readers()
    edges = [(found[maker].name, one.name) for one in found for maker in one.after]
    assert expected <= set(edges)
    assert {("aten::linear", "aten::relu"), ("aten::linear", "aten::sigmoid"), ("aten::relu", "aten::mul")} <= {*edges}
    assert ("aten::relu", "aten::sigmoid") not in edges
    assert all(maker < place for place, one in enumerate(found) for maker in one.after)
    updates = [one for one in found if one.name == "aten::add_"][-4:]
    gradients = [{maker for maker in one.after if found[maker].name == "AccumulateGrad"} for one in updates]
    assert Counter(map(len, gradients)) == {1: 4}
    assert len(set.union(*gradients)) == 4


WRITE = "aten::add_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)"
A, VIEW, B = tensor(20, 21), tensor(22, 21), tensor(30, 31)


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        pytest.param(
            [node(2, "aten::ones", makes=(A,)), node(3, "aten::linear", reads=(A,)),
             node(4, "aten::mm", inside=3, makes=(B,)), node(5, "torch::autograd::AccumulateGrad"),
             node(6, "aten::add", inside=5, reads=([B], 1.0))],
            [("aten::ones", ()), ("aten::linear", (0,)), ("AccumulateGrad", (1,))],
            id="what an operator calls reads and makes for it",
        ),
        pytest.param(
            [node(2, "aten::ones", makes=(A,)), node(3, "aten::view", reads=(A,), makes=(VIEW,)),
             node(4, "aten::add_", reads=(VIEW, 1.0), makes=(VIEW,), schema=WRITE), node(5, "aten::sum", reads=(A,))],
            [("aten::ones", ()), ("aten::view", (0,)), ("aten::add_", (0, 1)), ("aten::sum", (0, 2))],
            id="writing in place and views are seen through the storage",
        ),
        pytest.param(
            [node(2, "mine", scope=7), node(3, "aten::ones", inside=2, makes=(A,)),
             node(4, "aten::sum", inside=2, reads=(A,)), node(5, "aten::sin", thread=2)],
            [("aten::ones", ()), ("aten::sum", (0,))],
            id="annotations and other threads are no operators",
        ),
    ],
)  # fmt: skip
def test_operators_depend_on_the_producers_of_their_inputs(nodes, found) -> None:
    assert list(readers(nodes)) == found


def operator(name: str, begin_s: float, *, lane: int = 0) -> Operator:
    return Operator(name, lane, begin_s, begin_s + 1, Phase.FORWARD)


@pytest.mark.parametrize(
    ("pieces", "found", "after"),
    [  # of a cut operator the first part reads, the last one is read; what another step does otherwise reads nothing
        (
            [(0, operator("a", 0.0)), (3, operator("elsewhere", 0.5, lane=1)), (1, operator("b", 1.0)),
             (1, operator("b", 2.0)), (2, operator("c", 3.0))],
            (Reader("a", ()), Reader("b", (0,)), Reader("c", (0, 1))),
            [(), (), (0,), (), (0, 3)],
        ),
        (
            [(place, operator(name, place)) for place, name in enumerate(("a", "new", "c", "d"))],
            (Reader("a", ()), Reader("gone", (0,)), Reader("c", (0, 1)), Reader("d", (2,))),
            [(), (), (0,), (2,)],
        ),
    ],
)  # fmt: skip
def test_dependencies_watched_in_one_step_apply_to_others(pieces, found, after) -> None:
    assert [one.after for one in with_edges(pieces, found)] == after
    assert with_edges(pieces, ()) == tuple(one for _, one in pieces)


def test_a_trace_that_cannot_be_read_tells_nothing_but_why(caplog: pytest.LogCaptureFixture) -> None:
    watch = TensorWatch()
    watch.stop()
    with open(watch._path, "w") as file:
        file.write("{")
    assert watch.readers() == ()
    assert "data dependencies between operators are missing in the recording" in caplog.text


# ── live tensors ──────────────────────────────────────────────────────────────────────────────────────────────────


def of(tensor: torch.Tensor, found: list[LiveStorage]) -> LiveStorage:
    (one,) = (each for each in found if (each.device, each.address) == address_of(tensor))
    return one


def test_each_storage_is_recorded_once_with_its_use() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    flat = torch.zeros(100)
    model[1].weight.grad = flat[:8]
    mine, view = torch.ones(1000), None
    view = mine[10:20]
    found = live_storages()
    weight = model[0].weight
    assert of(weight, found).holds is Holds.PARAMETERS
    assert of(weight, found).n_bytes == 8 * 8 * 4
    assert of(weight.grad, found).holds is Holds.GRADIENTS
    assert of(flat, found).holds is Holds.FLAT_BUFFERS
    assert of(model[1].running_mean, found).holds is Holds.MODULE_BUFFERS
    assert of(optimizer.state[weight]["exp_avg"], found).holds is Holds.OPTIMIZER
    assert of(view, found).holds is Holds.OTHER
    assert of(view, found).n_bytes == 4000


def test_tensors_without_memory_of_their_own_are_not_held() -> None:
    assert address_of(torch.empty(0)) is address_of(torch.eye(3).to_sparse()) is None
    kept = torch.ones(5, device="meta")
    with tempfile.NamedTemporaryFile() as file:
        mapped = torch.from_file(file.name, shared=True, size=100)
        found = live_storages()
    assert not any(one.device == kept.device.type or (one.device, one.address) == address_of(mapped) for one in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_all_allocations_of_a_device_are_recorded() -> None:
    kept = torch.ones(1000, device="cuda")
    found = [one for one in live_storages() if one.device == str(kept.device)]
    assert sum(one.n_bytes for one in found) == torch.cuda.memory_allocated(kept.device)


# ── module calls ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def calls() -> Iterator[ModuleCalls]:
    watching = ModuleCalls()
    yield watching
    watching.stop()


def test_calls_are_nested_and_named(calls: ModuleCalls) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    model(torch.ones(3, 4))
    found, of_calls = calls.modules()
    assert [one.name for one in found] == ["", "0", "1", "1.0", "1.1"]
    assert {one.root for one in found} == {0}
    assert of_calls == [0, 1, 2, 3, 4]
    assert [call.parent for call in calls.calls] == [-1, 0, 0, 2, 2]
    assert calls.at((calls.calls[3].begin_s + calls.calls[3].end_s) / 2) == 3
    assert calls.at(calls.calls[4].end_s + 1) == -1
    assert calls.at(calls.calls[0].begin_s - 1) == -1


def test_two_models_are_two_and_a_module_that_is_called_twice_is_one(calls: ModuleCalls) -> None:
    first, second = nn.Sequential(nn.Linear(4, 4)), nn.ReLU()
    second(first(first(torch.ones(1, 4))))
    found, of_calls = calls.modules()
    assert ([(one.name, one.root) for one in found], of_calls) == ([("", 0), ("0", 0), ("", 2)], [0, 1, 0, 1, 2])


def test_a_node_belongs_to_the_innermost_module_that_made_it(calls: ModuleCalls) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    found = model(torch.ones(3, 4)).square()
    assert calls.of_node(found.grad_fn._sequence_nr()) == -1
    tanh = found.grad_fn.next_functions[0][0]
    assert (tanh.name(), calls.of_node(tanh._sequence_nr())) == ("TanhBackward0", 2)
    linear = tanh.next_functions[0][0]
    assert (linear.name(), calls.of_node(linear._sequence_nr())) == ("AddmmBackward0", 1)
    assert calls.of_node(-1) == calls.of_node(1 << 63) == -1


def test_inputs_and_outputs_are_recorded_on_request(calls: ModuleCalls) -> None:
    model, batch = nn.Linear(4, 2), torch.ones(3, 4)
    model(batch)
    calls.with_tensors = True
    found = model(input=batch)
    without, with_tensors = calls.calls
    assert (without.inputs, without.batch) == ((), 0)
    assert with_tensors.inputs == (("cpu", batch.data_ptr()),)
    assert with_tensors.outputs == (("cpu", found.data_ptr()),)
    assert with_tensors.batch == 3


def test_a_module_that_fails_has_ended_and_other_threads_are_left_alone(calls: ModuleCalls) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 5))
    other = threading.Thread(target=lambda: model(torch.ones(3, 4)))
    other.start()
    other.join()
    model(torch.ones(3, 4))
    assert [call.parent for call in calls.calls] == [-1, 0, -1, 2]


@pytest.mark.slow
def test_it_is_recorded_whether_something_was_compiled() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert not something_is_compiled()
    torch.compile(lambda value: value + 1, backend="eager")(torch.ones(1))
    assert something_is_compiled()
    torch._dynamo.utils.counters.clear()


# ── memory of step ────────────────────────────────────────────────────────────────────────────────────────────────

SPANS = (
    PhaseSpan(phase=Phase.FORWARD, begin_s=1.0, end_s=3.0),
    PhaseSpan(phase=Phase.BACKWARD, begin_s=4.0, end_s=7.0),
    PhaseSpan(phase=Phase.UPDATE, begin_s=8.0, end_s=9.0),
)

ADDING = ProfilerEvent(BACKWARD + ACCUMULATING, 1, 5.5, 6.0)


def event_in_step(at_s: float, address: int, n_bytes: int, *, accumulating: bool = False) -> MemoryEvent:
    return MemoryEvent(at_s, "cpu", address, n_bytes, "aten::mm", accumulating)


def memory_seen(*memory: MemoryEvent, storages: tuple[LiveStorage, ...] = ()) -> StepMemory:
    seen = ProfilerTrace(events=[ADDING], thread=1, clock=CLOCK, memory=memory, storages=storages)
    return memory_of_step(seen, number=7, begin_s=0.0, end_s=10.0, spans=SPANS)


def test_reused_memory_is_distinguished_by_allocation_and_release() -> None:
    events = [
        event_in_step(2.0, 1, 10), event_in_step(2.5, 1, -10),  # soon gone
        event_in_step(2.6, 2, 20), event_in_step(4.5, 2, -20),  # the backward pass takes it
        event_in_step(5.0, 3, 30), event_in_step(5.9, 3, -30, accumulating=True),  # copied into a flat buffer by a hook
        event_in_step(5.0, 4, 40), event_in_step(5.2, 4, -40),
        event_in_step(5.6, 5, 50, accumulating=True), event_in_step(5.7, 5, -50, accumulating=True),  # the hook's own
        event_in_step(6.5, 6, 60),  # stays
        event_in_step(8.5, 7, 70),
    ]  # fmt: skip
    holds = {one.n_bytes: one.holds for one in memory_seen(*sorted(events, key=lambda one: one.at_s)).allocations}
    assert holds == {
        10: Holds.OTHER, 20: Holds.ACTIVATIONS, 30: Holds.GRADIENTS, 40: Holds.OTHER, 50: Holds.OTHER,
        60: Holds.GRADIENTS, 70: Holds.OPTIMIZER,
    }  # fmt: skip


WEIGHT, UNKNOWN = LiveStorage("cpu", 3, 33, Holds.PARAMETERS), LiveStorage("cpu", UNLISTED, 100, Holds.OTHER)
BEFORE = ((-3.0, 1, 10), (-2.0, 2, 20), (-1.0, 2, -20), (-0.5, 3, 33), (1.5, 1, -10))


@pytest.mark.parametrize(
    ("events", "storages", "found"),
    [
        (BEFORE, (WEIGHT,), [(10, Holds.OTHER, 1.5), (33, Holds.PARAMETERS, None)]),
        (((1.5, 9, -10),), (), []),  # of something that nobody has seen
        (((-3.0, 1, 10),), (UNKNOWN,), [(10, Holds.OTHER, None), (90, Holds.OTHER, None)]),  # what is seen counts once
        (  # an address is used again
            ((1.0, 1, 10), (2.0, 1, -10), (2.5, 1, 11), (11.0, 1, -11)),
            (),
            [(10, Holds.OTHER, 2.0), (11, Holds.ACTIVATIONS, None)],
        ),
        (  # and nobody has seen it given back
            ((1.0, 1, 10), (2.5, 1, 11), (11.0, 1, -11)),
            (),
            [(10, Holds.OTHER, 2.5), (11, Holds.ACTIVATIONS, None)],
        ),
    ],
)
def test_existing_memory_is_known_from_tensors_and_events(events, storages, found) -> None:
    memory = memory_seen(*(event_in_step(*one) for one in events), storages=storages)
    assert [(one.n_bytes, one.holds, one.end_s) for one in memory.allocations] == found


@pytest.mark.slow
def test_the_peak_of_a_real_step_is_the_allocators() -> None:
    watch = StepWatch()
    base = sum(one.n_bytes for one in live_storages() if one.device == "cpu")
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    batch = torch.ones(128, 64)
    model(batch).square().mean().backward()
    for one in model.parameters():
        one.grad = None
    watch.next_step()
    begin_s = time.perf_counter()
    loss = model(batch).square().mean()
    backward_s = time.perf_counter()
    loss.backward()
    end_s = backward_end_s = time.perf_counter()
    results = watch._profiler.profiler
    seen = watch.stop()
    assert seen is not None
    assert seen.calls is not None
    spans = (PhaseSpan(Phase.FORWARD, begin_s, backward_s), PhaseSpan(Phase.BACKWARD, backward_s, backward_end_s))
    memory = memory_of_step(seen, number=1, begin_s=begin_s, end_s=end_s, spans=spans)
    left, totals = list(results.kineto_results.experimental_event_tree()), []
    while left:
        one = left.pop()
        left += one.children
        if hasattr(one.extra_fields, "total_allocated"):
            totals.append(one.extra_fields.total_allocated)
    assert MemoryReplay(memory, 0).peak().n_bytes - base == pytest.approx(max(totals), rel=0.01)
    assert memory.batch == 128
    modules, _ = seen.calls.modules()
    activations = Counter[str]()
    for one in memory.allocations:
        if one.holds is Holds.ACTIVATIONS and one.call >= 0:
            activations[modules[memory.calls[one.call].module].name] += one.n_bytes
    assert activations == {"1": 128 * 256 * 4, "2": 128 * 64 * 4}
    gradients = [one.n_bytes for one in memory.allocations if one.holds is Holds.GRADIENTS and one.begin_s]
    assert sorted(gradients) == sorted(one.nbytes for one in model.parameters())
    first = next(call for call in memory.calls if modules[call.module].name == "0")
    assert [memory.allocations[place].n_bytes for place in first.inputs] == [batch.nbytes]
    assert first.end_s < first.backward_begin_s < first.backward_end_s


# ── termination ───────────────────────────────────────────────────────────────────────────────────────────────────

PROGRAM = """
import os, signal, sys
from types import SimpleNamespace
from sirtaki.analysis import recorder
from sirtaki.engine.settings import ProfileRequest

class Kept(recorder.JobRecorder):
    def _write(self):
        if when == "while it is written":
            os.kill(os.getpid(), signal.SIGTERM)
        print("kept", flush=True)

for when in sys.argv[1:]:
    child = os.fork()
    if not child:
        one = Kept(ProfileRequest(folder=""))
        if when == "with a handler of the script's":
            signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        one.handle_termination()
        one.stage = recorder.Stage.RECORDING
        if when in ("while it is written", "after it was written"):
            one.end()
        os.kill(os.getpid(), signal.SIGTERM)
        print("lives", flush=True)
        os._exit(0)
    print(when, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.lengthy
def test_a_recording_is_written_before_sigterm_ends_the_process() -> None:
    cases = ["before it is written", "while it is written", "after it was written", "with a handler of the script's"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *cases], capture_output=True, text=True, check=False)
    killed = -int(signal.SIGTERM)
    expected = [line for case in cases[:3] for line in ("kept", f"{case} {killed}")]
    assert done.stdout.splitlines() == [*expected, f"{cases[3]} 7"], done.stderr
