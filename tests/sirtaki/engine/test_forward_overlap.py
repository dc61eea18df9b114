"""Whether iterations may end in the next forward pass, and with which setting: what is tried and kept."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from fakes.gradients import make_buffers, parameters

from sirtaki.autotune.knobs import KIB, MIB, Cut, Knobs, KnobSpace
from sirtaki.comm.gradients.flags import FLAG_COUNT
from sirtaki.comm.gradients.schedule import IterationPace, ScheduledUnit
from sirtaki.comm.gradients.trace import IterationReport
from sirtaki.comm.plan import Algorithm, CommPlan, GradientLayout, TransportKind
from sirtaki.engine.tuning import overlap as forward_overlap
from sirtaki.engine.tuning.overlap import (
    MOST_TRIED,
    SKIPPED,
    TIMED,
    TIMED_OF_PAIR,
    UNITS,
    ForwardOverlap,
    OverlapChoice,
    OverlapTrials,
    tapered,
)
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

    def reorder_units(self, pace: IterationPace) -> None:
        self.order.append(pace)

    def reordered_units(self, plans: list[CommPlan], pace: IterationPace) -> tuple[list[ScheduledUnit], list[float]]:
        (group,), (plan,) = make_buffers(parameters(((1 << 20) - FLAG_COUNT,)), None).groups, plans
        route = (plan.transport, plan.units[0].algorithm)
        units = [ScheduledUnit(group, unit.start, unit.stop, unit.stream, route) for unit in plan.units]
        return units, [1.0] * len(units)


def test_two_iterations_prepare_it_and_then_all_ranks_have_one_order() -> None:
    control, sync = Control([0.0, 1.0, 2.0, 3.0, 2.5, 0.0, 3.0, 12.0, 1.0]), Sync()
    overlap: Any = ForwardOverlap(control)  # type: ignore[arg-type]
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
    overlap: Any = ForwardOverlap(Control([0.0] * 9))  # type: ignore[arg-type]
    overlap.reads = [0, 1, 2]
    for _ in range(2):
        assert overlap.note(REPORT, sync, KNOBS, SPACE, profiled=PROFILED, joined=True, link=None) is None
    assert overlap.ready
    assert sync.order == []


class Played:
    """A job on a clock of its own; putting off halves its iterations."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, put_off_s: Sequence[float] = (0.5,), link: LinkModel | None = None
    ) -> None:
        self.now_s, self.sync, self.link = 0.0, Sync(), link
        monkeypatch.setattr(forward_overlap.time, "perf_counter", lambda: self.now_s)
        self.overlap: Any = ForwardOverlap(Control([]), tries=True)  # type: ignore[arg-type]
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


TRIED_SPACE = KnobSpace(
    routes=((TransportKind.GLOO, Algorithm.FLAT),), unit_bytes=(64 * KIB, 8 * MIB), streams=(1, 2, 4)
)


LAYOUT = GradientLayout(sizes=(1000, 2 * MIB - 1000), itemsize_bytes=4, dtype="float32", device="cpu")


TUNED = Knobs(unit_bytes=2 * MIB, streams=4, transport=TransportKind.GLOO)


def play(seconds: Callable[[OverlapChoice], float], trials: OverlapTrials) -> list[OverlapChoice]:
    run = []
    while not trials.over:
        run.append(trials.now)
        trials.note(seconds(trials.now))
    return run


def made(tuned: Knobs = TUNED, space: KnobSpace = TRIED_SPACE) -> OverlapTrials:
    return OverlapTrials(tuned, space, [LAYOUT])


@pytest.mark.parametrize(("unit_bytes", "streams"), [(128 * KIB, 1), (512 * KIB, 4), (4 * MIB, 2)])
def test_a_better_setting_is_climbed_to(unit_bytes: int, streams: int) -> None:
    def seconds(choice: OverlapChoice) -> float:
        if not choice.puts_off:
            return 1.0
        off = max(choice.knobs.unit_bytes / unit_bytes, unit_bytes / choice.knobs.unit_bytes)
        return 0.6 + 0.05 * off + 0.05 * abs(choice.knobs.streams - streams)

    trials = made()
    run = play(seconds, trials)
    assert trials.now.puts_off
    assert (trials.now.knobs.unit_bytes, trials.now.knobs.streams) == (unit_bytes, streams)
    assert len({choice for choice in run if choice.puts_off}) <= MOST_TRIED
    assert "KiB" in trials.describe() or "MiB" in trials.describe()


def test_it_is_not_used_where_it_gains_nothing_and_the_tuners_setting_stays() -> None:
    trials = made()
    play(lambda choice: 0.995 if choice.puts_off else 1.0, trials)
    assert trials.now == trials.first
    assert "not used" in trials.describe()


@pytest.mark.parametrize("seconds", [0.01, 100.0])
def test_one_surprising_measurement_neither_keeps_nor_drops_it(seconds: float) -> None:
    for place in range(12):
        for put_off_s, kept in ((1.0, False), (0.9, True)):
            trials, compared = made(), 0
            while not trials.over:
                compared += trials.timed == TIMED_OF_PAIR
                time_s = put_off_s if trials.now.puts_off else 1.0
                trials.note(seconds if compared == place + 1 else time_s)
            assert trials.now.puts_off is kept


@pytest.mark.lengthy
def test_where_it_gains_nothing_noise_hardly_ever_keeps_it() -> None:
    rng = np.random.default_rng(0)
    kept = 0
    for _ in range(300):
        trials = made()
        play(lambda choice: math.exp(0.05 * rng.standard_normal()), trials)
        kept += trials.now.puts_off
    assert kept <= 0.04 * 300


def test_what_the_user_has_fixed_is_not_tried_otherwise() -> None:
    fixed = KnobSpace(routes=TRIED_SPACE.routes, unit_bytes=(2 * MIB, 2 * MIB), streams=(4,))
    run = play(lambda choice: 1.0, made(space=fixed))
    assert {choice.knobs for choice in run} == {TUNED}


def test_planned_units_are_tried_as_they_are_and_tapered_ones_beside_them() -> None:
    planned = Knobs(unit_bytes=2 * MIB, streams=2, transport=TransportKind.GLOO, cuts=(Cut(stop=2 * MIB, stream=0),))
    run = play(lambda choice: 1.0, made(planned))
    assert run[1].knobs == planned
    others = {choice.knobs for choice in run} - {planned}
    assert others
    assert others == {tapered(knobs.but(cuts=None), LAYOUT) for knobs in others}


@pytest.mark.parametrize(
    ("unit_bytes", "numel"), [(4, 3000), (16, 3000), (64 * KIB, 2 * MIB), (100_001, 2 * MIB), (4 * MIB, 2 * MIB)]
)
def test_the_last_units_are_a_half_and_a_quarter_of_the_others(unit_bytes: int, numel: int) -> None:
    layout = replace(LAYOUT, sizes=(1000, numel - 1000))
    knobs = tapered(TUNED.but(unit_bytes=unit_bytes), layout)
    units = [unit.stop - unit.start for unit in knobs.to_plan(layout).units]
    assert sum(units) == numel
    if unit_bytes < 16:
        assert knobs.cuts is None
        return
    unit = unit_bytes // 4
    assert units[-2:] == [unit // 2, numel - sum(units[:-1])]
    assert units[-1] == pytest.approx(unit / 4, abs=1)
    assert max(units[:-2]) - min(units[:-2]) <= 1
    assert units[0] == pytest.approx(unit, rel=0.5)


def test_what_is_expected_to_be_fast_is_tried_first_and_then_the_neighbours_of_what_was() -> None:
    trials = made()
    units = dict[Knobs, int]()

    def expected_s(knobs: Knobs) -> float:
        units[knobs] = len(knobs.to_plan(LAYOUT).units)
        return 10.0 + 0.5 * abs(units[knobs] - 13) + (2.0 if knobs.streams == 1 else 0.0)

    promising = trials.promising(expected_s)
    assert [knobs.streams for knobs in promising] == [2, 4]  # one stream is far from the best
    assert {units[knobs] for knobs in promising} == {13}
    assert max(units.values()) > 20
    assert not trials.informed
    trials.expect(promising)
    assert trials.informed
    best = promising[1]
    run = play(lambda choice: 0.5 if choice.knobs == best else 1.0, trials)
    assert [choice.knobs for choice in run[:4]] == [TUNED, TUNED, *promising]
    assert {choice.knobs.unit_bytes / best.unit_bytes for choice in run[4 : run.index(trials.first, 1)]} == {0.5, 2.0}
    assert trials.now.knobs == best


def test_where_nothing_can_be_expected_it_begins_with_smaller_units() -> None:
    trials = made()
    trials.expect([])
    run = play(lambda choice: 1.0, trials)
    assert run[2].knobs.unit_bytes == LAYOUT.total_bytes // UNITS
