"""Which settings are tried for the next forward pass to hide communication, and which is kept."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from sirtaki.autotune.knobs import KIB, MIB, Cut, Knobs, KnobSpace
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.engine.tuning.overlap import COUNTS, MOST_TRIED, UNITS, OverlapChoice, OverlapTrials, tapered

SPACE = KnobSpace(routes=((TransportKind.GLOO, Algorithm.FLAT),), unit_bytes=(64 * KIB, 8 * MIB), streams=(1, 2, 4))
LAYOUT = GradientLayout(sizes=(1000, 2 * MIB - 1000), itemsize_bytes=4, dtype="float32", device="cpu")
TUNED = Knobs(unit_bytes=2 * MIB, streams=4, transport=TransportKind.GLOO)


def play(seconds: Callable[[OverlapChoice], float], trials: OverlapTrials) -> list[OverlapChoice]:
    run = []
    while not trials.over:
        run.append(trials.now)
        trials.note(seconds(trials.now))
    return run


def made(tuned: Knobs = TUNED, space: KnobSpace = SPACE) -> OverlapTrials:
    return OverlapTrials(tuned, space, [LAYOUT])


def test_the_tuners_choice_comes_first_without_and_with_it() -> None:
    run = play(lambda choice: 1.0, made())
    assert run[:2] == [OverlapChoice(TUNED, False), OverlapChoice(TUNED, True)]


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


def test_the_first_and_the_best_run_again_before_it_is_decided() -> None:
    trials = made()
    run = play(lambda choice: 0.5 if choice.puts_off and choice.knobs.streams == 2 else 1.0, trials)
    assert run[-2] == trials.first
    assert run[-1] == trials.now


def test_luck_in_one_trial_is_found_out_by_the_repetition() -> None:
    trials, seen = made(), list[OverlapChoice]()

    def seconds(choice: OverlapChoice) -> float:
        lucky = choice.puts_off and choice not in seen and choice.knobs == TUNED
        seen.append(choice)
        return 0.9 if lucky else 1.1 if choice.puts_off else 1.0

    play(seconds, trials)
    assert not trials.now.puts_off


def test_what_the_user_has_fixed_is_not_tried_otherwise() -> None:
    fixed = KnobSpace(routes=SPACE.routes, unit_bytes=(2 * MIB, 2 * MIB), streams=(4,))
    run = play(lambda choice: 1.0, made(space=fixed))
    assert {choice.knobs for choice in run} == {TUNED}


def test_planned_units_are_tried_as_they_are_and_tapered_ones_beside_them() -> None:
    planned = Knobs(unit_bytes=2 * MIB, streams=2, transport=TransportKind.GLOO, cuts=(Cut(stop=2 * MIB, stream=0),))
    run = play(lambda choice: 1.0, made(planned))
    assert run[1].knobs == planned
    others = {choice.knobs for choice in run} - {planned}
    assert others
    assert others == {tapered(replace(knobs, cuts=None), LAYOUT) for knobs in others}


@pytest.mark.parametrize(
    ("unit_bytes", "numel"), [(4, 3000), (16, 3000), (64 * KIB, 2 * MIB), (100_001, 2 * MIB), (4 * MIB, 2 * MIB)]
)
def test_the_last_units_are_a_half_and_a_quarter_of_the_others(unit_bytes: int, numel: int) -> None:
    layout = replace(LAYOUT, sizes=(1000, numel - 1000))
    knobs = tapered(replace(TUNED, unit_bytes=unit_bytes), layout)
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


def test_what_is_too_small_for_that_is_cut_evenly() -> None:
    assert tapered(replace(TUNED, unit_bytes=8 * MIB), LAYOUT).cuts is None


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
    assert {choice.knobs.unit_bytes / best.unit_bytes for choice in run[4:-2]} == {0.5, 2.0}
    assert trials.now.knobs == best


def test_of_what_is_expected_to_be_about_equal_it_takes_the_fewest_units() -> None:
    trials = made()
    promising = trials.promising(lambda knobs: 1.0 + 1e-4 * knobs.unit_bytes / MIB)
    assert [knobs.streams for knobs in promising] == [1, 2, 4]
    assert {knobs.unit_bytes for knobs in promising} == {LAYOUT.total_bytes // min(COUNTS)}


def test_where_nothing_can_be_expected_it_begins_with_smaller_units() -> None:
    trials = made()
    trials.expect([])
    run = play(lambda choice: 1.0, trials)
    assert run[2].knobs.unit_bytes == LAYOUT.total_bytes // UNITS
