"""Rows are summed, sent over lanes of any kind, and reduced in one order for any order of arrival."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes.meshes import on_planes, until

from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.sparse import worker as lanes_module
from sirtaki.comm.sparse import worker as worker_module
from sirtaki.comm.sparse.plan import GATHER, SparsePath, SparsePlan
from sirtaki.comm.sparse.worker import (
    ALIGNMENT_BYTES,
    Closed,
    RowFormat,
    Rows,
    SparseLanes,
    SparseWork,
    SparseWorker,
    coalesced,
    disjoint,
    merged,
)
from sirtaki.errors import CommError, ConfigError, PlanError


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"path": SparsePath.HOT_COLD}, "hot_rows: .*hot_cold.* found"),
        ({"path": SparsePath.GATHER, "hot_rows": (1,)}, "hot_rows: .*hot_cold.* found"),
        ({"path": SparsePath.HOT_COLD, "hot_rows": (3, 3)}, "ascend"),
        ({"path": SparsePath.HOT_COLD, "hot_rows": (3,), "cold": SparsePath.DENSE}, "found dense"),
        ({"path": SparsePath.BLOCKS, "block_rows": 0}, "block_rows: expected at least 1"),
    ],
)
def test_invalid_rows_are_rejected(given: dict[str, Any], found: str) -> None:
    with pytest.raises(PlanError, match=found):
        SparsePlan(**given)


def test_fingerprints_differ_where_anything_does() -> None:
    plans = [
        *(SparsePlan(path=path) for path in SparsePath if path is not SparsePath.HOT_COLD),
        SparsePlan(path=SparsePath.BLOCKS, block_rows=2),
        SparsePlan(path=SparsePath.HOT_COLD, hot_rows=(1, 2)),
        SparsePlan(path=SparsePath.HOT_COLD, hot_rows=(1, 3)),
        SparsePlan(path=SparsePath.HOT_COLD, hot_rows=(1, 3), cold=SparsePath.OWNER),
    ]
    assert len({plan.fingerprint() for plan in plans}) == len(plans)
    assert plans[-1].describe() == "hot_cold (2 hot rows, the others by owner)"
    assert plans[-4].describe() == "blocks (of 2)"
    assert plans[0].describe() == "gather"


def sparse(indices: list[int], values: list[float], *, rows: int = 9, width: int = 2) -> torch.Tensor:
    spread = torch.tensor(values)[:, None].expand(-1, width)
    return torch.sparse_coo_tensor(torch.tensor([indices]).long(), spread, (rows, width), check_invariants=True)


def test_rows_that_are_there_several_times_are_added_up_in_more_than_halves_and_copied() -> None:
    rows = coalesced(sparse([4, 1, 4, 0], [1.0, 2.0, 3.0, 0.0]))
    assert (rows.indices.tolist(), rows.values[:, 0].tolist()) == ([0, 1, 4], [0.0, 2.0, 4.0])
    gradient = sparse([1, 3], [1.0, 2.0]).coalesce()
    rows = coalesced(gradient)
    gradient.values().mul_(9.0)
    assert rows.values[:, 0].tolist() == [1.0, 2.0]
    flat = torch.sparse_coo_tensor([[5, 5]], torch.tensor([1.0, 2.0]), (9,), check_invariants=True)
    assert coalesced(flat).values.tolist() == [[3.0]]
    many = torch.full((4000, 1), 1.0, dtype=torch.float16)
    gradient = torch.sparse_coo_tensor(torch.zeros(1, 4000).long(), many, (2, 1), check_invariants=True)
    assert coalesced(gradient).values.item() == 4000.0


def test_rows_of_ranks_are_merged_and_put_beside_each_other() -> None:
    one, other = coalesced(sparse([4, 1], [1.0, 2.0])), coalesced(sparse([4, 7], [8.0, 16.0]))
    total = merged([one, other, coalesced(sparse([], []))])
    assert (total.indices.tolist(), total.values[:, 0].tolist()) == ([1, 4, 7], [2.0, 9.0, 16.0])
    apart = disjoint([coalesced(sparse([8, 2], [1.0, 2.0])), one])
    assert (apart.indices.tolist(), apart.values[:, 0].tolist()) == ([1, 2, 4, 8], [2.0, 2.0, 1.0, 1.0])
    parts = [Rows(torch.tensor([0]), torch.full((1, 1), 1.0, dtype=torch.bfloat16))] * 300
    assert merged(parts).values.item() == 300.0


@pytest.mark.parametrize("n_rows", [9, 2**31, 2**31 + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.complex64])
def test_packed_rows_are_unpacked_unchanged(n_rows: int, dtype: torch.dtype) -> None:
    form = RowFormat(n_rows, 3, dtype)
    rows = Rows(torch.tensor([0, 5, n_rows - 1]), torch.arange(9).view(3, 3).to(dtype))
    parcel = form.pack(rows)
    assert len(parcel) == form.parcel_bytes(3)
    assert len(parcel) % ALIGNMENT_BYTES == 0
    found = form.unpack(parcel, 3)
    assert found.indices.tolist() == rows.indices.tolist()
    assert torch.equal(found.values, rows.values)
    assert form.index_dtype.itemsize == (4 if n_rows <= 2**31 else 8)
    assert len(form.unpack(form.pack(rows.of(torch.tensor([], dtype=torch.int64))), 0)) == 0


# ── lanes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

SHARED, GLOO = TransportKind.SHARED_MEMORY, TransportKind.GLOO


def on_lanes(
    size: int, act: Callable[[SparseLanes], Any], *, kind: TransportKind | None, streams: int = 3
) -> list[Any]:
    def run(control: ControlPlane) -> Any:
        lanes = SparseLanes(control, timeout_s=20.0, kind=kind, streams=streams)
        try:
            return act(lanes)
        finally:
            lanes.close()
            control.reclaim()

    return on_planes(size, run)


def parcel(sender: int, receiver: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * sender + receiver)
    return torch.randint(0, 256, (length,), generator=generator, dtype=torch.uint8)


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", [SHARED, GLOO])
@pytest.mark.parametrize("scale", [0, 1, 50_000])
def test_parcels_arrive_as_they_were_sent(kind: TransportKind, scale: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "FIRST_REGION_BYTES", 1 << 16)  # several turns
    lengths = [[scale * (3 * sender + receiver) % 200_003 for receiver in range(3)] for sender in range(3)]

    def act(lanes: SparseLanes) -> None:
        me = lanes.rank
        for _ in range(2):
            arrived = lanes.exchange([parcel(me, other, lengths[me][other]) for other in range(3)], lengths)
            assert all(torch.equal(arrived[other], parcel(other, me, lengths[other][me])) for other in range(3))
            mine = [lengths[rank][0] for rank in range(3)]
            arrived = lanes.all_gather(parcel(me, 0, mine[me]), mine)
            assert all(torch.equal(arrived[other], parcel(other, 0, mine[other])) for other in range(3))
            lanes.grow()
        assert lanes.gather_counts([me, 7]) == [[0, 7], [1, 7], [2, 7]]

    on_lanes(3, act, kind=kind)


@pytest.mark.parametrize("kind", [SHARED, GLOO])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex128])
def test_sums_of_any_size(kind: TransportKind, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "FIRST_REGION_BYTES", 1 << 12)

    def act(lanes: SparseLanes) -> None:
        for numel in (1, 1000, 70_001):
            tensor = (torch.arange(numel) % 7).to(dtype) * (lanes.rank + 1)
            lanes.all_reduce_(tensor)
            assert torch.equal(tensor, (torch.arange(numel) % 7).to(dtype) * 3)
            lanes.grow()

    on_lanes(2, act, kind=kind)


def test_shared_memory_needs_one_stream_and_grows_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "FIRST_REGION_BYTES", 1 << 12)

    def act(lanes: SparseLanes) -> tuple[int, ...]:
        lanes.all_reduce_(torch.zeros(10_000))
        before = lanes._region.tensor.numel()  # type: ignore[union-attr]
        lanes.grow()
        return lanes.streams, lanes.open_streams(4), before, lanes._region.tensor.numel()  # type: ignore[union-attr]

    assert on_lanes(2, act, kind=None) == [(1, 1, 1 << 12, 1 << 16)] * 2
    assert on_lanes(2, lambda lanes: (lanes.streams, lanes.open_streams(4)), kind=GLOO, streams=2) == [(2, 4)] * 2


def test_a_transport_that_there_is_not_is_refused_by_all() -> None:
    with pytest.raises(ConfigError, match=r"no transport for sparse gradients .*requested transport: nccl"):
        on_lanes(2, lambda _: None, kind=TransportKind.NCCL)


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", [SHARED, GLOO])
def test_a_wait_for_missing_ranks_ends_when_lanes_are_stopped(kind: TransportKind) -> None:
    def act(lanes: SparseLanes) -> None:
        if lanes.rank == 0:
            threading.Timer(0.2, lanes.stop).start()
            with pytest.raises(Closed):
                lanes.gather_counts([1])

    on_lanes(2, act, kind=kind)


# ── the worker ────────────────────────────────────────────────────────────────────────────────────────────────────────

FORM = RowFormat(9, 1, torch.float64)


def on_workers(act: Callable[[SparseWorker, ControlPlane], Any]) -> list[Any]:
    def run(control: ControlPlane) -> Any:
        worker = SparseWorker(SparseLanes(control, timeout_s=20.0, kind=None, streams=1), control.failures)
        try:
            return act(worker, control)
        finally:
            worker.close()
            if control.failures.error is None:
                control.reclaim()

    return on_planes(2, run)


def submitted(worker: SparseWorker, name: str, row: int) -> SparseWork:
    work = SparseWork(name, Rows(torch.tensor([row]), torch.ones(1, 1, dtype=torch.float64)), FORM, GATHER)
    worker.submit(work)
    return work


def test_ranks_may_bring_gradients_in_different_orders() -> None:
    def act(worker: SparseWorker, control: ControlPlane) -> None:
        for _ in range(20):
            worker.begin("abc")
            names = "bca" if control.rank else "cab"
            works = {name: submitted(worker, name, "abc".index(name) + control.rank) for name in names}
            for number, name in enumerate("abc"):
                assert works[name].wait(10.0)
                assert works[name].reduced.rows.indices.tolist() == [number, number + 1]
                assert works[name].span_s > 0.0

    on_workers(act)


def test_a_failure_is_reported_with_all_operations_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("out of luck")

    monkeypatch.setattr(worker_module, "reduce_rows", fail)

    def act(worker: SparseWorker, control: ControlPlane) -> None:
        worker.begin("ab")
        works = [submitted(worker, name, 0) for name in "ab"]
        for work in works:
            with pytest.raises(CommError, match=r"failed to reduce the rows of a: .*out of luck"):
                work.wait(10.0)
        until(lambda: control.failures.error is not None)

    with contextlib.suppress(CommError):  # of a rank that closes its control plane after it has heard
        on_workers(act)


def test_closing_ends_a_wait_for_another_rank() -> None:
    def act(worker: SparseWorker, control: ControlPlane) -> None:
        worker.begin("a")
        if control.rank == 0:
            submitted(worker, "a", 0)
            until(lambda: worker._works.empty())

    on_workers(act)
