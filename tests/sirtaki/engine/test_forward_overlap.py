"""What is learned and agreed on before iterations end in the next forward pass."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from fakes.gradients import make_buffers, parameters

from sirtaki.autotune.knobs import KIB, Knobs, KnobSpace
from sirtaki.comm.gradients.buffers import FLAG_COUNT
from sirtaki.comm.gradients.iteration import IterationReport
from sirtaki.comm.gradients.schedule import IterationPace, ScheduledUnit
from sirtaki.comm.plan import Algorithm, CommPlan, GradientLayout, TransportKind
from sirtaki.engine.tuning import overlap as forward_overlap
from sirtaki.engine.tuning.overlap import SKIPPED, TIMED, ForwardOverlap
from sirtaki.engine.tuning.plans import plans_for
from sirtaki.measures import LinkModel

REPORT = IterationReport(span_s=4.0, backward_s=1.0)
PROFILED = IterationReport(span_s=9.0, backward_s=2.0, ready_s=(2.0, 1.0, 0.0), profiled=True)
KNOBS = Knobs(unit_bytes=512 * KIB, streams=2, transport=TransportKind.GLOO)
SPACE = KnobSpace(routes=((TransportKind.GLOO, Algorithm.FLAT),), streams=(1, 2))


class Control:
    """Of two ranks: what the other one says is added."""

    rank = 0

    def __init__(self, others: list[float]) -> None:
        self.others, self.said = others, list[list[float]]()

    def broadcast(self, value: Any) -> Any:
        return value

    def total(self, values: Any) -> Any:
        self.said.append([float(value) for value in values])
        return np.array(values) + np.array(self.others if len(values) == len(self.others) else [0.0] * len(values))


class Sync:
    n_params, on_streams = 3, False
    layouts = (GradientLayout(sizes=(1 << 20,)),)

    def __init__(self) -> None:
        self.order: list[IterationPace] = []

    def overtake(self, pace: IterationPace) -> None:
        self.order.append(pace)

    def overtaken(self, plans: list[CommPlan], pace: IterationPace) -> tuple[list[ScheduledUnit], list[float]]:
        (group,), (plan,) = make_buffers(parameters(((1 << 20) - FLAG_COUNT,)), None).groups, plans
        route = (plan.transport, plan.units[0].algorithm)
        units = [ScheduledUnit(group, unit.start, unit.stop, unit.stream, route) for unit in plan.units]
        return units, [1.0] * len(units)


def test_two_iterations_prepare_it_and_then_all_ranks_have_one_order() -> None:
    control, sync = Control([0.0, 1.0, 2.0, 3.0, 2.5, 0.0, 3.0, 12.0, 1.0]), Sync()
    overlap: Any = ForwardOverlap(control, wanted=True)  # type: ignore[arg-type]
    states = []
    for _ in range(3):
        states.append((overlap.learning, overlap.ready))
        overlap.reads = [2, 0]
        assert overlap.note(REPORT, sync, KNOBS, SPACE, profiled=PROFILED, joined=False, link=None) is None
    assert states == [(False, False), (True, False), (False, True)]
    # What is never read is last; gradients come in half the time that they took while they were profiled.
    assert control.said == [[1.0, 3.0, 0.0, 1.0, 0.5, 0.0, 1.0, 4.0, 1.0]]
    (pace,) = sync.order
    assert (pace.needed, pace.ready_s, pace.backward_s) == ([0.5, 2.0, 1.0], [2.0, 1.5, 0.0], 2.0)
    assert pace.s_per_byte == pytest.approx(8.0 / (1 << 22))
    overlap.begin()
    assert not overlap.ready


def test_where_nobody_knows_the_order_stays() -> None:
    sync = Sync()
    overlap: Any = ForwardOverlap(Control([0.0] * 9), wanted=True)  # type: ignore[arg-type]
    overlap.reads = [0, 1, 2]
    for _ in range(2):
        assert overlap.note(REPORT, sync, KNOBS, SPACE, profiled=PROFILED, joined=True, link=None) is None
    assert overlap.ready
    assert sync.order == []


def test_where_it_is_not_wanted_nothing_is_said() -> None:
    control = Control([])
    overlap: Any = ForwardOverlap(control, wanted=False)  # type: ignore[arg-type]
    for _ in range(5):
        overlap.note(REPORT, Sync(), KNOBS, SPACE, profiled=PROFILED, joined=False, link=None)
    assert not overlap.ready
    assert not overlap.learning
    assert control.said == []


class Played:
    """A job on a clock of its own; putting off halves its iterations."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, put_off_s: Sequence[float] = (0.5,), link: LinkModel | None = None
    ) -> None:
        self.now_s, self.sync, self.link = 0.0, Sync(), link
        monkeypatch.setattr(forward_overlap.time, "perf_counter", lambda: self.now_s)
        self.overlap: Any = ForwardOverlap(Control([]), wanted=True, tries=True)  # type: ignore[arg-type]
        self.overlap.reads = [0, 1, 2]
        self.knobs, self.put_off = KNOBS, list[bool]()
        self.put_off_s = cycle(put_off_s)

    def report(self) -> IterationReport:
        return REPORT

    def iterate(self, count: int) -> None:
        for _ in range(count):
            self.put_off.append(self.overlap.ready)
            self.now_s += next(self.put_off_s) if self.overlap.ready else 1.0
            knobs = self.overlap.note(
                self.report(), self.sync, self.knobs, SPACE, profiled=PROFILED, joined=False, link=self.link
            )
            if knobs is not None:
                self.knobs = knobs
                self.overlap.order(self.sync)


TRIAL = SKIPPED + TIMED + 1
LINK = LinkModel(alpha_s=0.0, throughput=(1.0,))


def test_it_is_tried_first_and_kept_where_iterations_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    played.iterate(2 + TRIAL)
    assert played.put_off == [False] * (2 + TRIAL)
    assert played.sync.order  # of the next trial
    played.iterate(TRIAL)
    assert played.put_off[2 + TRIAL :] == [True] * (TRIAL - 1) + [False]  # in the last one ranks agree
    played.iterate(10 * TRIAL)
    assert not played.overlap.trying
    assert played.overlap.ready


def test_what_a_replayed_iteration_is_about_shortest_with_is_tried_after_the_tuners_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def replayed_s(units: list[ScheduledUnit], come_s: list[float], pace: Any, *, forward_s: float, link: Any) -> float:
        assert (len(units), forward_s, link) == (len(come_s), 0.0, LINK)  # a span of 4 s in an iteration of 1 s
        return 10.0 + abs(len(units) - 12) / (1 + len({unit.stream for unit in units}))

    monkeypatch.setattr(forward_overlap, "put_off_iteration_s", replayed_s)
    played, tried = Played(monkeypatch, link=LINK), list[Knobs]()
    played.iterate(2 + TRIAL)
    for _ in range(3):
        tried.append(played.overlap.trials.now.knobs)
        played.iterate(TRIAL)
    counts = [len(plans_for(knobs, Sync.layouts)[0].units) for knobs in tried]
    assert tried[0] == KNOBS
    assert [knobs.streams for knobs in tried] == [2, 1, 2]
    assert counts[1:] == [13, 13]


@pytest.mark.parametrize("put_off_s", [(1.0,), (0.5, 0.5, 2.5)])
def test_it_is_left_where_nothing_is_gained(monkeypatch: pytest.MonkeyPatch, put_off_s: Sequence[float]) -> None:
    played = Played(monkeypatch, put_off_s=put_off_s)
    played.iterate(2 + 12 * TRIAL)
    assert not played.overlap.trying
    assert not played.overlap.ready
    assert played.knobs == KNOBS


def test_another_order_ends_trials_and_keeps_what_they_have_found(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    played.iterate(2 + 2 * TRIAL)
    played.overlap.begin()
    assert played.overlap.trials is None
    played.iterate(2 + 12 * TRIAL)
    found = played.overlap.trials
    played.overlap.begin()
    assert not played.overlap.ready
    played.iterate(2)
    assert played.overlap.ready
    assert played.overlap.trials is found
    played.overlap.forget()
    assert played.overlap.trials is None


def test_what_is_kept_leaves_in_the_order_in_which_it_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    played, s_per_byte = Played(monkeypatch), dict[Knobs, set[float]]()
    reports = iter(IterationReport(span_s=4.0 + number, backward_s=1.0) for number in range(1000))
    monkeypatch.setattr(played, "report", lambda: next(reports))
    for _ in range(14 * TRIAL):
        played.iterate(1)
        if played.overlap.ready:
            s_per_byte.setdefault(played.knobs, set()).add(played.sync.order[-1].s_per_byte)
    assert not played.overlap.trying
    assert len(s_per_byte) > 2
    assert all(len(found) == 1 for found in s_per_byte.values())
    assert len(set[float]().union(*s_per_byte.values())) == len(s_per_byte)
