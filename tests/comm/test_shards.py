"""Gathers of shards and scatters of sums give what one process would give, over every carrier."""

import threading
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from fakes.meshes import on_planes
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.comm.compress import Blockwise, Codec
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.shards import JointGather, JointScatter, Loss, ShardLanes, open_shard_lanes
from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.errors import CommError, MismatchError, PeerLostError, StallError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64]
KINDS = [TransportKind.GLOO, TransportKind.SHARED_MEMORY]


def with_lanes(
    size: int,
    kind: TransportKind,
    act: Callable[[ShardLanes, int], object],
    *,
    timeout_s: float = 20.0,
    local_size: int | None = None,
) -> None:
    """`act` with the lanes and the rank of each rank; with `local_size` of nodes of so many ranks, over both levels."""

    def run(control: ControlPlane) -> None:
        lanes = open_shard_lanes(control, timeout=lambda: timeout_s, kind=None if local_size else kind)
        assert lanes.kind is kind
        assert lanes.peers == (size // local_size if local_size else size) - 1
        act(lanes, control.rank)
        control.barrier()
        lanes.close()

    on_planes(size, run, local_size=local_size)


def drawn(rank: int, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(101 * number + rank)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    return (values * 100).to(dtype) if not dtype.is_floating_point else values.to(dtype)


LEVELS = [*((size, kind, None) for size in (2, 3, 4) for kind in KINDS), (4, TransportKind.GLOO, 2)]
"""Ranks, what carries their shards, and ranks of a node where there are two levels."""


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("size", "kind", "local_size"), [*LEVELS, (6, TransportKind.GLOO, 2), (6, TransportKind.GLOO, 3)]
)
@settings(max_examples=4, deadline=None)
@given(
    operations=st.lists(
        st.tuples(st.booleans(), st.integers(0, 9000), st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=8
    ),
    streams=st.integers(1, 4),
)
def test_concurrent_operations_equal_one_process(
    size: int,
    kind: TransportKind,
    local_size: int | None,
    operations: list[tuple[bool, int, torch.dtype, bool]],
    streams: int,
) -> None:
    def act(lanes: ShardLanes, rank: int) -> None:
        lanes.use(min(streams, lanes.most_streams))
        lanes.reserve(shard_bytes=20_000, whole_bytes=20_000)  # some are larger
        works, found, wanted = [], [], []
        for number, (gathers, n, dtype, in_place) in enumerate(operations):
            if gathers:
                shared = in_place or (number + rank) % 3 == 0  # not all of them
                whole = lanes.gather_memory(size * n, dtype) if shared else torch.zeros(size * n, dtype=dtype)
                shard = drawn(rank, number, n, dtype)
                if in_place:
                    whole[rank * n : (rank + 1) * n] = shard
                    shard = whole[rank * n : (rank + 1) * n]
                works.append(lanes.gather(whole.chunk(size), shard))
                found.append(whole)
                wanted.append(torch.cat([drawn(other, number, n, dtype) for other in range(size)]))
            else:
                memory = lanes.scatter_memory(size * n, dtype) if in_place else torch.empty(size * n, dtype=dtype)
                memory.copy_(drawn(rank, number, size * n, dtype))
                found.append(torch.zeros(n, dtype=dtype))
                works.append(lanes.scatter(memory, found[-1], op=ReduceOp.SUM, scale=1.0))
                exact = torch.float64 if dtype.is_floating_point else dtype
                wholes = [drawn(other, number, size * n, dtype).to(exact) for other in range(size)]
                wanted.append(sum(wholes)[rank * n : (rank + 1) * n].to(dtype))
        for work in reversed(works):
            work.wait()
        for one, other in zip(found, wanted, strict=True):
            # Between nodes halves are rounded once more.
            close = {"rtol": 2e-2, "atol": 0.1} if local_size and one.dtype.itemsize == 2 else {}
            torch.testing.assert_close(one, other, **close)

    with_lanes(size, kind, act, local_size=local_size)


def test_a_gathered_tensor_belongs_to_its_rank_until_it_is_released() -> None:
    def act(lanes: ShardLanes, rank: int) -> None:
        lanes.reserve(shard_bytes=800, whole_bytes=800)

        def gathered(number: int) -> torch.Tensor:
            whole = lanes.gather_memory(200, torch.float64)
            lanes.gather(whole.chunk(2), drawn(rank, number, 100, torch.float64)).wait()
            return whole

        def wanted(number: int) -> torch.Tensor:
            return torch.cat([drawn(other, number, 100, torch.float64) for other in range(2)])

        held = gathered(0)
        if rank == 1:
            del held
        for number in range(1, 20):
            assert torch.equal(gathered(number), wanted(number))
        if rank == 0:
            assert torch.equal(held, wanted(0))

    with_lanes(2, TransportKind.SHARED_MEMORY, act)


@pytest.mark.lengthy
@pytest.mark.parametrize(("size", "kind", "local_size"), LEVELS)
def test_means_and_other_operations(size: int, kind: TransportKind, local_size: int | None) -> None:
    def act(lanes: ShardLanes, rank: int) -> None:
        mean = (size + 1) / 2
        for op, scale, wanted in ((ReduceOp.SUM, 1 / size, mean), (ReduceOp.MAX, 1.0, size), (ReduceOp.MIN, 1.0, 1)):
            part = torch.zeros(3)
            lanes.scatter(torch.full((3 * size,), rank + 1.0), part, op=op, scale=scale).wait()
            assert part.tolist() == pytest.approx([wanted] * 3)

    with_lanes(size, kind, act, local_size=local_size)


@pytest.mark.lengthy
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", [Blockwise(), Blockwise(torch.float8_e4m3fn)], ids=["int8", "fp8"])
@pytest.mark.parametrize(("size", "local_size"), [(2, None), (3, None), (4, 2)])
def test_packed_shards_are_close_and_equal_on_all_ranks(
    size: int, local_size: int | None, codec: Codec, dtype: torch.dtype
) -> None:
    n = 1500
    gathered: dict[int, torch.Tensor] = {}

    def act(lanes: ShardLanes, rank: int) -> None:
        lanes.use(min(2, lanes.most_streams))
        lanes.losses = Loss(), Loss()
        whole = torch.zeros(size * n, dtype=dtype)
        whole[rank * n : (rank + 1) * n] = drawn(rank, 1, n, dtype)  # a shard that lies in its place
        part = torch.zeros(n, dtype=dtype)
        works = [
            lanes.gather(whole.chunk(size), whole[rank * n : (rank + 1) * n], codec=codec),
            lanes.scatter(drawn(rank, 2, size * n, dtype), part, op=ReduceOp.SUM, scale=0.5, codec=codec),
        ]
        for work in reversed(works):
            work.wait()
        gathered[rank] = whole
        total = sum(drawn(other, 2, size * n, dtype).double() for other in range(size))[rank * n : (rank + 1) * n] / 2
        exact = torch.cat([drawn(other, 1, n, dtype) for other in range(size)]).double()
        for found, wanted in ((whole, exact), (part, total)):
            assert float((found.double() - wanted).norm() / wanted.norm()) < 0.03
            assert not torch.equal(found.double(), wanted)
        for loss in lanes.losses:
            assert loss.sent_bytes < loss.whole_bytes * (1.0 if dtype.itemsize == 2 else 0.51)
            assert 0.0 < loss.lost_squares < 1e-3 * loss.squares

    with_lanes(size, TransportKind.GLOO, act, local_size=local_size)
    assert all(torch.equal(gathered[0], each) for each in gathered.values())


def test_unpackable_tensors_are_sent_unchanged_and_non_finite_values_stay_so() -> None:
    def act(lanes: ShardLanes, rank: int) -> None:
        whole, part = torch.zeros(4000), torch.zeros(2000)
        mine = torch.full((2000,), 1.0)
        mine[7] = torch.inf if rank else torch.nan
        lanes.gather(whole.chunk(2), mine, codec=Blockwise()).wait()
        assert not whole[7].isfinite()
        assert not whole[2007].isfinite()
        lanes.scatter(torch.cat([mine, mine]), part, op=ReduceOp.SUM, scale=1.0, codec=Blockwise()).wait()
        assert not part[7].isfinite()
        for n, dtype in ((100, torch.float32), (2000, torch.int64)):
            rows = torch.zeros(2, n, dtype=dtype)
            lanes.gather([*rows], torch.arange(n).to(dtype) + rank, codec=Blockwise()).wait()
            assert torch.equal(rows[1], torch.arange(n).to(dtype) + 1)
        largest = torch.zeros(2000)
        lanes.scatter(torch.full((4000,), rank / 3), largest, op=ReduceOp.MAX, scale=1.0, codec=Blockwise()).wait()
        assert torch.equal(largest, torch.full((2000,), 1 / 3))

    with_lanes(2, TransportKind.GLOO, act)


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("kind", "error"), [(TransportKind.GLOO, StallError), (TransportKind.SHARED_MEMORY, MismatchError)]
)
@pytest.mark.parametrize("other", ["size", "label of a gather", "label of a scatter", "operation"])
def test_ranks_that_submit_different_operations_get_an_error(
    kind: TransportKind, error: type[CommError], other: str
) -> None:
    def act(lanes: ShardLanes, rank: int) -> None:
        numel, label = 100 + rank * (other == "size"), rank * other.startswith("label")
        lanes.reserve(shard_bytes=4000, whole_bytes=8000)
        with closing(lanes):
            if other == "label of a scatter" or (other == "operation" and rank == 1):
                lanes.scatter(torch.zeros(2, numel), torch.zeros(numel), op=ReduceOp.SUM, scale=1.0, label=label).wait()
            else:
                lanes.gather([*torch.zeros(2, numel)], torch.zeros(numel), label=label).wait()

    with pytest.raises((StallError, PeerLostError) if other == "operation" or kind is TransportKind.GLOO else error):
        with_lanes(2, kind, act, timeout_s=1.0)


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("kind", "error"), [(TransportKind.GLOO, StallError), (TransportKind.SHARED_MEMORY, MismatchError)]
)
@pytest.mark.parametrize("scatters", [False, True])
def test_ranks_that_coalesce_different_tensors_of_equal_sizes_get_an_error(
    kind: TransportKind, error: type[CommError], scatters: bool
) -> None:
    def act(lanes: ShardLanes, rank: int) -> None:
        lanes.reserve(shard_bytes=4000, whole_bytes=8000)
        with closing(lanes):
            scatter = JointScatter(lanes, torch.float32, op=ReduceOp.SUM, scale=1.0, codec=None)
            gather = JointGather(lanes, torch.float32, codec=None)
            for label in (1, 2 + rank):
                scatter.add(torch.zeros(2, 100), torch.zeros(100), label=label)
                gather.add([*torch.zeros(2, 100)], torch.zeros(100), label=label)
            (scatter if scatters else gather).wait()

    with pytest.raises((StallError, PeerLostError) if kind is TransportKind.GLOO else error):
        with_lanes(2, kind, act, timeout_s=1.0)


@pytest.mark.lengthy
def test_no_thread_keeps_waiting_when_lanes_of_a_failed_job_are_closed() -> None:
    before = set(threading.enumerate())

    def act(lanes: ShardLanes, rank: int) -> None:
        with closing(lanes):
            lanes.gather([*torch.zeros(2, 100)], torch.zeros(100), label=rank).wait()  # neither hears of the other's

    with pytest.raises(CommError):
        with_lanes(2, TransportKind.GLOO, act, timeout_s=0.5)
    assert not [each.name for each in set(threading.enumerate()) - before if each.name == "sirtaki-gathers"]


@pytest.mark.lengthy
@pytest.mark.parametrize(("size", "kind", "local_size"), LEVELS)
def test_waiting_for_a_rank_that_has_exited_is_an_error(size: int, kind: TransportKind, local_size: int | None) -> None:
    def act(lanes: ShardLanes, rank: int) -> None:
        if rank == 1:
            raise CommError("gone")
        with pytest.raises(CommError):
            lanes.gather([*torch.zeros(size, 100)], torch.zeros(100)).wait()

    with pytest.raises(CommError, match="gone"):
        with_lanes(size, kind, act, local_size=local_size)
