"""Members of a group leave together, with the last of them; others are not held."""

import torch

from sirtaki.engine.reducing.hooks import GradientGroups


class Made:
    def __init__(self, *groups: tuple[int, ...], size: int = 5) -> None:
        self.params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(size)]
        self.left: list[tuple[int, float, int]] = []
        self.groups = GradientGroups([[self.params[index] for index in group] for group in groups], self.params)
        self.arrive = [
            lambda gradient, version, index=index: self.left.append((index, float(gradient), version))
            for index in range(size)
        ]
        self.groups.hold(self.arrive)

    def come(self, *indices: int) -> None:
        for index in indices:
            self.arrive[index](torch.tensor(10.0 * index), index + 1)

    @property
    def indices(self) -> list[int]:
        return [index for index, _, _ in self.left]


def test_members_leave_with_the_last_of_them_in_the_order_in_which_they_came() -> None:
    made = Made((0, 2, 3))
    made.come(3, 1, 0)
    assert made.indices == [1]
    made.come(2)
    assert made.left == [(1, 10.0, 2), (3, 30.0, 4), (0, 0.0, 1), (2, 20.0, 3)]
    made.groups.release()
    assert len(made.left) == 4


def test_groups_do_not_wait_for_each_other() -> None:
    made = Made((0, 1), (2, 3))
    made.come(0, 2, 3)
    assert made.indices == [2, 3]
    made.come(4, 1)
    assert made.indices == [2, 3, 4, 0, 1]


def test_those_whose_company_does_not_come_leave_when_they_are_released() -> None:
    made = Made((0, 1), (2, 3))
    made.come(1, 2, 3)
    made.groups.release()
    assert made.indices == [2, 3, 1]


def test_a_new_iteration_begins_with_nobody_waiting() -> None:
    made = Made((0, 1))
    made.come(0)
    made.groups.begin()
    made.come(1)
    assert made.left == []
    made.come(0)
    assert made.indices == [1, 0]
    made.groups.begin()
    made.groups.release()
    assert made.indices == [1, 0]


def test_members_that_are_not_watched_do_not_count() -> None:
    watched = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    frozen = torch.nn.Parameter(torch.zeros(1))
    left: list[int] = []
    groups = GradientGroups([[watched[0], frozen], [frozen], []], watched)
    arrive = [lambda gradient, version, index=index: left.append(index) for index in range(2)]
    groups.hold(arrive)
    arrive[0](torch.zeros(1), 0)
    arrive[1](torch.zeros(1), 0)
    assert left == [0, 1]
    groups.release()
    assert left == [0, 1]


def test_equal_parameters_are_told_apart() -> None:
    made = Made((0, 1))
    assert torch.equal(made.params[0], made.params[2])
    made.come(2, 0)
    assert made.indices == [2]
