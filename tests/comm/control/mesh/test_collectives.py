"""Rounds and results of the algorithms, for many numbers of ranks, without a network."""

import math
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from sirtaki.comm.control import mesh
from sirtaki.comm.control.communicator import Op
from sirtaki.comm.control.mesh_links import Sending

SIZES = [1, 2, 3, 4, 5, 7, 8, 11, 16, 33]


class Network:
    """Ranks in lockstep: what is sent in a round arrives in the next one."""

    def __init__(self, size: int) -> None:
        self.size, self.round = size, 0
        self.queues: dict[tuple[int, int], deque[tuple[int, np.ndarray]]] = {}

    def run(self, steps: Callable[["Exchange"], Iterator[None]]) -> int:
        """Plays all ranks; the number of rounds."""
        under_way = [steps(Exchange(self, rank)) for rank in range(self.size)]
        while under_way:
            under_way = [each for each in under_way if next(each, True) is None]
            self.round += 1
            assert self.round < 1000
        assert not any(self.queues.values()), "something was sent that nobody received"
        return self.round - 1


class Exchange:
    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank, self.size = network, rank, network.size

    def send(self, array: np.ndarray, rank: int) -> Sending:
        queue = self.network.queues.setdefault((self.rank, rank), deque())
        queue.append((self.network.round, array.copy()))
        sending = Sending()
        sending.done = True
        return sending

    def receive(self, array: np.ndarray, rank: int) -> Iterator[None]:
        queue = self.network.queues.setdefault((rank, self.rank), deque())
        while not queue or queue[0][0] == self.network.round:
            yield
        array[...] = queue.popleft()[1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", list(Op))
def test_short_reductions_take_log2_rounds(size: int, op: Op) -> None:
    arrays = [np.random.default_rng(rank).integers(1, 3, 5) for rank in range(size)]
    expected = mesh.UFUNCS[op].reduce(arrays)
    rounds = Network(size).run(lambda exchange: mesh.all_reduce(exchange, arrays[exchange.rank], op))
    assert rounds <= math.ceil(math.log2(size))
    assert all(np.array_equal(array, expected) for array in arrays)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [0, 1, 30, 40_000])
def test_sums_of_any_length_have_the_same_bits_everywhere(size: int, length: int) -> None:
    arrays = [np.random.default_rng(rank).standard_normal(length) for rank in range(size)]
    total = np.sum(arrays, axis=0)
    Network(size).run(lambda exchange: mesh.all_reduce(exchange, arrays[exchange.rank], Op.SUM))
    assert len({array.tobytes() for array in arrays}) == 1
    np.testing.assert_allclose(arrays[0], total, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", SIZES)
def test_gathering_and_broadcasts_take_log2_rounds(size: int) -> None:
    counts = [(3 * rank) % 5 for rank in range(size)]
    expected = np.repeat(np.arange(size), counts)
    wholes = [np.where(expected == rank, rank, -1) for rank in range(size)]
    network = Network(size)
    assert network.run(lambda exchange: mesh.gather(exchange, wholes[exchange.rank], counts)) <= math.ceil(
        math.log2(size)
    )
    assert all(np.array_equal(whole, expected) for whole in wholes)
    for root in range(size):
        arrays = [np.full(4, rank) for rank in range(size)]
        steps = lambda exchange, a=arrays, r=root: mesh.broadcast(exchange, a[exchange.rank], r)  # noqa: E731
        assert Network(size).run(steps) <= math.ceil(math.log2(size))
        assert all((array == root).all() for array in arrays)
