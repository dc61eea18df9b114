"""Ranks agree on what is ready, in whatever order each of them computes it."""

import random
import threading
import time

import numpy as np
import pytest

from sirtaki.comm.control.communicator import Backend, Op
from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.gradients.iteration import ReadinessNegotiation
from sirtaki.errors import CommError

RANKS = 3


class Rounds:
    """All-reduces by AND among threads of this process: the n-th of every rank is one."""

    def __init__(self, ranks: int = RANKS) -> None:
        self.ranks, self.lock = ranks, threading.Lock()
        self.given: list[list[np.ndarray]] = []

    def communicator(self) -> "Communicator":
        return Communicator(self)


class Communicator:
    backend = Backend.MPI

    def __init__(self, rounds: Rounds) -> None:
        self._rounds, self.used = rounds, 0

    def all_reduce(self, array: np.ndarray, op: Op) -> "Request":
        assert op is Op.AND
        with self._rounds.lock:
            if len(self._rounds.given) == self.used:
                self._rounds.given.append([])
            self._rounds.given[self.used].append(array.copy())
        self.used += 1
        return Request(self._rounds, self.used - 1, array)


class Request:
    def __init__(self, rounds: Rounds, number: int, result: np.ndarray) -> None:
        self._rounds, self._number, self._result = rounds, number, result

    def __call__(self) -> bool:
        with self._rounds.lock:
            given = self._rounds.given[self._number]
            if len(given) < self._rounds.ranks:
                return False
            self._result[:] = np.bitwise_and.reduce(given)
        return True


@pytest.mark.parametrize("granularity_bytes", [1, 40, 10_000])
@pytest.mark.parametrize("seed", range(6))
def test_all_ranks_learn_the_same_rounds_whatever_their_orders(seed: int, granularity_bytes: int) -> None:
    rounds, rng = Rounds(), random.Random(seed)
    n_gradients = rng.randrange(1, 30)
    sizes_bytes = np.array([rng.randrange(0, 50) for _ in range(n_gradients)])
    ready: list[set[int]] = [set() for _ in range(RANKS)]
    agreed: list[list[list[int]]] = [[] for _ in range(RANKS)]
    communicators = [rounds.communicator() for _ in range(RANKS)]

    def rank(number: int) -> None:
        own = random.Random(100 * seed + number)
        negotiation_ = ReadinessNegotiation(communicators[number], FailureBoard())  # type: ignore[arg-type]

        def on_agreed(indices: list[int]) -> None:
            assert all(set(indices) <= other for other in ready), "agreed before every rank was ready"
            assert indices == sorted(indices)
            agreed[number].append(indices)

        for _ in range(2):  # backward passes
            negotiation_.begin(sizes_bytes, granularity_bytes=granularity_bytes, on_agreed=on_agreed)
            left_out = own.randrange(n_gradients) if own.random() < 0.5 else None
            for index in own.sample(range(n_gradients), n_gradients):
                if index != left_out:
                    ready[number].add(index)
                    negotiation_.set_ready(index)
                if own.random() < 0.2:
                    time.sleep(0.001)
            if left_out is not None:  # the pass ends without it
                ready[number].add(left_out)
                negotiation_.end()
            assert negotiation_.wait()
            meeting.wait()
            ready[number].clear()
            meeting.wait()
        assert negotiation_.close()

    meeting = threading.Barrier(RANKS)
    threads = [threading.Thread(target=rank, args=[number]) for number in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert agreed[0] == agreed[1] == agreed[2]
    everything = sorted(index for indices in agreed[0] for index in indices)
    assert everything == sorted(2 * list(range(n_gradients)))
    assert len({each.used for each in communicators}) == 1, "a rank began a round that no other one joins"


def test_a_wait_may_be_interrupted_and_goes_on_later() -> None:
    rounds = Rounds(ranks=2)
    alone = ReadinessNegotiation(rounds.communicator(), FailureBoard())  # type: ignore[arg-type]
    found: list[int] = []
    alone.begin(np.array([8]), granularity_bytes=1, on_agreed=found.extend)
    alone.set_ready(0)
    assert not alone.wait(lambda: True)
    other = rounds.communicator()
    other.all_reduce(np.packbits([True]), Op.AND)
    assert alone.wait(lambda: False)
    assert found == [0]
    assert alone.close()


def test_a_round_that_nobody_joins_is_given_up_and_told() -> None:
    alone = ReadinessNegotiation(Rounds(ranks=2).communicator(), FailureBoard())  # type: ignore[arg-type]
    alone.begin(np.array([8]), granularity_bytes=1, on_agreed=lambda indices: None)
    alone.set_ready(0)
    time.sleep(0.05)
    assert not alone.close(), "the communicator is in use for ever"


def test_a_failed_job_ends_the_wait() -> None:
    failures = FailureBoard()
    alone = ReadinessNegotiation(Rounds(ranks=2).communicator(), failures)  # type: ignore[arg-type]
    alone.begin(np.array([8]), granularity_bytes=1, on_agreed=lambda indices: None)
    alone.set_ready(0)
    failures.report(CommError("rank 1 has ended"))
    with pytest.raises(CommError, match="rank 1 has ended"):
        alone.wait()
