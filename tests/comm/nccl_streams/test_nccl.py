"""Plans become communicators, several where NCCL can, and factors are multiplied where it does not."""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from fakes.cuda import FakeCuda
from fakes.groups import LoneGroup, LoneOpener
from fakes.streams import FakeDevice

from sirtaki.autotune.knobs import Cut, Knobs
from sirtaki.comm.device import HOST
from sirtaki.comm.nccl_streams.transport import (
    LAUNCH_ORDER,
    TOO_LATE,
    CommunicatorKey,
    CommunicatorPool,
    Group,
    NcclGroup,
    NcclHierarchicalTransport,
    NcclOpener,
    NcclTransport,
    NcclVersions,
    Scope,
    ask_for_launch_order,
    ctas_for,
    tunable_ways,
)
from sirtaki.comm.plan import Algorithm, GradientLayout, NcclWay, TransportKind
from sirtaki.comm.router import streams_of
from sirtaki.comm.transports.contract import FlatBuffer, ReduceOp, StreamSpec
from sirtaki.errors import CommError, PlanError, TransportError


def pool_of(
    opener: LoneOpener, limit: int = 24, worst: Callable[[float], float] = lambda value: value
) -> CommunicatorPool:
    return CommunicatorPool(opener, limit=limit, worst=worst)


def keys(*streams: int) -> list[CommunicatorKey]:
    return [CommunicatorKey(stream) for stream in streams]


def test_communicators_are_opened_once_and_in_the_order_in_which_they_are_asked_for() -> None:
    opener = LoneOpener()
    pool = pool_of(opener)
    pool.require(keys(2, 0))
    pool.require(keys(0, 1, 2, 0))
    assert opener.opened == keys(2, 0, 1)
    assert pool.open[CommunicatorKey(1)] is opener.made[CommunicatorKey(1)]


def test_a_stream_with_other_ctas_or_other_ranks_is_another_communicator() -> None:
    opener = LoneOpener()
    several = [CommunicatorKey(0), CommunicatorKey(0, 4), CommunicatorKey(0, 4, Scope.NODE)]
    pool_of(opener).require(several)
    assert opener.opened == several
    assert [str(key) for key in several] == ["stream 0", "stream 0 with 4 CTAs", "stream 0 with 4 CTAs (node)"]


def test_a_way_of_nccl_is_another_communicator_except_within_a_node() -> None:
    opener = LoneOpener()
    node = {"local_size": 1, "local_rank": 0}
    streams = [StreamSpec(0), StreamSpec(0, None, NcclWay.RING_LL128), StreamSpec(0, 512, NcclWay.RING_LL128)]
    flat = NcclTransport(pool_of(opener), HOST, opener=opener).keys(streams)
    assert [str(key) for key in flat] == ["stream 0", "stream 0 by ring/ll128", "stream 0 with 1 CTAs by ring/ll128"]
    tree = NcclHierarchicalTransport(pool_of(opener), HOST, opener=opener, **node).keys(streams[:2])
    ways = {scope: [key.way for key in tree if key.scope is scope] for scope in Scope}
    assert ways[Scope.ALL] == ways[Scope.ACROSS] == [None, NcclWay.RING_LL128]
    assert ways[Scope.NODE] == [None]  # whose parts are scattered and gathered


class MadeHere:
    """Stand-in for `ProcessGroupNCCL` that records the environment when its communicator is created."""

    refuses = False
    made: ClassVar[list[dict[str, str]]] = []

    class Options:
        def __init__(self, **how: Any) -> None:
            self.config = SimpleNamespace()

    def __init__(self, *where: Any) -> None:
        self.closed = False

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.made.append({name: os.environ[name] for name in ("NCCL_ALGO", "NCCL_PROTO") if name in os.environ})
        if self.refuses:
            raise RuntimeError("no algorithm/protocol available")
        return SimpleNamespace(wait=lambda: None)

    def shutdown(self) -> None:
        self.closed = True


class ControlOfOne:
    """The part of a control plane that the creation of communicators needs."""

    rank, size, local_rank, local_size, node_ranks, cross_rank, cross_size = 0, 1, 0, 1, (0,), 0, 1

    def store(self) -> Any:
        return dist.HashStore()

    def next_prefix(self) -> str:
        return "prefix"

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def agree_on_success(self, problem: str) -> None:
        if problem:
            raise TransportError(problem)


@pytest.fixture
def opener_of_one(monkeypatch: pytest.MonkeyPatch) -> NcclOpener:
    MadeHere.made.clear()
    monkeypatch.setattr(MadeHere, "refuses", False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", MadeHere, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda place: nullcontext())
    for name in ("NCCL_ALGO", "NCCL_PROTO"):
        monkeypatch.delenv(name, raising=False)
    control: Any = ControlOfOne()
    device: Any = HOST
    return NcclOpener(control, device, max_streams=2, timeout_s=1.0, ways=tunable_ways(control, {}))


def test_a_communicator_is_created_under_its_keys_settings_and_the_environment_is_restored(
    opener_of_one: NcclOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert opener_of_one.ways == tuple(NcclWay)
    opener_of_one.open(CommunicatorKey(0))
    opener_of_one.open(CommunicatorKey(0, way=NcclWay.RING_LL128))
    monkeypatch.setenv("NCCL_PROTO", "LL")
    opener_of_one.open(CommunicatorKey(0, way=NcclWay.TREE_SIMPLE))
    ring, tree = ({"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL128"}, {"NCCL_ALGO": "Tree", "NCCL_PROTO": "Simple"})
    assert MadeHere.made == [{}, ring, tree]
    assert os.environ["NCCL_PROTO"] == "LL"
    assert "NCCL_ALGO" not in os.environ


def test_a_way_that_nccl_refuses_makes_a_plan_impossible_and_ends_no_job(
    opener_of_one: NcclOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MadeHere, "refuses", True)
    with pytest.raises(PlanError, match=r"stream 1 by ring/ll128.*: no algorithm/protocol available"):
        opener_of_one.open(CommunicatorKey(1, way=NcclWay.RING_LL128))
    assert "NCCL_ALGO" not in os.environ
    with pytest.raises(CommError, match="could not open the NCCL communicator of stream 1"):
        opener_of_one.open(CommunicatorKey(1))


@pytest.mark.parametrize("name", ["NCCL_ALGO", "NCCL_PROTO", "NCCL_TUNER_PLUGIN"])
def test_nccl_gets_no_settings_where_the_user_has_decided(name: str, caplog: pytest.LogCaptureFixture) -> None:
    control: Any = ControlOfOne()
    with caplog.at_level(logging.INFO):
        assert tunable_ways(control, {name: "Ring"}) == ()
    assert f"{name} is set" in caplog.text


def test_the_least_recently_used_communicator_is_closed_for_others() -> None:
    opener = LoneOpener()
    pool = pool_of(opener, limit=3)
    pool.require(keys(0, 1, 2))
    pool.require(keys(0))
    pool.require(keys(3))
    assert opener.made[CommunicatorKey(1)].closed
    assert sorted(key.stream for key in pool.open) == [0, 2, 3]
    pool.require(keys(3, 4, 5))
    assert sorted(key.stream for key in pool.open) == [3, 4, 5]


def test_a_plan_that_needs_too_many_is_refused_before_anything_is_closed() -> None:
    opener = LoneOpener()
    pool = pool_of(opener, limit=2)
    pool.require(keys(7))
    with pytest.raises(PlanError, match="needs 3 NCCL communicators; at most 2 may be open"):
        pool.require(keys(0, 1, 2))
    assert opener.opened == keys(7)
    assert not opener.made[CommunicatorKey(7)].closed


def test_memory_is_bounded_by_the_fullest_ranks_measurement() -> None:
    opener = LoneOpener(taken_bytes=10)
    pool = pool_of(opener, limit=24, worst=lambda value: 3 * value)  # on another rank each takes 3 % of the memory
    pool.require(keys(0, 1, 2))
    pool.require(keys(3))
    assert opener.made[CommunicatorKey(0)].closed
    assert len(pool.open) == 3
    with pytest.raises(PlanError, match="of the GPU's memory"):
        pool.require(keys(3, 4, 5, 6))


def test_a_communicator_leaves_half_of_the_free_memory_to_training(monkeypatch: pytest.MonkeyPatch) -> None:
    opener = LoneOpener(taken_bytes=10)
    pool = pool_of(opener)
    pool.require(keys(0, 1))
    monkeypatch.setattr(opener, "memory_bytes", lambda: (15, 1000))
    with pytest.raises(PlanError, match="3% of the GPU's memory; 2% are free"):
        pool.require(keys(0, 1, 2))
    assert opener.opened == keys(0, 1)


class Together(LoneGroup):
    """A communicator whose abort ends only while another one is aborted, too."""

    aborts = threading.Barrier(2)

    def abort(self) -> None:
        self.aborts.wait(20.0)
        super().abort()


def test_all_communicators_are_aborted_at_the_same_time_and_once() -> None:
    opener = LoneOpener()
    pool = pool_of(opener)
    pool.require(keys(0, 1))
    groups = [Together(multiplies=False) for _ in range(2)]
    pool.open.update(zip(keys(0, 1), groups, strict=True))
    assert pool.abort() == 2
    assert all(group.closed for group in groups)
    assert pool.abort() == 0
    pool.check()


@pytest.mark.parametrize(
    ("release", "ended", "n_bytes"), [("2.4.1", "shutdown", 0), ("2.7.1", "abort", 0), ("2.13.0", "abort", 1 << 29)]
)
def test_every_release_aborts_communicators_and_newer_ones_report_their_memory(
    release: str, ended: str, n_bytes: int
) -> None:
    with FakeCuda(release=release):
        options: Any = dist.ProcessGroupNCCL.Options()
        made: Any = dist.ProcessGroupNCCL(None, 0, 1, options)  # type: ignore[arg-type]  # a fake one
        group = NcclGroup(made)
        assert group.memory_bytes() == n_bytes
        group.abort()
        assert made.ended == ended


def test_only_communicators_of_the_last_plan_are_kept_in_the_end() -> None:
    opener = LoneOpener()
    pool = pool_of(opener)
    pool.require(keys(0, 1, 2))
    pool.keep_only(keys(1))
    assert tuple(pool.open) == (CommunicatorKey(1),)
    pool.close()
    assert all(group.closed for group in opener.made.values())


def test_an_error_names_the_communicator() -> None:
    opener = LoneOpener()
    pool = pool_of(opener)
    pool.require(keys(0, 1))
    pool.check()
    opener.made[CommunicatorKey(1)].problem = "remote error"
    with pytest.raises(CommError, match=r"the NCCL communicator of stream 1 failed: remote error; .*NCCL_DEBUG=INFO"):
        pool.check()


def test_a_plan_needs_a_communicator_for_each_stream_and_number_of_ctas() -> None:
    cuts = (
        Cut(stop=10, stream=1, threads=2048),
        Cut(stop=20, stream=0),
        Cut(stop=30, stream=1, threads=2048),
        Cut(stop=40, stream=1, threads=512),
    )
    knobs = Knobs(unit_bytes=4, streams=2, transport=TransportKind.NCCL, cuts=cuts)
    streams = streams_of(knobs.to_plan(GradientLayout(sizes=(40,))), Algorithm.FLAT)
    opener = LoneOpener()
    pool = pool_of(opener)
    flat = NcclTransport(pool, HOST, opener=opener)
    assert flat.keys(streams) == [CommunicatorKey(1, 4), CommunicatorKey(0, None), CommunicatorKey(1, 1)]
    flat.open_streams(streams)
    assert set(pool.open) == set(flat.keys(streams))
    assert streams_of(knobs.to_plan(GradientLayout(sizes=(40,))), Algorithm.HIERARCHICAL) == []


def test_the_hierarchical_algorithm_needs_three_for_each() -> None:
    opener = LoneOpener()
    tree = NcclHierarchicalTransport(pool_of(opener), HOST, opener=opener, local_size=1, local_rank=0)
    assert tree.keys([StreamSpec(2)]) == [CommunicatorKey(2, None, scope) for scope in Scope]


def test_an_algorithm_offers_as_many_streams_as_it_can_have_communicators_for() -> None:
    opener = LoneOpener()
    opener.max_streams = 24
    node = {"local_size": 1, "local_rank": 0}
    assert NcclTransport(pool_of(opener), HOST, opener=opener).max_streams == 24
    tree = NcclHierarchicalTransport(pool_of(opener), HOST, opener=opener, **node)
    assert tree.max_streams == 8
    tree.open_streams([StreamSpec(number) for number in range(tree.max_streams)])


def test_a_factor_is_applied_once_by_nccl_or_by_us() -> None:
    for multiplies in (False, True):
        opener = LoneOpener(multiplies=multiplies)
        pool = pool_of(opener)
        streams = [StreamSpec(0)]
        for transport in (
            NcclTransport(pool, HOST, opener=opener),
            NcclHierarchicalTransport(pool, HOST, opener=opener, local_size=1, local_rank=0),
        ):
            transport.open_streams(streams)
            buffer = FlatBuffer(torch.ones(7))
            work = transport.all_reduce(buffer, 2, 5, stream=streams[0], op=ReduceOp.SUM, scale=0.25)
            assert work.wait(1.0)
            assert work.wait(1.0)  # again, which must not multiply again
            assert buffer.tensor.tolist() == [1.0, 1.0, 0.25, 0.25, 0.25, 1.0, 1.0]


def test_nothing_is_sent_for_an_empty_range() -> None:
    opener = LoneOpener()
    flat = NcclTransport(pool_of(opener), HOST, opener=opener)
    assert flat.all_reduce(FlatBuffer(torch.ones(3)), 2, 2, stream=StreamSpec(5), op=ReduceOp.SUM, scale=1.0).wait(0.0)


class SlowGroup(LoneGroup):
    """Does something else while it reduces, and notes when it began and ended."""

    def __init__(self, device: FakeDevice, notes: list[str], meanwhile: Callable[[], object]) -> None:
        super().__init__(multiplies=False)
        self._device, self._notes, self._meanwhile = device, notes, meanwhile

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        unit = int(tensor[0])

        def reduce() -> None:
            self._notes.append(f"begin {unit}")
            self._meanwhile()
            self._notes.append(f"end {unit}")

        self._device.launch(reduce)


class SlowOpener(LoneOpener):
    def __init__(self, device: FakeDevice, notes: list[str], meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self._device, self._notes, self._meanwhile = device, notes, meanwhile

    def open(self, key: CommunicatorKey) -> Group:
        return SlowGroup(self._device, self._notes, self._meanwhile)


@pytest.mark.parametrize("kind", [NcclTransport, NcclHierarchicalTransport])
def test_units_of_one_stream_are_sequential_with_any_threads(kind: Any) -> None:
    """On communicators of their own, which nothing else would keep from overlapping."""
    device, notes = FakeDevice(), list[str]()
    opener = SlowOpener(device, notes, lambda: time.sleep(0.01))
    node = {} if kind is NcclTransport else {"local_size": 8, "local_rank": 0}  # units are too small for shares
    transport = kind(pool_of(opener), device, opener=opener, **node)
    streams = [StreamSpec(0, threads) for threads in (None, 2048, None, 512, 512, 2048)]
    transport.open_streams(streams)
    buffer = FlatBuffer(torch.arange(len(streams), dtype=torch.float32))
    works = [
        transport.all_reduce(buffer, unit, unit + 1, stream=stream, op=ReduceOp.SUM, scale=1.0)
        for unit, stream in enumerate(streams)
    ]
    for work in works:
        assert work.wait(1.0)
    device.synchronise()
    assert notes == [f"{what} {unit}" for unit in range(len(streams)) for what in ("begin", "end")]


def test_streams_overlap_with_any_threads() -> None:
    device, notes, all_at_work = FakeDevice(), list[str](), threading.Barrier(4)
    opener = SlowOpener(device, notes, lambda: all_at_work.wait(20.0))
    transport = NcclTransport(pool_of(opener), device, opener=opener)
    streams = [StreamSpec(number, threads) for number in range(4) for threads in (None, 2048)]
    transport.open_streams(streams)
    buffer = FlatBuffer(torch.arange(len(streams), dtype=torch.float32))
    for unit, stream in enumerate(streams):
        transport.all_reduce(buffer, unit, unit + 1, stream=stream, op=ReduceOp.SUM, scale=1.0)
    device.synchronise()
    assert sorted(notes) == sorted(f"{what} {unit}" for unit in range(len(streams)) for what in ("begin", "end"))


class Notes:
    """Stands where `ProcessGroupNCCL` would."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    def size(self) -> int:
        return 3

    def allreduce(self, tensors: list[torch.Tensor], how: Any) -> None:
        self.asked.append(("allreduce", how.reduceOp))

    def shutdown(self) -> None:
        self.asked.append(("shutdown", None))


def asked_for(scale: float, dtype: torch.dtype) -> Any:
    notes = Notes()
    scaled = NcclGroup(notes).all_reduce_scaled(torch.zeros(4, dtype=dtype), scale)
    assert scaled == bool(notes.asked)
    return notes.asked[0][1] if notes.asked else None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_averages_are_nccls_own(dtype: torch.dtype) -> None:
    assert asked_for(1 / 3, dtype) == dist.ReduceOp.AVG


def test_other_factors_are_multiplied_on_the_way_where_every_torch_can() -> None:
    assert asked_for(0.25, torch.float32) == dist.ReduceOp.PREMUL_SUM
    assert asked_for(0.25, torch.bfloat16) is None
    assert asked_for(1 / 3, torch.int64) is None


def test_sums_and_extremes_are_asked_for_as_they_are() -> None:
    notes = Notes()
    for op in ReduceOp:
        NcclGroup(notes).all_reduce(torch.zeros(1), op)
    assert [how for _, how in notes.asked] == [
        dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT,
    ]  # fmt: skip


def test_a_torch_without_error_queries_reports_no_errors() -> None:
    group = NcclGroup(Notes())
    assert group.error() == ""
    group.close()


GOOD = NcclVersions(nccl=(2, 27, 3), cuda_runtime=(12, 8), cuda_driver=(12, 4), launch_order="1")


def test_new_versions_run_several_streams() -> None:
    assert GOOD.max_streams > 1
    assert GOOD.why_one_stream == ""
    assert replace(GOOD, nccl=(2, 26, 0), cuda_runtime=(12, 3), cuda_driver=(13, 0)).max_streams > 1


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"nccl": (2, 25, 1)}, "NCCL 2.25.1 cannot order"),
        ({"launch_order": ""}, "is not set"),
        ({"launch_order": "0"}, "is 0"),
        ({"cuda_driver": (12, 2)}, "driver is 12.2"),
        ({"cuda_driver": (0, 0)}, "driver is not known"),
        ({"launch_order": TOO_LATE}, "import sirtaki.torch first"),
        ({"cuda_runtime": (11, 8)}, "runtime is 11.8"),
    ],
)
def test_older_releases_run_one_communicator_and_log_the_reason(changed: dict[str, object], reason: str) -> None:
    old = replace(GOOD, **changed)  # type: ignore[arg-type]  # one field each
    assert old.max_streams == 1
    assert reason in old.why_one_stream


def test_the_users_choice_of_launch_order_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCH_ORDER, "0")
    ask_for_launch_order()
    assert os.environ[LAUNCH_ORDER] == "0"
    monkeypatch.delenv(LAUNCH_ORDER)
    ask_for_launch_order()
    assert os.environ[LAUNCH_ORDER] == "1"


@pytest.mark.parametrize(("threads", "ctas"), [(None, None), (128, 1), (512, 1), (1024, 2), (4096, 8), (1_000_000, 32)])
def test_threads_become_ctas(threads: int | None, ctas: int | None) -> None:
    assert ctas_for(threads) == ctas
