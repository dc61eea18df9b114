"""Process groups of the backend "sirtaki", against one process and against Gloo. Started by test_process_group.py."""

import contextlib
import itertools
import os
import socket
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from conformance.training import main
from torch._C._distributed_c10d import _make_nccl_premul_sum

import sirtaki.torch.distributed  # noqa: F401
from sirtaki.torch.distributed.process_group import KEEPS_WORKS, LANE_DTYPES, LARGE_BYTES, SirtakiProcessGroup

Op = dist.ReduceOp

NUMELS = (0, 1, 5, LARGE_BYTES // 8 - 1, LARGE_BYTES // 2 + 3, 1_300_001)
"""Empty, small, on both sides of what takes the lanes, and more than the window of slots holds of no dtype."""

# Their names from torch 2.13 on, and before.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def me() -> int:
    return dist.get_rank()


def ranks() -> range:
    return range(dist.get_world_size())


def data(rank: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Small whole numbers, so that sums of halves are exact."""
    generator = torch.Generator().manual_seed(1009 * seed + rank)
    return torch.randint(0 if dtype is torch.uint8 else -9, 10, (numel,), generator=generator).to(dtype)


def summed(numel: int, seed: int = 0) -> torch.Tensor:
    return sum(data(rank, numel, torch.float64, seed) for rank in ranks())


_gloo: dist.ProcessGroup | None = None


def gloo() -> dist.ProcessGroup:
    """Collective at the first call: the same ranks over plain Gloo."""
    global _gloo
    _gloo = _gloo or dist.new_group(backend="gloo")
    return _gloo


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


def every_operation_gives_what_one_process_gives() -> None:
    for numel in (5, 70_001):
        all_of_them = torch.stack([data(rank, numel, torch.int64) for rank in ranks()])
        wanted = {
            Op.MIN: all_of_them.amin(0),
            Op.MAX: all_of_them.amax(0),
            Op.PRODUCT: all_of_them.prod(0),
            Op.BAND: _bitwise(all_of_them, torch.bitwise_and),
            Op.BOR: _bitwise(all_of_them, torch.bitwise_or),
            Op.BXOR: _bitwise(all_of_them, torch.bitwise_xor),
            Op.AVG: torch.div(all_of_them.sum(0), len(ranks()), rounding_mode="trunc"),
        }
        for op, result in wanted.items():
            dist.all_reduce(tensor := all_of_them[me()].clone(), op=op)
            assert torch.equal(tensor, result), (op, numel)
            if op not in (Op.BAND, Op.BOR, Op.BXOR, Op.AVG):
                dist.all_reduce(tensor := all_of_them[me()].double(), op=op)
                assert torch.equal(tensor, result.double()), (op, numel)


def _bitwise(rows: torch.Tensor, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    result = rows[0]
    for row in rows[1:]:
        result = combine(result, row)
    return result


def averages_and_scaled_sums_are_those_of_one_process() -> None:
    for numel in (5, 70_001):
        dist.all_reduce(tensor := data(me(), numel, torch.float64), op=Op.AVG)
        torch.testing.assert_close(tensor, summed(numel) / len(ranks()))
        factor = 0.5 * (me() + 1)  # each rank's own
        dist.all_reduce(tensor := data(me(), numel, torch.float64), op=_make_nccl_premul_sum(factor))
        wanted = sum(0.5 * (rank + 1) * data(rank, numel, torch.float64) for rank in ranks())
        torch.testing.assert_close(tensor, wanted)
        dist.all_reduce(tensor := data(me(), numel, torch.float64), op=_make_nccl_premul_sum(torch.tensor([2.0])))
        torch.testing.assert_close(tensor, 2 * summed(numel))


def tensors_need_not_be_contiguous() -> None:
    """In the order of their indices, though strides may differ from rank to rank; Gloo adds up memory instead."""
    for rows in (3, 301):
        whole = data(me(), rows * 400).view(rows, 400)
        wanted = summed(rows * 400).view(rows, 400).float()
        for view, result in (
            (whole.clone().t(), wanted.t()),
            (whole.clone()[:, ::2], wanted[:, ::2]),
            (whole.clone()[1:, 7:300], wanted[1:, 7:300]),
            (whole.t().contiguous().t() if me() % 2 else whole.clone(), wanted),
            (whole.clone()[:, 0].expand(5, rows).contiguous().t(), wanted[:, 0].expand(5, rows).t()),
        ):
            dist.all_reduce(view)
            assert torch.equal(view, result)


def tensors_that_are_sent_on_need_not_be_contiguous() -> None:
    """Gloo alone writes the memory between their elements."""
    for rows in (3, 301):
        whole = data(me(), rows * 400).view(rows, 400)
        for view in (whole.clone()[:, ::2], whole.clone().t(), whole.clone()[1:, 7:300]):
            mine = view.clone(memory_format=torch.contiguous_format)
            gathered = [torch.empty_like(mine) for _ in ranks()]
            dist.all_gather(gathered, mine)
            base = view._base.clone()
            dist.broadcast(view, src=len(ranks()) - 1)
            assert torch.equal(view, gathered[-1])
            view.copy_(mine)
            assert torch.equal(view._base, base)
            dist.reduce(view, dst=0)
            if me() == 0:
                assert torch.equal(view, sum(gathered))
            view.copy_(mine)
            parts = [(view + rank).t().contiguous().t() for rank in ranks()] if me() == 0 else None
            dist.scatter(view, parts, src=0)
            assert torch.equal(view, gathered[0] + me())


def parameters_are_reduced_without_a_record() -> None:
    """Also by the group's own thread, which records gradients unless it is told otherwise."""
    for shape in ((3, 3, 3), (300, 301)):
        numel = torch.Size(shape).numel()
        for asynchronous in (False, True):
            parameter = torch.nn.Parameter(data(me(), numel).view(shape))
            with torch.no_grad():
                work = dist.all_reduce(parameter, async_op=asynchronous)
            if asynchronous:
                (result,) = work.get_future().wait()
                assert result.shape == parameter.shape
            assert torch.equal(parameter.double().view(-1), summed(numel))
            parts = torch.nn.Parameter(data(me(), len(ranks()) * numel))
            part = torch.nn.Parameter(torch.empty(numel))
            with torch.no_grad():
                work = reduce_scatter_single(part, parts, async_op=asynchronous)
            if asynchronous:
                work.get_future().wait()
            assert torch.equal(part.double(), summed(len(ranks()) * numel)[me() * numel :][:numel])


def what_inference_mode_has_made_is_written_by_any_thread() -> None:
    numels = (5, 140_001) if KEEPS_WORKS else (140_001,)  # Gloo itself writes none of these in PyTorch 2.4
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


def complex_numbers_are_added() -> None:
    for numel in (5, 70_001):
        tensor = torch.complex(data(me(), numel), data(me(), numel, seed=1))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.complex(summed(numel), summed(numel, 1)).to(torch.complex64))


def many_may_be_under_way_and_be_waited_for_in_any_order() -> None:
    sizes = [70_000 + 13 * number if number % 3 else 11 for number in range(24)]
    tensors = [data(me(), size, seed=number) for number, size in enumerate(sizes)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number in reversed(range(len(works))):
        works[number].wait()
        assert works[number].is_completed()
        assert works[number].is_success()
        assert torch.equal(tensors[number].double(), summed(sizes[number], number))


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
        told = all_gather_single(whole, data(me(), numel), async_op=True).get_future().wait()
        parts = [(part.data_ptr(), part.shape) for part in whole.chunk(len(ranks()))]
        assert [(part.data_ptr(), part.shape) for part in told] == parts  # as with Gloo


def several_tensors_travel_as_one() -> None:
    for numel in (5, 50_001):
        tensors = [data(me(), numel + number, seed=number) for number in range(3)] + [data(me(), 12).view(3, 4).t()]
        functional_group = dist.group.WORLD
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = Op.SUM
        functional_group.allreduce_coalesced(tensors, options).wait()
        for number in range(3):
            assert torch.equal(tensors[number].double(), summed(numel + number, number))
        assert torch.equal(tensors[3].double(), summed(12).view(3, 4).t())


def compiled_code_reaches_the_same_operations() -> None:
    """What torch.compile and DTensor call is C++, which looks the group up by its name."""
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


def sums_are_scattered() -> None:
    for dtype, numel, op in itertools.product((torch.float32, torch.int64), (0, 3, 40_003), (Op.SUM, Op.AVG, Op.MAX)):
        inputs = [torch.stack([data(rank, numel, dtype, part) for part in ranks()]) for rank in ranks()]
        stacked = torch.stack(inputs)[:, me()]
        if op == Op.MAX:
            wanted = stacked.amax(0)
        elif op == Op.AVG:
            wanted = (stacked.double().sum(0) / len(ranks())).trunc() if dtype is torch.int64 else stacked.mean(0)
        else:
            wanted = stacked.sum(0)
        output, mine = torch.empty(numel, dtype=dtype), inputs[me()].clone()
        reduce_scatter_single(output, mine.view(-1), op=op)
        torch.testing.assert_close(output, wanted.to(dtype))
        assert torch.equal(mine, inputs[me()])  # which is left as it is
        output = torch.empty(numel, dtype=dtype)
        dist.reduce_scatter(output, list(mine), op=op)
        torch.testing.assert_close(output, wanted.to(dtype))


def parts_that_are_scattered_may_differ_in_size() -> None:
    for least in (2, 40_000):
        sizes = [least + 7 * rank for rank in ranks()]
        output = torch.empty(2, sizes[me()]).t()
        parts = [data(me(), 2 * size, seed=rank).view(size, 2) for rank, size in enumerate(sizes)]
        dist.reduce_scatter(output, parts)
        assert torch.equal(output.double(), summed(2 * sizes[me()], me()).view(-1, 2))


def tensors_are_gathered_in_every_type_size_and_form() -> None:
    """One after the other or as a list, contiguous or not, from where they belong or elsewhere, awaited or not."""
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
    """On all ranks in one order, and awaited in another one."""
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
    assert followed == [True] * len(futures)  # as with Gloo, whose works end after that
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
            assert "does not give" in str(err), err
        else:
            raise AssertionError("it was not refused")
        try:
            all_gather_single(torch.empty(numel * len(ranks()) + 1), torch.empty(numel))
        except (RuntimeError, ValueError):
            pass
        else:
            raise AssertionError("it was not refused")


def everything_else_gives_what_gloo_gives() -> None:
    size = len(ranks())
    group, peer = dist.group.WORLD, gloo()
    for numel in (1, 70_001):

        def both(act: Callable[[dist.ProcessGroup], list[torch.Tensor]], what: str, numel: int = numel) -> None:
            for ours, theirs in zip(act(group), act(peer), strict=True):
                assert torch.equal(ours, theirs), (what, numel)

        mine = data(me(), numel)

        def broadcast(group: dist.ProcessGroup, mine: torch.Tensor = mine) -> list[torch.Tensor]:
            dist.broadcast(tensor := mine.clone(), size - 1, group=group)
            return [tensor]

        def all_gather(group: dist.ProcessGroup, mine: torch.Tensor = mine) -> list[torch.Tensor]:
            dist.all_gather(found := [torch.empty_like(mine) for _ in ranks()], mine, group=group)
            all_gather_single(whole := torch.empty(size * mine.numel()), mine, group=group)
            return [*found, whole]

        def gather(group: dist.ProcessGroup, mine: torch.Tensor = mine) -> list[torch.Tensor]:
            found = [torch.empty_like(mine) for _ in ranks()] if me() == 0 else None
            dist.gather(mine, found, dst=0, group=group)
            return found or []

        def scatter(group: dist.ProcessGroup, mine: torch.Tensor = mine) -> list[torch.Tensor]:
            parts = [mine + rank for rank in ranks()] if me() == 0 else None
            dist.scatter(tensor := torch.empty_like(mine), parts, src=0, group=group)
            return [tensor]

        def reduce(group: dist.ProcessGroup, mine: torch.Tensor = mine) -> list[torch.Tensor]:
            dist.reduce(tensor := mine.clone(), dst=0, group=group)
            return [tensor] if me() == 0 else []

        def all_to_all(group: dist.ProcessGroup, mine: torch.Tensor = mine) -> list[torch.Tensor]:
            sent = torch.cat([mine + rank for rank in ranks()])
            dist.all_to_all_single(received := torch.empty_like(sent), sent, group=group)
            return [received]

        def send(group: dist.ProcessGroup, mine: torch.Tensor = mine) -> list[torch.Tensor]:
            if size == 1:
                return []
            work = dist.isend(mine, (me() + 1) % size, group=group, tag=3)
            source = dist.recv(received := torch.empty_like(mine), None, group=group, tag=3)
            work.wait()
            assert source == (me() - 1) % size
            return [received]

        for act in (broadcast, all_gather, gather, scatter, reduce, all_to_all, send):
            both(act, act.__name__)


def objects_and_barriers_pass() -> None:
    found: list[object] = [None] * len(ranks())
    dist.all_gather_object(found, {"rank": me(), "text": "x" * 100 * me()})
    assert found == [{"rank": rank, "text": "x" * 100 * rank} for rank in ranks()]
    dist.broadcast_object_list(told := [me(), "a"], src=len(ranks()) - 1)
    assert told == [len(ranks()) - 1, "a"]
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
    """Each ends while a thread of its Gloo may still free the tensor of the last operation."""
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

    wrong: list[int] = []

    def use(group: dist.ProcessGroup) -> None:
        for number in range(20):
            dist.all_reduce(tensor := mine.clone(), group=group)
            if not torch.equal(tensor.double(), total):
                wrong.append(number)

    threads = [threading.Thread(target=use, args=[group]) for group in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    dist.destroy_process_group(first)
    dist.destroy_process_group(second)


def waiting_may_be_limited() -> None:
    if len(ranks()) == 1:
        return
    group = dist.new_group()
    dist.all_reduce(torch.ones(70_000), group=group)  # the lanes are open
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


def _listeners() -> dict[int, tuple[str, int]]:
    """Where this process listens, by descriptor."""
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


CASES = (
    the_group_says_what_it_is,
    groups_come_and_go,
    sums_are_those_of_one_process_in_every_type_and_size,
    random_floats_are_summed_as_exactly_as_their_type_allows,
    every_operation_gives_what_one_process_gives,
    averages_and_scaled_sums_are_those_of_one_process,
    tensors_need_not_be_contiguous,
    tensors_that_are_sent_on_need_not_be_contiguous,
    parameters_are_reduced_without_a_record,
    what_inference_mode_has_made_is_written_by_any_thread,
    complex_numbers_are_added,
    many_may_be_under_way_and_be_waited_for_in_any_order,
    works_that_nobody_waits_for_end_too,
    futures_hold_the_tensors,
    several_tensors_travel_as_one,
    compiled_code_reaches_the_same_operations,
    sums_are_scattered,
    parts_that_are_scattered_may_differ_in_size,
    tensors_are_gathered_in_every_type_size_and_form,
    many_gathers_and_sums_may_be_under_way,
    gathers_may_be_coalesced,
    sizes_that_do_not_fit_are_refused,
    everything_else_gives_what_gloo_gives,
    objects_and_barriers_pass,
    subgroups_count_their_own_ranks,
    groups_do_not_wait_for_each_other,
    waiting_may_be_limited,
    strangers_are_not_let_in,
)


if __name__ == "__main__":
    dist.init_process_group("sirtaki")
    main(CASES)
    dist.destroy_process_group()
