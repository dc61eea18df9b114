"""Collective operations as steps of one rank, in ⌈log₂ size⌉ rounds for any number of ranks where messages are short.

Dissemination (Hensgen, Finkel, Manber 1988) for the barrier and for what may be counted twice, Bruck's concatenation
(Bruck et al. 1997) for gathering, a binomial tree for broadcasts, recursive doubling for sums over 2ⁿ ranks. All ranks
end with the same bits: sums are taken in one order.

Each function is a generator: it yields while something has not come yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sirtaki.comm.control.communicator import Array, Op

from .connection import Sending

SHORT_BYTES = 32 * 1024
"""Up to here a round counts for more than the bytes in it."""

UFUNCS: dict[Op, np.ufunc] = {
    Op.AND: np.bitwise_and,
    Op.MINIMUM: np.minimum,
    Op.MAXIMUM: np.maximum,
    Op.SUM: np.add,
    Op.PRODUCT: np.multiply,
}

IDEMPOTENT = frozenset({Op.AND, Op.MINIMUM, Op.MAXIMUM})
"""A value that is counted twice changes nothing."""

Steps = Iterator[None]
Bytes = npt.NDArray[np.uint8]


class Exchange(Protocol):
    """One operation's messages with the other ranks of its communicator."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def send(self, array: Array, rank: int) -> Sending:
        """Sends it; it is in use until the sending is done."""
        ...

    def receive(self, array: Array, rank: int) -> Steps:
        """Fills it with the next message of that rank."""
        ...


def sent(*sendings: Sending) -> Steps:
    """Until all of them have left."""
    for sending in sendings:
        while not sending.done:
            yield


def disseminated(exchange: Exchange, array: Array, op: Op) -> Steps:
    """All-reduce of a short array by an idempotent operation; of an empty one: a barrier."""
    other, distance = np.empty_like(array), 1
    while distance < exchange.size:
        sending = exchange.send(array, (exchange.rank + distance) % exchange.size)
        yield from exchange.receive(other, (exchange.rank - distance) % exchange.size)
        yield from sent(sending)
        UFUNCS[op](array, other, out=array)
        distance *= 2


def doubled(exchange: Exchange, array: Array, op: Op) -> Steps:
    """All-reduce of a short array over 2ⁿ ranks: partners compute the same."""
    other, distance = np.empty_like(array), 1
    while distance < exchange.size:
        partner = exchange.rank ^ distance
        sending = exchange.send(array, partner)
        yield from exchange.receive(other, partner)
        yield from sent(sending)
        UFUNCS[op](array, other, out=array)
        distance *= 2


def gathered(exchange: Exchange, whole: Array, counts: Sequence[int]) -> Steps:
    """Bruck's concatenation: `whole` holds this rank's part already, the others' come; `counts` elements a rank."""
    rank, size, have = exchange.rank, exchange.size, 1
    begin = [0, *accumulate(counts)]

    def parts(first: int, number: int) -> list[Array]:
        """The parts of so many ranks from `first` on, which may wrap around."""
        over = max(0, first + number - size)
        pieces = [whole[begin[first] : begin[first + number - over]]]
        return pieces if not over else [*pieces, whole[: begin[over]]]

    while have < size:
        number = min(have, size - have)
        sendings = [exchange.send(part, (rank - have) % size) for part in parts(rank, number)]
        for part in parts((rank + have) % size, number):
            yield from exchange.receive(part, (rank + have) % size)
        yield from sent(*sendings)
        have += number


def reduced_together(exchange: Exchange, array: Array, op: Op) -> Steps:
    """All-reduce of a short array: everybody gathers all, and reduces them in the order of ranks."""
    everything = np.empty((exchange.size, array.size), dtype=array.dtype)
    everything[exchange.rank] = array
    yield from gathered(exchange, everything.reshape(-1), [array.size] * exchange.size)
    UFUNCS[op].reduce(everything, axis=0, out=array)


def reduce_scattered(exchange: Exchange, array: Array, part: Array, counts: Sequence[int], op: Op) -> Steps:
    """Each rank sends each other its part, and reduces what it gets in the order of ranks."""
    begin, rank, size = [0, *accumulate(counts)], exchange.rank, exchange.size
    sendings = [
        exchange.send(array[begin[other] : begin[other + 1]], other)
        for other in ((rank + distance) % size for distance in range(1, size))
    ]
    theirs = np.empty_like(part)
    for other in range(size):
        target = part if other == 0 else theirs
        if other == rank:
            target[...] = array[begin[rank] : begin[rank + 1]]
        else:
            yield from exchange.receive(target, other)
        if other:
            UFUNCS[op](part, theirs, out=part)
    yield from sent(*sendings)


def reduced_in_parts(exchange: Exchange, array: Array, op: Op) -> Steps:
    """All-reduce of a long array: each rank reduces a part, and all gather the parts."""
    low, more = divmod(array.size, exchange.size)
    counts = [low + (rank < more) for rank in range(exchange.size)]
    part = np.empty(counts[exchange.rank], dtype=array.dtype)
    yield from reduce_scattered(exchange, array, part, counts, op)
    begin = sum(counts[: exchange.rank])
    array[begin : begin + part.size] = part
    yield from gathered(exchange, array, counts)


def all_reduced(exchange: Exchange, array: Array, op: Op) -> Steps:
    """All-reduce of a 1-d array, in the way that suits its length."""
    size = exchange.size
    if array.nbytes <= SHORT_BYTES:
        if op in IDEMPOTENT:
            return disseminated(exchange, array, op)
        if size & (size - 1) == 0:
            return doubled(exchange, array, op)
        if array.nbytes * size <= SHORT_BYTES:
            return reduced_together(exchange, array, op)
    return reduced_in_parts(exchange, array, op)


def broadcast(exchange: Exchange, array: Array, root: int) -> Steps:
    """Along a binomial tree."""
    size = exchange.size
    place = (exchange.rank - root) % size
    distance = 1
    while distance < size and not place & distance:
        distance *= 2
    if place:
        yield from exchange.receive(array, (place - distance + root) % size)
    sendings = []
    while distance > 1:
        distance //= 2
        if place + distance < size:
            sendings.append(exchange.send(array, (place + distance + root) % size))
    yield from sent(*sendings)


def all_to_all(exchange: Exchange, given: Array, received: Array, counts: tuple[Sequence[int], Sequence[int]]) -> Steps:
    """Each rank sends each other its part."""
    rank, size = exchange.rank, exchange.size
    give, take = ([0, *accumulate(each)] for each in counts)
    sendings = []
    for distance in range(1, size):
        other = (rank + distance) % size
        sendings.append(exchange.send(given[give[other] : give[other + 1]], other))
    received[take[rank] : take[rank + 1]] = given[give[rank] : give[rank + 1]]
    for distance in range(1, size):
        other = (rank - distance) % size
        yield from exchange.receive(received[take[other] : take[other + 1]], other)
    yield from sent(*sendings)
