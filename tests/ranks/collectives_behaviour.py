"""Gradients, process sets, join, names and objects, case by case. Started by test_collectives.py."""

import warnings

import torch
from conformance.training import main
from rank_jobs import cases

import sirtaki.torch as hvd


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────


def the_gradient_of_an_all_reduce_is_reduced_alike(rank: int, size: int) -> None:
    for op, factor in ((hvd.Sum, 1.0), (hvd.Average, 1 / size)):
        x = torch.full((4,), 1.0 + rank, requires_grad=True)
        y = hvd.allreduce(x, op=op, prescale_factor=0.5, postscale_factor=3.0)
        (y * (rank + 1)).sum().backward()
        same(x.grad, torch.full((4,), 1.5 * factor * sum(range(1, size + 1))))
        with torch.no_grad():
            assert not hvd.allreduce(x, op=op).requires_grad


def the_gradient_of_a_grouped_all_reduce_reaches_every_member(rank: int, size: int) -> None:
    xs = [torch.full((n + 1,), 1.0, requires_grad=True) for n in range(3)]
    ys = hvd.grouped_allreduce(xs, op=hvd.Sum)
    sum((n + 1) * y.sum() for n, y in enumerate(ys)).backward()
    for n, x in enumerate(xs):
        same(x.grad, torch.full((n + 1,), float(size * (n + 1))))


def the_gradient_of_an_all_gather_is_the_own_part_of_the_average(rank: int, size: int) -> None:
    x = torch.ones(rank + 2, 3, requires_grad=True)
    y = hvd.allgather(x)
    weights = torch.arange(float(y.numel())).view_as(y)
    ((rank + 1) * weights * y).sum().backward()
    before = sum(other + 2 for other in range(rank))
    same(x.grad, weights[before : before + rank + 2] * (size + 1) / 2)


def the_gradient_of_a_grouped_all_gather_is_the_own_part(rank: int, size: int) -> None:
    xs = [torch.ones(rank + 1, requires_grad=True), torch.ones(3 - rank % 2, 2, requires_grad=True)]
    ys = hvd.grouped_allgather(xs)
    (ys[0].sum() + 2 * ys[1].sum()).backward()
    same(xs[0].grad, torch.ones(rank + 1))
    same(xs[1].grad, torch.full((3 - rank % 2, 2), 2.0))


def the_gradient_of_a_broadcast_is_the_average_on_the_root(rank: int, size: int) -> None:
    x = torch.ones(3, requires_grad=True)
    ((rank + 1) * hvd.broadcast(x, size - 1)).sum().backward()
    same(x.grad, torch.full((3,), (size + 1) / 2 if rank == size - 1 else 0.0))


def the_gradient_of_an_all_to_all_goes_back(rank: int, size: int) -> None:
    x = torch.ones(2 * size + 1, 2, requires_grad=True)
    received, splits = hvd.alltoall(x, splits=torch.full((size,), 2))
    assert splits.tolist() == [2] * size
    (received * (rank + 1)).sum().backward()
    back = torch.arange(1.0, size + 1).repeat_interleave(2)
    same(x.grad, torch.cat([back, torch.zeros(1)])[:, None].expand(-1, 2))  # the last row was not sent


def the_gradient_of_a_reduce_scatter_is_gathered(rank: int, size: int) -> None:
    for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
        x = torch.ones(size + 1, requires_grad=True)
        y = hvd.reducescatter(x, op=op, prescale_factor=2.0, postscale_factor=0.25)
        (y * (rank + 1)).sum().backward()
        owners = [0, 0, *range(1, size)]
        same(x.grad, torch.tensor([0.5 * factor * (owner + 1) for owner in owners]))


def gradients_of_gradients_work(rank: int, size: int) -> None:
    x = torch.full((2,), 2.0, requires_grad=True)
    y = hvd.allreduce(x, op=hvd.Sum)
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    first.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert x.grad.abs().sum() > 0


# ── tensors ──────────────────────────────────────────────────────────────────────────────────────────────────────


def a_compressed_tensor_comes_back_in_its_dtype(rank: int, size: int) -> None:
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        floats = hvd.allreduce(torch.full((5,), float(rank)), op=hvd.Sum, compression=compression)
        assert floats.dtype is torch.float32
        same(floats, torch.full((5,), size * (size - 1) / 2))
        whole = hvd.grouped_allreduce([torch.tensor(3)], op=hvd.Sum, compression=compression)
        assert whole[0].dtype is torch.int64
        assert whole[0].item() == 3 * size
        part = hvd.reducescatter(torch.ones(size), op=hvd.Sum, compression=compression)
        assert part.dtype is torch.float32
        assert part.item() == size


def what_overflows_is_infinite_without_a_warning(rank: int, size: int) -> None:
    largest = torch.full((3,), torch.finfo(torch.float32).max)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # in the thread that computes gradients, too
        total = hvd.allreduce(largest, op=hvd.Sum)
        nothing = hvd.allreduce(torch.full((3,), torch.inf if rank else -torch.inf), op=hvd.Sum)
    assert bool(total.isinf().all()) is (size > 1)
    assert bool(nothing.isnan().all()) is (size > 1)


def in_place_forms_write_into_strided_tensors_and_parameters(rank: int, size: int) -> None:
    matrix = torch.ones(4, 4)
    hvd.allreduce_(matrix[:, 1], op=hvd.Sum)
    same(matrix.sum(0), torch.tensor([4.0, 4.0 * size, 4.0, 4.0]))
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    assert hvd.broadcast_(parameter, size - 1) is parameter
    same(parameter.data, torch.full((2,), size - 1.0))


def conjugate_views_are_sent_as_what_they_show(rank: int, size: int) -> None:
    z = torch.tensor([1 + 2j]).conj()
    assert hvd.broadcast(z, 0).item() == 1 - 2j
    assert hvd.allreduce(z, op=hvd.Sum).item() == size * (1 - 2j)


def adasum_follows_the_paper(rank: int, size: int) -> None:
    if size & (size - 1):
        return
    vectors = [torch.tensor([1.0 + other, 2.0 - other, 0.5 * other * other]) for other in range(size)]

    def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b

    def tree(several: list[torch.Tensor]) -> torch.Tensor:
        half = len(several) // 2
        return several[0] if len(several) == 1 else pair(tree(several[:half]), tree(several[half:]))

    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        found = hvd.allreduce(vectors[rank].to(dtype), op=hvd.Adasum)
        assert found.dtype is dtype
        tolerance = 2e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-6
        torch.testing.assert_close(found.double(), tree([v.double() for v in vectors]), rtol=tolerance, atol=tolerance)
    same(hvd.allreduce(torch.full((2, 2), 3.0), op=hvd.Adasum), torch.full((2, 2), 3.0))  # parallel: the mean
    apart = torch.zeros(size)
    apart[rank] = 1.0
    same(hvd.allreduce(apart, op=hvd.Adasum), torch.ones(size))  # at right angles: the sum
    both = hvd.grouped_allreduce([torch.full((2,), 3.0), apart], op=hvd.Adasum)  # each tensor separately
    same(both[0], torch.full((2,), 3.0))
    same(both[1], torch.ones(size))


def sparse_tensors_add_up_where_they_meet(rank: int, size: int) -> None:
    with torch.sparse.check_sparse_tensor_invariants(False):
        tensor = torch.sparse_coo_tensor([[0, rank], [1, 1]], torch.tensor([1.0, rank + 1.0]), (size, 2))
    for op, count in ((hvd.Sum, 1), (hvd.Average, size)):
        wanted = torch.zeros(size, 2)
        wanted[:, 1] = torch.arange(1.0, size + 1)
        wanted[0, 1] += size
        result = hvd.sparse_allreduce_async(tensor, f"sparse {op}", op)()
        assert result.is_sparse
        same(result.to_dense(), wanted / count)


# ── names and handles ────────────────────────────────────────────────────────────────────────────────────────────


def large_tensors_are_reduced_right_though_they_travel_otherwise(rank: int, size: int) -> None:
    many, sets = (1 << 20) + 3, hvd.add_process_set([0, size - 1]) if size > 2 else hvd.global_process_set
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        values = torch.arange(many).remainder(3 if dtype is torch.bool else 7)
        mine = (values + rank).remainder(2 if dtype is torch.bool else 8).to(dtype)
        parts = torch.stack([(values + r).remainder(2 if dtype is torch.bool else 8) for r in range(size)])
        for op, wanted in ((hvd.Sum, parts.sum(0)), (hvd.Min, parts.amin(0)), (hvd.Max, parts.amax(0))):
            if dtype is not torch.bool or op is hvd.Max:
                assert torch.equal(hvd.allreduce(mine, op=op), wanted.to(dtype))
    group = [torch.full((size_,), float(rank)) for size_ in (400_000, 3, 300_000)]
    scaled = hvd.grouped_allreduce(group, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert [(one[0].item(), one[-1].item()) for one in scaled] == [(size * (size - 1.0),) * 2] * 3
    works = [hvd.allreduce_async(torch.full((500_000 + n,), 1.0), op=hvd.Sum, name=f"l{n}") for n in range(4)]
    for work in reversed(works) if rank % 2 else works:
        assert hvd.synchronize(work).sum().item() >= 500_000 * size
    if sets.included():
        there = hvd.allreduce(torch.ones(many), op=hvd.Sum, process_set=sets)
        assert bool((there == sets.size()).all())
    hvd.barrier()
    if size > 2:
        hvd.remove_process_set(sets)
    if rank == 0:  # the remaining ranks have joined, and take part with zeros
        same(hvd.allreduce(torch.ones(many), op=hvd.Sum), torch.ones(many))
    hvd.join()


def small_tensors_of_any_kind_are_reduced_right_again_and_again(rank: int, size: int) -> None:
    factor = torch.ones(())
    for turn in range(3):
        group = [
            torch.full((3,), rank + turn, dtype=torch.uint8),
            torch.full((2, 2), complex(rank, turn), dtype=torch.complex128).conj(),
            torch.arange(6.0).reshape(2, 3).t()[::2] + rank,
            torch.tensor(rank + 0.5, dtype=torch.float16),
            torch.empty(0, 4),
        ]
        wanted = [torch.stack([each + (r - rank) for r in range(size)]).sum(0, dtype=each.dtype) for each in group]
        for found, sum_ in zip(hvd.grouped_allreduce(group, op=hvd.Sum), wanted, strict=True):
            assert found.dtype is sum_.dtype
            same(found, sum_)
        for n, (each, sum_) in enumerate(zip(group, wanted, strict=True)):
            for name in (None, f"small {n}"):
                same(hvd.allreduce(each, op=hvd.Sum, name=name), sum_)
        assert bool(hvd.allreduce(torch.tensor(rank == turn % size), op=hvd.Max, name="bool"))
        x = torch.full((5,), 1.0 + turn, requires_grad=turn == 1)
        factor += 1.0  # the value at the time of the call counts, and so does `requires_grad`
        y = hvd.allreduce(x, op=hvd.Sum, name="scaled", prescale_factor=factor)
        same(y, torch.full((5,), size * (1.0 + turn) * (2.0 + turn)))
        assert y.requires_grad is (turn == 1)


def more_names_than_bits_are_no_problem(rank: int, size: int) -> None:
    for begin in (0, 700):
        numbers = range(begin, begin + 700)
        handles = [hvd.allreduce_async(torch.tensor(n), name=f"many {n}", op=hvd.Sum) for n in numbers]
        assert [hvd.synchronize(handle).item() for handle in handles] == [size * n for n in numbers]


def a_name_may_come_again_with_another_tensor(rank: int, size: int) -> None:
    for shape in ((3,), (3,), (2, 2), (), (0,)):
        for dtype in (torch.float32, torch.int32):
            assert (
                hvd.allreduce(torch.ones(shape, dtype=dtype), name="again", op=hvd.Sum).sum()
                == size * torch.ones(shape).sum()
            )


def poll_tells_when_it_is_done(rank: int, size: int) -> None:
    handle = hvd.allreduce_async(torch.ones(1), name="polled")
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).item() == 1.0
    first, second = torch.full((3, 2), float(rank)), torch.full((2,), float(rank))
    reduced, sent = hvd.allreduce_async_(first.t(), op=hvd.Sum), hvd.broadcast_async_(second, size - 1)
    while not (hvd.poll(reduced) and hvd.poll(sent)):
        pass
    assert first.eq(sum(range(size))).all()
    assert second.eq(size - 1).all()
    first.zero_()  # the script may overwrite it again
    assert not hvd.synchronize(reduced).any()
    assert hvd.synchronize(sent) is second


def objects_travel(rank: int, size: int) -> None:
    assert hvd.allgather_object({"rank": rank, "more": "x" * rank}, name="objects") == [
        {"rank": other, "more": "x" * other} for other in range(size)
    ]
    assert hvd.broadcast_object({"rank": rank}, root_rank=size - 1) == {"rank": size - 1}


def the_deprecated_average_still_works(rank: int, size: int) -> None:
    for average, wanted in ((True, 1.0), (False, float(size))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert hvd.allreduce(torch.ones(1), average=average).item() == wanted
        assert [warning.category for warning in caught] == [DeprecationWarning]


# ── process sets ─────────────────────────────────────────────────────────────────────────────────────────────────


def a_process_set_has_a_life(rank: int, size: int) -> None:
    evens = hvd.ProcessSet(range(0, size, 2))
    assert (evens.size(), evens.rank(), evens.included(), evens.process_set_id) == (None,) * 4
    assert hvd.remove_process_set(evens) is False
    assert hvd.remove_process_set(hvd.global_process_set) is False
    assert hvd.global_process_set.size() == size
    if size < 3:
        return
    assert hvd.add_process_set(evens) is evens
    assert evens.process_set_id >= 1
    assert evens.size() == (size + 1) // 2
    assert evens.included() is (rank % 2 == 0)
    assert evens.rank() == (rank // 2 if rank % 2 == 0 else None)
    for twice in (evens, range(0, size, 2), range(size)):
        fails(ValueError, "has been added already", lambda twice=twice: hvd.add_process_set(twice))
    fails(ValueError, "each once", lambda: hvd.add_process_set([0, size]))
    fails(hvd.HorovodInternalError, "disagree", lambda: hvd.add_process_set([0, 1] if rank else [1, 2]))
    if evens.included():
        members = evens.ranks
        assert hvd.allreduce(torch.tensor(rank), op=hvd.Sum, process_set=evens).item() == sum(members)
        assert hvd.allreduce(torch.tensor(float(rank)), process_set=evens).item() == sum(members) / len(members)
        assert hvd.allgather(torch.tensor([rank]), process_set=evens).tolist() == members
        assert hvd.broadcast(torch.tensor(rank), members[-1], process_set=evens).item() == members[-1]
        assert hvd.broadcast_object(rank, members[-1], process_set=evens) == members[-1]
        assert hvd.alltoall(torch.arange(len(members)), process_set=evens).tolist() == [evens.rank()] * len(members)
        x = torch.ones(2, requires_grad=True)
        hvd.allgather(x, process_set=evens).sum().backward()
        same(x.grad, torch.ones(2))
        hvd.barrier(process_set=evens)
        fails(ValueError, "is not one of the ranks", lambda: hvd.broadcast(torch.ones(1), 1, process_set=evens))
        fails(NotImplementedError, "not on a process set", lambda: hvd.allreduce(x, op=hvd.Adasum, process_set=evens))
    else:
        for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
            fails(ValueError, "is not in the process set", lambda call=call: call(torch.ones(4), process_set=evens))
        fails(ValueError, "not in", lambda: hvd.broadcast(torch.ones(1), 0, process_set=evens))
        fails(ValueError, "not in", lambda: hvd.barrier(process_set=evens))
    assert hvd.allreduce(torch.tensor(1), op=hvd.Sum).item() == size
    if evens.included():  # unnamed operations of a set do not change the counter of all ranks
        hvd.allreduce(torch.ones(1), process_set=evens)
    assert hvd.allreduce(torch.tensor(1), op=hvd.Sum).item() == size
    assert hvd.remove_process_set(evens) is True
    assert (evens.size(), evens.rank(), evens.included(), evens.process_set_id) == (None,) * 4
    fails(ValueError, "has not been initialized", lambda: hvd.allreduce(torch.ones(1), process_set=evens))
    again = hvd.add_process_set(range(0, size, 2))
    assert hvd.remove_process_set(again)


def a_communicator_makes_a_process_set(rank: int, size: int) -> None:
    if size < 3 or not hvd.mpi_enabled():
        return
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Split(0 if rank < 2 else MPI.UNDEFINED, key=rank)
    process_set = hvd.add_process_set(hvd.ProcessSet(comm))
    assert process_set.ranks == [0, 1]
    if process_set.included():
        assert hvd.allreduce(torch.tensor(1), op=hvd.Sum, process_set=process_set).item() == 2
    assert hvd.remove_process_set(process_set)


def fails(kind, words, call):
    try:
        call()
    except kind as err:
        assert words in str(err), err
    else:
        raise AssertionError(f"no {kind.__name__}: {words}")


# ── join ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def joined_ranks_take_part_with_zeros(rank: int, size: int) -> None:
    for named in (True, False):
        for step in range(2 * (rank + 1)):
            present = sum(2 * (other + 1) > step for other in range(size))
            tensor = torch.full((3,), 1.0)
            found = hvd.allreduce(tensor, op=hvd.Sum, name=f"join {step}" if named else None)
            assert found.tolist() == [present] * 3
            both = hvd.grouped_allreduce([tensor, tensor.int()], op=hvd.Sum)
            assert both[1].tolist() == [present] * 3
        assert hvd.join() == size - 1
        # The counters of unnamed operations are equal again.
        for _ in range(3):
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def other_operations_fail_while_somebody_has_joined(rank: int, size: int) -> None:
    if size == 1:
        return
    if rank:
        for call in (
            lambda: hvd.allgather(torch.ones(1)),
            lambda: hvd.broadcast(torch.ones(1), 0, name="n"),
            lambda: hvd.reducescatter(torch.ones(size)),
            lambda: hvd.alltoall(torch.ones(size), name="n"),
            lambda: hvd.barrier(),
        ):
            # Rank 0 has certainly joined by then; before, the operation waits for it.
            fails(hvd.HorovodInternalError, "is not supported with Join at this time", call)
    hvd.join()
    assert hvd.broadcast(torch.tensor(float(rank)), size - 1, name="n").item() == size - 1
    assert hvd.allgather(torch.ones(1)).sum() == size


def operations_under_way_end_before_the_join(rank: int, size: int) -> None:
    handles = [hvd.allreduce_async(torch.ones(2), op=hvd.Sum) for _ in range(size - rank)]
    hvd.join()
    for number, handle in enumerate(handles):
        assert hvd.synchronize(handle).tolist() == [size - number] * 2
    hvd.barrier()


# ── the whole ────────────────────────────────────────────────────────────────────────────────────────────────────


def initialising_twice_is_once(rank: int, size: int) -> None:
    hvd.init()
    assert hvd.size() == size


def what_is_first_called_in_inference_mode_works_in_it_and_outside(rank: int, size: int) -> None:
    hvd.shutdown()
    hvd.init()
    total = float(sum(range(1, size + 1)))
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            for numel in (3, 300_000):  # sent with the negotiation, and over streams
                x = torch.full((numel,), 1.0 + rank)
                same(hvd.allreduce(x, op=hvd.Sum), torch.full((numel,), total))
                same(hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum)), torch.full((numel,), total))
                for y in hvd.grouped_allreduce([x, x], op=hvd.Sum):
                    same(y, torch.full((numel,), total))
                same(hvd.broadcast(x, size - 1), torch.full((numel,), float(size)))
                same(hvd.allgather(x)[-numel:], torch.full((numel,), float(size)))
                same(hvd.allreduce_(x, op=hvd.Sum), torch.full((numel,), total))


def everything_works_once_more_after_shutdown(rank: int, size: int) -> None:
    hvd.shutdown()
    hvd.init()
    for each in CASES[: CASES.index(everything_works_once_more_after_shutdown)]:
        each(rank, size)


def process_sets_may_be_given_to_init(rank: int, size: int) -> None:
    static = hvd.ProcessSet([size - 1])
    hvd.shutdown()
    if size > 1:
        hvd.init(process_sets=[static])
        if static.included():
            assert hvd.allreduce(torch.tensor(5), op=hvd.Sum, process_set=static).item() == 5
        hvd.shutdown()
        assert static.included() is None
        fails(ValueError, "added already", lambda: hvd.init(process_sets=[static, hvd.ProcessSet([size - 1])]))
        assert not hvd.is_initialized()
        fails(ValueError, "dynamic", lambda: hvd.init(process_sets="static"))
    hvd.init(process_sets="dynamic")


CASES = cases(globals(), "rank", "size")

if __name__ == "__main__":
    main(CASES)
