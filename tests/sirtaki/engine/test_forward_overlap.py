"""What is learned and agreed on before iterations end in the next forward pass."""

from typing import Any

import numpy as np
import pytest

from sirtaki.comm.gradients.iteration_report import IterationReport
from sirtaki.engine.forward_overlap import ForwardOverlap

REPORT = IterationReport(span_s=4.0, backward_s=1.0)


class Control:
    """Of two ranks: what the other one says is added."""

    def __init__(self, others: list[float]) -> None:
        self.others, self.said = others, list[list[float]]()

    def broadcast(self, value: bool) -> bool:
        return value

    def total(self, values: Any) -> Any:
        self.said.append([float(value) for value in values])
        return np.array(values) + np.array(self.others)


class Sync:
    n_params = 3

    def __init__(self) -> None:
        self.order: list[tuple[list[float], float]] = []

    def overtake(self, needed: list[float], hidden: float) -> None:
        self.order.append((needed, hidden))


def test_two_iterations_prepare_it_and_then_all_ranks_have_one_order() -> None:
    control, sync = Control([0.0, 1.0, 2.0, 2.0, 4.0, 1.0]), Sync()
    overlap: Any = ForwardOverlap(control, wanted=True)  # type: ignore[arg-type]
    states = []
    for _ in range(3):
        states.append((overlap.learning, overlap.ready))
        overlap.reads = [2, 0]
        overlap.note(REPORT, sync, joined=False)
    assert states == [(False, False), (True, False), (False, True)]
    assert control.said == [[1.0, 3.0, 0.0, 1.0, 4.0, 1.0]]  # what is never read is last
    assert sync.order == [([1.0, 4.0, 2.0], pytest.approx(3 / 8))]
    overlap.begin()
    assert not overlap.ready


def test_where_nobody_knows_the_order_stays() -> None:
    sync = Sync()
    overlap: Any = ForwardOverlap(Control([0.0] * 6), wanted=True)  # type: ignore[arg-type]
    overlap.reads = [0, 1, 2]
    for _ in range(2):
        overlap.note(REPORT, sync, joined=True)
    assert overlap.ready
    assert sync.order == []


def test_where_it_is_not_wanted_nothing_is_said() -> None:
    control = Control([])
    overlap: Any = ForwardOverlap(control, wanted=False)  # type: ignore[arg-type]
    for _ in range(5):
        overlap.note(REPORT, Sync(), joined=False)
    assert not overlap.ready
    assert not overlap.learning
    assert control.said == []
