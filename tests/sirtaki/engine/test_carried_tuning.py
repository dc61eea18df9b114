"""What a generation's tuner has found is kept for the same parameters, and used as far as it holds in the next one."""

import torch

from sirtaki.autotune.knobs import KIB, MIB, Knobs, KnobSpace
from sirtaki.autotune.meta.session import Purpose
from sirtaki.autotune.trial import Trial
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.engine.tuning.cache import TuningCache
from sirtaki.engine.tuning.coordinator import TuningCoordinator
from sirtaki.engine.tuning.plans import NOTHING_BROUGHT, CarriedTuning, Carrying, key_of
from sirtaki.settings import Settings

ROUTE = (TransportKind.GLOO, Algorithm.FLAT)
SPACE = KnobSpace(routes=(ROUTE,), unit_bytes=(64 * KIB, 64 * MIB), streams=(1, 2, 4, 8))
DEFAULT = Knobs(unit_bytes=MIB, streams=1, transport=ROUTE[0])
WINNER = Knobs(unit_bytes=2 * MIB, streams=4, transport=ROUTE[0])
HERE, ELSEWHERE = (0, 0, 0), (0, 0)


class Found:
    """What decides."""

    def __init__(self, knobs: Knobs, trials: tuple[Trial, ...]) -> None:
        self._found = knobs, trials

    def hand_over(self) -> tuple[Knobs, tuple[Trial, ...]]:
        return self._found


def carrying(knobs: Knobs, *, settled: bool, trials: tuple[Trial, ...] = (), now: tuple[int, ...] = HERE) -> Carrying:
    """What was left by a generation that was `HERE`, for one that is elsewhere perhaps."""
    carried, params = CarriedTuning(), [torch.zeros(2)]
    before = Carrying(carried, ["a"], params, HERE)
    before.leave(None, None)  # which has not begun
    assert before.before is None
    before.kept = knobs if settled else None
    before.leave(DEFAULT, Found(knobs, trials))
    before = Carrying(carried, ["a"], params, HERE)
    before.leave(None, None)
    return Carrying(carried, ["a"], params, now)


LAYOUTS = [GradientLayout(sizes=(1 << 20,) * 8)]


def coordinator(
    brought: Carrying = NOTHING_BROUGHT, space: KnobSpace = SPACE, *, goes_on: bool = False
) -> TuningCoordinator:
    settings = Settings.from_environ({"SIRTAKI_REGISTRY": "off"})
    made = TuningCoordinator(
        settings, TuningCache(settings, [], ["host"] * 2), default=DEFAULT, arms=None, discarded_iterations=1
    )
    assert made.recall(LAYOUTS, space, brought) == goes_on
    return made


def tried(made: TuningCoordinator) -> list[Knobs]:
    """What runs until something is kept, one after the other."""
    ran = []
    while (now := made.assignment).purpose is not Purpose.KEPT:
        ran.append(now.knobs)
        made.record([0.5 if now.knobs == WINNER else 1.0] * now.measured_iterations, iteration=len(ran))
    return ran


def begin(made: TuningCoordinator) -> None:
    made.search(SPACE, SPACE, lambda: None)


def test_a_winner_runs_on_without_a_search() -> None:
    made = coordinator(carrying(WINNER, settled=True, now=ELSEWHERE), goes_on=True)
    assert (made.assignment.knobs, made.assignment.purpose) == (WINNER, Purpose.KEPT)


def test_a_winner_that_is_not_possible_any_more_is_searched_anew() -> None:
    narrow = KnobSpace(routes=(ROUTE,), unit_bytes=(64 * KIB, 64 * MIB), streams=(1, 2))
    coordinator(carrying(WINNER, settled=True), narrow)


def test_an_unfinished_warm_up_goes_on_after_its_trials_in_the_same_place_only() -> None:
    first = coordinator()
    begin(first)
    for number in range(12):
        now = first.assignment
        first.record([1.0] * now.measured_iterations, iteration=number)
    found = first.hand_over()
    assert found is not None
    knobs, trials = found
    assert len(trials) >= 3
    assert first.assignment.purpose is Purpose.KEPT  # it has ended
    again = coordinator(carrying(knobs, settled=False, trials=trials))
    begin(again)
    fresh = coordinator()
    begin(fresh)
    assert len(tried(again)) < len(tried(fresh))
    elsewhere = coordinator(carrying(WINNER, settled=False, trials=trials, now=ELSEWHERE))
    begin(elsewhere)
    assert WINNER in tried(elsewhere)


def test_parameters_are_known_again_by_names_shapes_and_dtypes() -> None:
    known = key_of(["a"], [torch.zeros(2, 3)])
    assert key_of(["a"], [torch.ones(2, 3)]) == known
    others = (["b"], [torch.zeros(2, 3)]), (["a"], [torch.zeros(3, 2)]), (["a"], [torch.zeros(2, 3).double()]), ([], [])
    assert len({known, *(key_of(*other) for other in others)}) == 1 + len(others)


def test_where_ranks_stay_nothing_is_left() -> None:
    alone = Carrying(None, ["a"], [torch.zeros(2)], HERE)
    alone.kept = WINNER
    alone.leave(WINNER, None)
    assert (alone.before, alone.going_on) == (None, False)
