"""The order of gradients: agreed, and watched."""

import numpy as np
from fakes.gradients import make_buffers, parameters

from sirtaki.comm.gradients.schedule import (
    DISORDERLY_ITERATIONS,
    PATIENCE_ITERATIONS,
    OrderProfiling,
    OrderWatch,
    agree_on_order,
)


class SumOf:
    """A control plane on which the other ranks have said their places already."""

    def __init__(self, *others: list[int]) -> None:
        self._others = others

    def total(self, places: np.ndarray) -> np.ndarray:
        return places + sum((np.argsort(order) for order in self._others), np.zeros(len(places)))


def test_no_rank_rules_the_order() -> None:
    ranks = ([0, 1, 2, 3], [0, 2, 1, 3], [0, 2, 3, 1])
    found = [
        agree_on_order(own, SumOf(*(other for other in ranks if other is not own)), counts=True)  # type: ignore[arg-type]
        for own in ranks
    ]
    assert found[0] == found[1] == found[2] == [0, 2, 1, 3]


def test_a_rank_without_gradients_has_no_say() -> None:
    assert agree_on_order([0, 1, 2], SumOf([2, 1, 0]), counts=False) == [2, 1, 0]  # type: ignore[arg-type]


def reversed_iterations(watch: OrderWatch, first: int, count: int) -> list[bool]:
    expected = list(range(40))
    return [watch.wants_reprofile(first + number, expected[::-1], expected) for number in range(count)]


def test_an_order_that_changed_for_good_is_profiled_again() -> None:
    watch = OrderWatch()
    assert reversed_iterations(watch, 0, 4) == [False] * (DISORDERLY_ITERATIONS - 1) + [True, True]


def test_a_few_gradients_out_of_place_and_single_iterations_are_nothing() -> None:
    watch, expected = OrderWatch(), list(range(40))
    neighbours = [index ^ 1 for index in expected]
    assert not any(watch.wants_reprofile(number, neighbours, expected) for number in range(20))
    for number in range(20):
        assert reversed_iterations(watch, number, 1) == [False]
        watch.as_expected()


def test_an_order_that_never_settles_is_not_chased() -> None:
    watch, profiles = OrderWatch(), list[int]()
    for number in range(2000):
        if reversed_iterations(watch, number, 1) == [True]:
            watch.profiling_begins(number)
            watch.profiled(number + 2)
            profiles.append(number)
    assert len(profiles) <= 2000 // (2 * PATIENCE_ITERATIONS) + 1


def test_the_order_is_profiled_in_two_iterations_and_again_when_this_rank_wants_it() -> None:
    params = parameters((2,), (3,), (4,))
    buffers, profiling = make_buffers(params), OrderProfiling()
    assert [profiling.ends_with(iteration) for iteration in (0, 1)] == [False, True]
    profiling.end(1)
    profiling.watch(2, [0, 1, 2], buffers)
    assert not profiling.active
    assert not profiling.asks
    profiling.requested = True
    profiling.watch(3, [0, 1, 2], buffers)
    assert profiling.asks
    profiling.begin(5)
    assert profiling.active
    assert not profiling.asks
    assert not profiling.requested
    assert [profiling.ends_with(iteration) for iteration in (5, 6)] == [False, True]
    profiling.end(6)
    buffers.outdated = True
    profiling.watch(7, [0, 1, 2], buffers)
    assert profiling.asks
