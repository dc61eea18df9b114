"""Check every operation of communicators over MPI and over a mesh. Started by test_communicators.py.

All ranks draw the same numbers, and every rank can compute its peers' values.
"""

import os
import random
import sys
import time

import numpy as np
from fakes.meshes import at_once
from rank_jobs import cases

from sirtaki.comm.control.communicator import Communicator, Op
from sirtaki.comm.control.waiting import wait_for
from sirtaki.comm.control.watchdog import MessageBoard, Tag
from sirtaki.engine.ranks import open_ranks
from sirtaki.engine.settings import Settings

LENGTHS = (0, 1, 7, 1000, 20_000, 300_000)
"""Numbers of elements: empty, short and long messages, one and several frames, each with its own algorithm."""

DTYPES = (np.uint8, np.int32, np.int64, np.float32, np.float64, np.complex64)
REDUCED = {
    Op.AND: (np.bitwise_and, (np.uint8, np.int64)),
    Op.MINIMUM: (np.minimum, DTYPES[:-1]),
    Op.MAXIMUM: (np.maximum, DTYPES[:-1]),
    Op.SUM: (np.add, DTYPES),
    Op.PRODUCT: (np.multiply, DTYPES),
}


def values(rank: int, length: int, dtype: type = np.float64) -> np.ndarray:
    """Return a rank's values: whole numbers, whose sums are exact in every order."""
    return np.random.default_rng([rank, length]).integers(1, 3, length).astype(dtype)


def wait(comm: Communicator, test: object) -> None:
    wait_for(test, failures=comm.failures)


def arrays_of_all_lengths_and_types_are_reduced() -> None:
    for op, (ufunc, dtypes) in REDUCED.items():
        for length in LENGTHS:
            for dtype in dtypes if length <= 1000 else dtypes[:1]:
                array = values(world.rank, length, dtype)
                wait(world, world.all_reduce(array, op))
                expected = ufunc.reduce([values(rank, length, dtype) for rank in range(world.size)])
                assert array.dtype == dtype
                assert np.array_equal(array, expected), (op, length, dtype)


def sums_have_the_same_bits_on_all_ranks() -> None:
    for length in (3, 5000, 100_000):
        array = np.random.default_rng([world.rank, length]).standard_normal(length)
        wait(world, world.all_reduce(array, Op.SUM))
        everybody = np.empty((world.size, length))
        wait(world, world.all_gather(array, everybody))
        assert all(other.tobytes() == array.tobytes() for other in everybody)


def every_root_broadcasts() -> None:
    for length in LENGTHS:
        for root in range(world.size):
            array = values(world.rank, length)
            wait(world, world.broadcast(array, root))
            assert np.array_equal(array, values(root, length)), (length, root)


def equal_and_ragged_arrays_are_gathered() -> None:
    for length in LENGTHS:
        gathered = np.empty((world.size, length))
        wait(world, world.all_gather(values(world.rank, length), gathered))
        assert np.array_equal(gathered, [values(rank, length) for rank in range(world.size)])
        counts = [(length * rank) // 2 for rank in range(world.size)]  # rank 0 contributes nothing
        ragged = np.empty(sum(counts), dtype=np.uint8)
        wait(world, world.all_gather(values(world.rank, counts[world.rank], np.uint8), ragged, counts))
        assert np.array_equal(ragged, np.concatenate([values(r, n, np.uint8) for r, n in enumerate(counts)]))


def every_rank_gives_every_other_its_part() -> None:
    sent = np.arange(world.size, dtype=np.int64) + 10 * world.rank
    received = np.empty_like(sent)
    wait(world, world.all_to_all(sent, received))
    assert received.tolist() == [10 * rank + world.rank for rank in range(world.size)]
    for length in LENGTHS:
        give = [length * ((world.rank + other) % 3) for other in range(world.size)]  # symmetric; some counts are zero
        outgoing = np.full(sum(give), world.rank, dtype=np.uint8)
        incoming = np.empty_like(outgoing)
        wait(world, world.all_to_all(outgoing, incoming, (give, give)))
        assert np.array_equal(incoming, np.repeat(np.arange(world.size, dtype=np.uint8), give))


def parts_of_a_reduction_are_scattered() -> None:
    for length in LENGTHS:
        counts = [length // world.size + (rank == 0) for rank in range(world.size)]
        part = np.empty(counts[world.rank])
        wait(world, world.reduce_scatter(values(world.rank, sum(counts)), part, counts, Op.SUM))
        total = sum(values(rank, sum(counts)) for rank in range(world.size))
        begin = sum(counts[: world.rank])
        assert np.array_equal(part, total[begin : begin + counts[world.rank]])


def nobody_passes_a_barrier_before_all_have_come() -> None:
    for late in range(world.size):
        came = np.zeros(world.size)
        if world.rank == late:
            time.sleep(0.05)
        came[world.rank] = time.time()  # ranks of one host have one clock
        wait(world, world.barrier())
        passed_s = time.time()
        wait(world, world.all_reduce(came, Op.MAXIMUM))
        assert passed_s >= came.max() - 1e-3


def neighbours_exchange_arrays_of_all_lengths() -> None:
    if world.size == 1:
        return
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for length in LENGTHS:
        received = np.empty(length)
        receiving = world.receive(received, before)
        wait(world, world.send(values(world.rank, length), after))
        wait(world, receiving)
        assert np.array_equal(received, values(before, length))


def short_messages_keep_their_order_and_wait_for_nobody() -> None:
    courier = MessageBoard(world.duplicate())
    for number in range(200):
        courier.send((world.rank + 1) % world.size, Tag.ITERATION, (world.rank, number))
    courier.send_all(Tag.JOINED, "x" * 50_000)
    found, joined = [], []
    while len(found) < 200 or len(joined) < world.size - 1:
        found += courier.receive(Tag.ITERATION)
        joined += courier.receive(Tag.JOINED)
    before = (world.rank - 1) % world.size
    assert found == [(before, (before, number)) for number in range(200)]
    assert sorted(source for source, _ in joined) == [rank for rank in range(world.size) if rank != world.rank]
    assert courier.receive(Tag.LOST) == []


def a_long_message_arrives_though_its_sender_has_dropped_the_communicator() -> None:
    duplicate = world.duplicate()
    if world.rank != 0:
        duplicate.post(0, Tag.JOINED, b"x" * 50_000)
        del duplicate
        rubbish = [bytes([number]) * 50_000 for number in range(100)]
        wait(world, world.barrier())
        assert len(rubbish) == 100
        return
    time.sleep(0.1)
    found = []
    while len(found) < world.size - 1:
        if (message := duplicate.collect()) is not None:
            found.append(message)
    assert sorted(found) == [(rank, Tag.JOINED, b"x" * 50_000) for rank in range(1, world.size)]
    wait(world, world.barrier())


def threads_use_duplicates_at_the_same_time() -> None:
    def use(comm: Communicator, number: int) -> None:
        for turn in range(30):
            length = (0, 5, 3000, 40_000)[(turn + number) % 4]
            array = values(comm.rank + number, length)
            wait(comm, comm.all_reduce(array, Op.SUM))
            assert np.array_equal(array, sum(values(rank + number, length) for rank in range(comm.size)))
            wait(comm, comm.barrier())

    at_once(use, [world.duplicate() for _ in range(4)], range(4))


def subsets_are_numbered_in_the_order_given_and_others_know_nothing() -> None:
    size = world.size
    for ranks in (list(range(size)), list(range(size))[::-1], list(range(0, size, 2)), [size - 1]):
        for _ in range(2):  # the same operation again must not be confused with the first one
            if world.rank not in ranks:
                continue
            comm = world.subset(ranks)
            assert (comm.rank, comm.size) == (ranks.index(world.rank), len(ranks))
            gathered = np.empty(comm.size, dtype=np.int64)
            wait(comm, comm.all_gather(np.array([world.rank]), gathered))
            assert gathered.tolist() == ranks
            inner = comm.subset([0]) if comm.rank == 0 else None
            if inner is not None:
                wait(inner, inner.barrier())
                inner.free()
            comm.free()
    wait(world, world.barrier())


def a_freed_communicator_leaves_the_others_alone() -> None:
    for _ in range(20):
        first, second = world.duplicate(), world.duplicate()
        wait(first, first.barrier())
        first.free()
        array = np.ones(3)
        wait(second, second.all_reduce(array, Op.SUM))
        assert array.tolist() == [world.size] * 3
        second.free()


def a_rank_may_be_far_ahead_of_the_others() -> None:
    comm = world.duplicate()
    if world.rank == world.size - 1:
        time.sleep(0.1)
    for number in range(100):
        array = np.full(2000, number if world.rank == 0 else -1)
        wait(comm, comm.broadcast(array, 0))
        assert (array == number).all()
    wait(comm, comm.barrier())
    comm.free()


def an_operation_is_under_way_while_others_run() -> None:
    slow, quick = world.duplicate(), world.duplicate()
    array = np.ones(4, dtype=np.uint8)
    test = slow.all_reduce(array, Op.AND) if world.rank else None
    for _ in range(10):
        wait(quick, quick.barrier())
    wait(slow, test or slow.all_reduce(array, Op.AND))
    assert array.all()


CASES = cases(globals())


def thousands_of_operations_in_a_drawn_order() -> None:
    comms = [world.duplicate() for _ in range(5)]
    rng = random.Random(7)
    for turn in range(3000):
        comm, length = rng.choice(comms), rng.choice((0, 1, 50, 5000, 70_000))
        array = values(world.rank + turn, length)
        match rng.randrange(4):
            case 0:
                wait(comm, comm.all_reduce(array, Op.SUM))
                assert np.array_equal(array, sum(values(rank + turn, length) for rank in range(world.size)))
            case 1:
                root = rng.randrange(world.size)
                wait(comm, comm.broadcast(array, root))
                assert np.array_equal(array, values(root + turn, length))
            case 2:
                gathered = np.empty((world.size, length))
                wait(comm, comm.all_gather(array, gathered))
                assert np.array_equal(gathered[-1], values(world.size - 1 + turn, length))
            case _:
                wait(comm, comm.barrier())


STRESS = [thousands_of_operations_in_a_drawn_order]

if __name__ == "__main__":
    world = open_ranks(Settings.from_environ())
    assert world.backend.value == ("mesh" if os.environ.get("SIRTAKI_TEST_CONTROL") == "mesh" else "mpi")
    for case in [case for case in (*CASES, *STRESS) if case.__name__ in sys.argv]:
        case()
        wait(world, world.barrier())
        print(f"passed {case.__name__}", flush=True)
    world.free()
