"""Process groups of the backend "sirtaki", compared with one process. Started by test_process_group.py.

`torch_backend_reference.py` compares operations on tensors of every layout, awaited in every way, with Gloo.
"""

import contextlib
import importlib.util
import itertools
import json
import os
import socket
import threading
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from conformance.training import main
from fakes.meshes import at_once
from rank_jobs import cases
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

import sirtaki.torch.distributed  # noqa: F401
from sirtaki.torch.distributed.process_group import KEEPS_WORKS, LANE_DTYPES, LARGE_BYTES, SirtakiProcessGroup

if importlib.util.find_spec("torch.distributed.tensor.debug"):
    from torch.distributed.tensor.debug import CommDebugMode
else:  # before torch 2.5
    from torch.distributed._tensor.debug import CommDebugMode

Op = dist.ReduceOp

NUMELS = (0, 1, 5, LARGE_BYTES // 8 - 1, LARGE_BYTES // 2 + 3, 1_300_001)
"""Numbers of elements: empty, small, on both sides of the smallest size for lanes, and more than the slots hold."""

# Names from torch 2.13 on, and before.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def me() -> int:
    return dist.get_rank()


def ranks() -> range:
    return range(dist.get_world_size())


def data(rank: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return small whole numbers, so that averages of two are exact."""
    generator = torch.Generator().manual_seed(1009 * seed + rank)
    return torch.randint(0 if dtype is torch.uint8 else -9, 10, (numel,), generator=generator).to(dtype)


def summed(numel: int, seed: int = 0) -> torch.Tensor:
    return sum(data(rank, numel, torch.float64, seed) for rank in ranks())


_gloo: dist.ProcessGroup | None = None


def sums_are_those_of_one_process_in_every_type_and_size() -> None:
    for dtype, numel in itertools.product(sorted(LANE_DTYPES, key=str), NUMELS):
        kind = torch.int8 if dtype is torch.uint8 else dtype
        tensor = data(me(), numel, torch.float64).abs().to(dtype) if kind is torch.int8 else data(me(), numel, dtype)
        wanted = (
            sum(data(rank, numel, torch.float64).abs() for rank in ranks()) if kind is torch.int8 else summed(numel)
        )
        dist.all_reduce(tensor)
        assert torch.equal(tensor.double(), wanted), (dtype, numel)


def random_floats_are_summed_as_exactly_as_their_type_allows() -> None:
    for dtype, tolerance in (
        (torch.float64, 1e-14),
        (torch.float32, 1e-6),
        (torch.float16, 4e-3),
        (torch.bfloat16, 4e-2),
    ):
        values = [torch.randn(300_001, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in ranks()]
        dist.all_reduce(tensor := values[me()].clone())
        wanted = sum(value.double() for value in values)
        torch.testing.assert_close(tensor.double(), wanted, rtol=tolerance, atol=tolerance)


def what_inference_mode_has_made_is_written_by_any_thread() -> None:
    numels = (5, 140_001) if KEEPS_WORKS else (140_001,)  # PyTorch 2.4's Gloo writes none of these
    for numel, inside, asynchronous in itertools.product(numels, (True, False), (True, False)):
        wanted = summed(numel)
        with torch.inference_mode():
            mine = data(me(), numel)
            total, spread = mine.clone(), mine.repeat_interleave(2)[::2]
            rows, part = [torch.empty_like(mine) for _ in ranks()], torch.empty_like(mine)
        with torch.inference_mode(inside):
            works = [
                dist.all_reduce(total, async_op=True),
                dist.all_reduce(spread, op=Op.AVG, async_op=True),
                dist.all_gather(rows, mine, async_op=True),
                dist.reduce_scatter(part, [mine] * len(ranks()), async_op=True),
            ]
            for work in works:
                if asynchronous:
                    work.get_future().wait()
                work.wait()
        assert torch.equal(total.double(), wanted)
        torch.testing.assert_close(spread.double(), wanted / len(ranks()))
        assert torch.equal(rows[-1], data(len(ranks()) - 1, numel))
        assert torch.equal(part.double(), wanted)


def works_that_nobody_waits_for_end_too() -> None:
    tensor = data(me(), 600_000)
    work = dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    later = threading.Event()
    while not work.is_completed():
        later.wait(0.001)
    assert torch.equal(tensor.double(), summed(600_000))


def futures_hold_the_tensors() -> None:
    for numel in (5, 70_001):
        tensor = data(me(), numel)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        doubled = future.then(lambda ended: 2 * ended.value()[0])
        assert torch.equal(doubled.wait().double(), 2 * summed(numel))
        assert future.wait()[0].data_ptr() == tensor.data_ptr()
        whole = torch.zeros(len(ranks()) * numel)
        returned = all_gather_single(whole, data(me(), numel), async_op=True).get_future().wait()
        parts = [(part.data_ptr(), part.shape) for part in whole.chunk(len(ranks()))]
        assert [(part.data_ptr(), part.shape) for part in returned] == parts  # as with Gloo


def compiled_code_reaches_the_same_operations() -> None:
    """torch.compile and DTensor call C++ functions, which look up the group by name."""
    group = dist.group.WORLD
    for numel in (6 * len(ranks()), 70_000 * len(ranks())):
        mine, total = data(me(), numel), summed(numel).float()
        part = slice(numel // len(ranks()) * me(), numel // len(ranks()) * (me() + 1))
        assert torch.equal(functional.all_reduce(mine, "sum", group).wait(), total)
        found = functional.all_reduce_coalesced([mine, 2 * mine], "sum", group)
        assert all(torch.equal(one.wait(), factor * total) for one, factor in zip(found, (1, 2), strict=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of names before torch 2.13
            scattered = functional.reduce_scatter_tensor(mine, "sum", 0, group)
            both = functional.reduce_scatter_tensor_coalesced([mine, 2 * mine], "sum", [0, 0], group)
            gathered = functional.all_gather_tensor(mine[:5], 0, group)
        for one, factor in ((scattered, 1), (both[0], 1), (both[1], 2)):
            assert torch.equal(one.wait(), factor * total[part])
        assert torch.equal(gathered.wait(), torch.cat([data(rank, numel)[:5] for rank in ranks()]))


def tensors_are_gathered_in_every_type_size_and_form() -> None:
    """Concatenated or in lists, contiguous or not, in place or not, asynchronous or not."""
    size = len(ranks())
    for dtype, numel in itertools.product(sorted((*LANE_DTYPES, torch.bool), key=str), NUMELS):
        rows = [data(rank, numel, torch.float64).abs().to(dtype) for rank in ranks()]
        whole = torch.zeros(size * numel, dtype=dtype)
        mine = whole[me() * numel : (me() + 1) * numel]
        mine.copy_(rows[me()])
        listed = [torch.zeros(numel, 2, dtype=dtype)[:, 0] if rank % 2 else torch.zeros_like(mine) for rank in ranks()]
        strided = torch.zeros(2 * numel, dtype=dtype)[::2]
        strided.copy_(rows[me()])
        works = [
            all_gather_single(whole, mine, async_op=True),
            dist.all_gather(listed, strided, async_op=True),
        ]
        for work in reversed(works):
            work.wait()
        assert torch.equal(whole, torch.cat(rows)), (dtype, numel)
        assert all(map(torch.equal, listed, rows)), (dtype, numel)


def many_gathers_and_sums_may_be_under_way() -> None:
    """Launch operations in the same order on all ranks, and wait in another one."""
    numels = [70_000 + 13 * number if number % 3 else 11 for number in range(16)]
    whole = [torch.zeros(len(ranks()) * numel) for numel in numels]
    sums, works = [data(me(), numel, seed=number) for number, numel in enumerate(numels)], []
    for number, numel in enumerate(numels):
        works.append(all_gather_single(whole[number], data(me(), numel, seed=number), async_op=True))
        works.append(dist.all_reduce(sums[number], async_op=True))
    futures, followed = [work.get_future() for work in works[::4]], []
    for future in futures:
        future.then(lambda ended: followed.append(ended.done()))
    for work in reversed(works):
        work.wait()
    assert all(future.done() for future in futures)
    assert followed == [True] * len(futures)  # like Gloo's, whose works complete afterwards
    for number, numel in enumerate(numels):
        for rank in ranks():
            assert torch.equal(whole[number].chunk(len(ranks()))[rank], data(rank, numel, seed=number))
        assert torch.equal(sums[number].double(), summed(numel, number))


def gathers_may_be_coalesced() -> None:
    group, numels = dist.group.WORLD, (3, 40_003, 0, 1_300_001)
    outputs = [torch.zeros(len(ranks()) * numel) for numel in numels]
    gather = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
    gather(outputs, [data(me(), numel) for numel in numels]).wait()
    for output, numel in zip(outputs, numels, strict=True):
        assert torch.equal(output, torch.cat([data(rank, numel) for rank in ranks()]))


def sizes_that_do_not_fit_are_refused() -> None:
    for numel in (3, 90_000):
        try:
            dist.group.WORLD._reduce_scatter_base(torch.empty(numel), torch.empty(numel * len(ranks()) + 1))
        except ValueError as err:
            assert "must have the" in str(err), err
        else:
            raise AssertionError("it was not refused")
        try:
            all_gather_single(torch.empty(numel * len(ranks()) + 1), torch.empty(numel))
        except (RuntimeError, ValueError):
            pass
        else:
            raise AssertionError("it was not refused")


def what_gloo_refuses_is_refused() -> None:
    part = torch.zeros(0, 2, dtype=torch.complex64)  # PyTorch 2.13's work does not know that it has failed
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.BOR
    try:
        dist.group.WORLD._reduce_scatter_base(part, part.clone(), options).wait()
    except (RuntimeError, ValueError):
        return
    raise AssertionError("there is no bitwise or of complex numbers")


def a_message_may_come_from_anybody() -> None:
    if len(ranks()) == 1:
        return
    after, before = (me() + 1) % len(ranks()), (me() - 1) % len(ranks())
    for numel in (1, 70_001):
        work = dist.isend(data(me(), numel), after, tag=3)
        assert dist.recv(received := torch.empty(numel), None, tag=3) == before
        work.wait()
        assert torch.equal(received, data(before, numel))


def objects_and_barriers_pass() -> None:
    found: list[object] = [None] * len(ranks())
    dist.all_gather_object(found, {"rank": me(), "text": "x" * 100 * me()})
    assert found == [{"rank": rank, "text": "x" * 100 * rank} for rank in ranks()]
    dist.broadcast_object_list(returned := [me(), "a"], src=len(ranks()) - 1)
    assert returned == [len(ranks()) - 1, "a"]
    dist.barrier()
    dist.group.WORLD.monitored_barrier(timedelta(seconds=30))


def the_group_says_what_it_is() -> None:
    group = dist.group.WORLD
    assert isinstance(group, SirtakiProcessGroup)
    assert (dist.get_backend(), group.name(), group.rank(), group.size()) == ("sirtaki", "sirtaki", me(), len(ranks()))
    by_device = dist.new_group(backend="cpu:sirtaki,cuda:sirtaki")
    assert isinstance(by_device, SirtakiProcessGroup)
    dist.all_reduce(tensor := torch.ones(3), group=by_device)
    assert tensor[0] == len(ranks())
    dist.destroy_process_group(by_device)


def groups_come_and_go() -> None:
    """Each group ends while a thread of its Gloo may still free the last operation's tensor."""
    for _ in range(40):
        group = dist.new_group()
        dist.all_reduce(tensor := torch.ones(3), group=group)
        assert tensor[0] == len(ranks())
        del tensor
        dist.destroy_process_group(group)
        del group


def subgroups_count_their_own_ranks() -> None:
    odd = [rank for rank in ranks() if rank % 2]
    groups = [dist.new_group(members) for members in (odd, [0], list(ranks())[::-1]) if members]
    for group in groups:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            continue
        members = dist.get_process_group_ranks(group)
        for numel in (5, 70_001):
            dist.all_reduce(tensor := data(me(), numel), group=group)
            wanted = sum(data(rank, numel, torch.float64) for rank in members)
            assert torch.equal(tensor.double(), wanted), members
            dist.all_gather(rows := [torch.empty(numel) for _ in members], data(me(), numel), group=group)
            assert all(torch.equal(row, data(rank, numel)) for row, rank in zip(rows, members, strict=True)), members
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def groups_do_not_wait_for_each_other() -> None:
    """Ranks may use two groups in different orders, and from two threads."""
    first, second = dist.new_group(), dist.new_group()
    mine, total = data(me(), 200_000), summed(200_000)
    order = (first, second) if me() % 2 else (second, first)
    tensors = [mine.clone() for _ in order]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, order, strict=True)]
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        assert torch.equal(tensor.double(), total)

    def use(group: dist.ProcessGroup) -> None:
        for _ in range(20):
            dist.all_reduce(tensor := mine.clone(), group=group)
            assert torch.equal(tensor.double(), total)

    at_once(use, order)
    dist.destroy_process_group(first)
    dist.destroy_process_group(second)


def waiting_may_be_limited() -> None:
    if len(ranks()) == 1:
        return
    group = dist.new_group()
    dist.all_reduce(torch.ones(70_000), group=group)  # opens the lanes
    dist.barrier()
    if me() == 0:
        work = dist.all_reduce(tensor := torch.ones(70_000), group=group, async_op=True)
        try:
            work.wait(timedelta(seconds=0.1))
        except RuntimeError as err:
            assert "did not end within 0.1 s" in str(err), err
        else:
            raise AssertionError("it did not wait for the others")
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        dist.all_reduce(tensor := torch.ones(70_000), group=group)
    assert tensor[0] == len(ranks())


def timeouts_that_torch_changes_hold_from_the_next_wait_on() -> None:
    if len(ranks()) == 1:
        return

    def late(group: dist.ProcessGroup, numel: int, *, limit_s: float, late_s: float) -> str:
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s), group)
        if me() > 0:
            time.sleep(late_s)
        try:
            dist.all_reduce(torch.ones(numel), group=group)
        except RuntimeError as err:
            return type(err).__name__
        return "done"

    for opened in (True, False):
        group = dist.new_group()
        if opened:
            dist.all_reduce(torch.ones(70_000), group=group)
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), group)
            assert late(group, 70_000, limit_s=60.0, late_s=1.0) == "done"
        found = late(group, 70_000, limit_s=0.5, late_s=1.5)
        assert me() > 0 or found == "StallError", found  # peers may detect what rank 0 has sent
        dist.barrier()


def dispatch_modes_and_the_profiler_see_collectives() -> None:
    """On rank 0 only. Its operations stay compatible with its peers'."""
    seen, profiled = CommDebugMode(), profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    with contextlib.ExitStack() as watched:
        if me() == 0:
            watched.enter_context(profiled)
            watched.enter_context(seen)
        for numel in (3, 70_000):
            dist.all_reduce(total := torch.full((numel,), 1.0 + me()))
            all_gather_single(whole := torch.empty(len(ranks()) * numel), torch.full((numel,), 1.0 * me()))
            reduce_scatter_single(part := torch.empty(numel), torch.ones(len(ranks()) * numel), async_op=True).wait()
            dist.broadcast(returned := torch.full((numel,), 1.0 + me()), 0)
            functional.wait_tensor(functional.all_reduce(torch.ones(numel), "sum", dist.group.WORLD))
            assert total.eq(sum(1.0 + rank for rank in ranks())).all()
            assert whole.view(len(ranks()), -1).eq(torch.tensor(list(map(float, ranks()))).view(-1, 1)).all()
            assert part.eq(len(ranks())).all()
            assert returned.eq(1.0).all()
    if me() > 0:
        return
    c10d = torch.ops.c10d
    counts = seen.get_comm_counts()
    for op in (c10d.allreduce_, c10d._allgather_base_, c10d._reduce_scatter_base_, c10d.broadcast_):
        assert counts[op] == 2, counts
    events = [(event.name, event.input_shapes) for event in profiled.events() or []]
    assert ("sirtaki:allreduce", [[70_000]]) in events
    assert any(name == "c10d::allreduce_" for name, _ in events)
    assert [name for name, _ in events].count("sirtaki:allreduce") == 4


def large_tensors_are_in_the_flight_recorder_where_it_is_asked_for() -> None:
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None or len(ranks()) == 1:
        return
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    group = dist.new_group()
    del os.environ["TORCH_FR_BUFFER_SIZE"]
    dist.all_reduce(tensor := torch.ones(70_001), group=group)
    all_gather_single(torch.empty(len(ranks()) * 300_001), torch.ones(300_001), group=group)
    assert tensor.eq(len(ranks())).all()
    entries = {entry["process_group"][1]: entry["input_sizes"] for entry in json.loads(dump()).get("entries", ())}
    for collective, numel in (("all_reduce", 70_001), ("all_gather", 300_001)):
        assert entries[f"{collective} by sirtaki between {len(ranks())} ranks"] == [[numel]], entries


def fake_tensors_are_sent_to_nobody() -> None:
    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"):
        return  # before torch 2.5, backends do not reduce fake tensors
    with FakeTensorMode():
        dist.all_reduce(tensor := torch.empty(70_000))
    assert tensor.shape == (70_000,)


def _listeners() -> dict[int, tuple[str, int]]:
    """Return the addresses at which this process listens, by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as there:
            if there.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[int(name)] = there.getsockname()[:2]
    return found


def strangers_are_not_let_in() -> None:
    before = _listeners()
    group = dist.new_group(backend="sirtaki")
    dist.barrier()
    opened = {number: place for number, place in _listeners().items() if number not in before}
    assert len(ranks()) == 1 or opened
    for place in opened.values():
        try:
            socket.create_connection(place, timeout=0.3).close()
        except OSError:
            continue
        raise AssertionError(f"whoever connects to {place} is let in")
    dist.all_reduce(tensor := torch.ones(9), group=group)
    assert tensor[0] == len(ranks())


CASES = cases(globals())


if __name__ == "__main__":
    dist.init_process_group("sirtaki")
    main(CASES)
    dist.destroy_process_group()
