"""A change of communication is noticed by all ranks alike, noise is not, and settings are tried again."""

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import RunRanks

from sirtaki.autotune.drift import (
    COOL_DOWN,
    FIRST_PAUSE,
    LONG,
    LONGER,
    MOST_FAILURES,
    REFERENCE,
    SKIPPED,
    DriftWatch,
    RefinementSchedule,
)
from sirtaki.autotune.knobs import MIB, Knobs
from sirtaki.comm.gradients.flags import Drift
from sirtaki.comm.plan import TransportKind
from sirtaki.engine.tuning.trial_log import read_log

Noise = Callable[[np.random.Generator, int], np.ndarray]


def gaussian(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.exp(0.1 * rng.standard_normal(n))


def heavy_tailed(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.exp(0.1 * rng.standard_t(2, n))


def with_hiccups(rng: np.random.Generator, n: int) -> np.ndarray:
    return gaussian(rng, n) * np.where(rng.random(n) < 0.05, 5.0, 1.0)


def with_two_kinds_of_steps(rng: np.random.Generator, n: int) -> np.ndarray:
    return gaussian(rng, n) * np.where(rng.random(n) < 0.3, 3.0, 1.0)


def noisy(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.exp(0.4 * rng.standard_normal(n))


def warmed_up(rng: np.random.Generator, noise: Noise = gaussian) -> DriftWatch:
    watch = DriftWatch()
    for span_s in noise(rng, SKIPPED + REFERENCE):
        watch.add(float(span_s))
    return watch


def iterations_until(watch: DriftWatch, spans_s: np.ndarray) -> int | None:
    """After how many of these iterations the watch first finds something."""
    for number, span_s in enumerate(spans_s.tolist(), start=1):
        watch.add(span_s)
        if watch.drift is not Drift.USUAL:
            return number
    return None


@pytest.mark.lengthy
@pytest.mark.parametrize("noise", [gaussian, heavy_tailed, with_hiccups, with_two_kinds_of_steps, noisy])
def test_a_hundred_thousand_iterations_of_noise_are_no_change(noise: Noise) -> None:
    rng = np.random.default_rng(0)
    for _ in range(4):
        assert iterations_until(warmed_up(rng, noise), noise(rng, 25_000)) is None


@pytest.mark.parametrize(("factor", "pace"), [(1.5, Drift.SLOWER), (1 / 1.5, Drift.FASTER)])
def test_a_change_by_half_is_found_within_fifteen_iterations_as_a_rule(factor: float, pace: Drift) -> None:
    rng, took = np.random.default_rng(0), []
    for _ in range(200):
        watch = warmed_up(rng)
        took.append(iterations_until(watch, factor * gaussian(rng, 200)))
        assert watch.drift is pace
        assert watch.ratio == pytest.approx(factor, rel=0.3)
    assert sorted(took, key=lambda n: n or 999)[180] <= 15


@pytest.mark.parametrize(("factor", "pace"), [(4.0, Drift.SLOWER), (0.25, Drift.FASTER)])
def test_a_large_change_is_found_at_once_but_a_few_iterations_are_no_change(factor: float, pace: Drift) -> None:
    watch = warmed_up(np.random.default_rng(0))
    assert iterations_until(watch, np.full(5, factor)) is None
    assert iterations_until(watch, np.ones(200)) is None
    assert iterations_until(watch, np.full(10, factor)) == 6
    assert watch.drift is pace


def test_re_tunes_in_quick_succession_are_halved_each_time_until_a_long_quiet_time() -> None:
    watch, spans_s, waited = DriftWatch(), 1.0, []
    for quiet in (0, 0, 0, 0, LONG * 8 * COOL_DOWN, 0):
        for _ in range(quiet):
            watch.add(spans_s)
        waited.append(0)
        while watch.drift is Drift.USUAL:
            # An oscillation that is always there again when there might be a re-tune.
            watch.add(spans_s if watch._iterations < SKIPPED + REFERENCE else 3 * spans_s)
            waited[-1] += 1
        watch.retuned()
    assert waited[1:4] == [COOL_DOWN, 2 * COOL_DOWN, 4 * COOL_DOWN]
    assert waited[5] == COOL_DOWN


def test_all_ranks_count_alike_whether_or_not_they_have_joined() -> None:
    watch = DriftWatch()
    for _ in range(SKIPPED + REFERENCE):
        assert not watch.due
        watch.add(math.nan)
    assert watch.due
    assert math.isnan(watch.ratio)
    watch.add(1.0)
    assert watch.drift is Drift.USUAL


def test_another_order_of_the_gradients_is_no_change_of_communication() -> None:
    watch = warmed_up(np.random.default_rng(0))
    watch.reordered()
    assert iterations_until(watch, np.full(200, 3.0)) is None


RESTLESS = {"SIRTAKI_WARMUP_ITERATIONS": "7", "SIRTAKI_REGISTRY": "off"}


def re_tunes(output: str, ranks: int) -> int:
    """Return the number of re-tunings, which must be equal on all ranks."""
    assert output.count("on all ranks alike: True") == ranks
    counts = {int(count) for count in re.findall(r"re-tunes (\d+)", output)}
    assert len(counts) == 1
    return counts.pop()


@pytest.mark.integration
def test_a_slower_link_is_noticed_by_all_ranks_and_settings_are_tried_again(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    env = {
        "SIRTAKI_WARMUP_ITERATIONS": "15",
        "SIRTAKI_REFINE_UNTIL": "0",  # because a refinement might begin when the link has just become slower
        "SIRTAKI_TRIAL_LOG": str(tmp_path / "trials.jsonl"),
    }
    job = run_ranks("retuning.py", 2, "slower", 450, env=env, timeout_s=120)
    assert re_tunes(job.stdout, 2) == 1
    assert re.search(
        r"communication takes \d.* times as long as when this setting was chosen: tuning again", job.stderr
    )
    assert "tuned again in" in job.stderr or "the setting stays" in job.stderr
    log = read_log(tmp_path / "trials.jsonl")
    assert log.result is not None
    assert [retune.result is not None for retune in log.retunes] == [True]
    assert log.retunes[0].measurements


def test_pauses_between_refinements_grow_until_one_succeeds_and_end_after_many_failures() -> None:
    schedule, began = RefinementSchedule(10_000), list[int]()
    for number in range(1, 10_000):
        if schedule.add():
            began.append(number)
            schedule.ended(10, improved=len(began) == 3)
    grown = (0, 1, 2, 2, 3, 4, 5, 6, 7)
    pauses = [round(FIRST_PAUSE * LONGER**times) for times in grown]
    assert [later - earlier for earlier, later in itertools.pairwise([0, *began])] == pauses
    assert len(began) == 3 + MOST_FAILURES


def test_no_refinement_begins_after_the_last_iteration() -> None:
    schedule, began = RefinementSchedule(120), list[int]()
    for number in range(1, 200):
        if schedule.add():
            began.append(number)
            schedule.ended(10, improved=True)
    assert began == [FIRST_PAUSE, 2 * FIRST_PAUSE]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("variables", "refined"),
    [
        ({"SIRTAKI_REFINE_UNTIL": "500"}, True),
        ({"SIRTAKI_REFINE_UNTIL": "0"}, False),
        ({"SIRTAKI_FREEZE_AFTER": "60"}, False),
    ],
    ids=["usual", "off", "frozen"],
)
def test_a_tuned_job_changes_to_faster_settings_found_later_unless_it_is_frozen(
    run_ranks: RunRanks, variables: dict[str, str], refined: bool
) -> None:
    env = {"SIRTAKI_WARMUP_ITERATIONS": "6", "SIRTAKI_TRANSPORT": "gloo", **variables}
    job = run_ranks("retuning.py", 2, "refined", 800 if refined else 300, env=env, timeout_s=120)
    assert job.stdout.count("streams 4" if refined else "changes 0") == 2
    changed = re.search("changed to a faster setting.*; stored in the registry", job.stderr)
    assert (changed is not None) is refined


@pytest.mark.parametrize(
    ("ranks", "seed", "streams"),
    [
        (2, 1, ""),
        pytest.param(3, 1, "", marks=pytest.mark.slow),
        *(pytest.param(ranks, seed, "", marks=pytest.mark.slow) for ranks in (2, 3, 4, 5) for seed in (2, 3, 5)),
        *(pytest.param(ranks, seed, "1", marks=pytest.mark.slow) for ranks in (2, 3, 4) for seed in (2, 3, 5, 10)),
    ],
)
def test_training_stays_right_if_ranks_tune_again_at_every_opportunity(
    run_ranks: RunRanks, ranks: int, seed: int, streams: str
) -> None:
    """With ranks that join, backward passes that raise, and two optimizers."""
    env = {**RESTLESS, **({"SIRTAKI_TEST_STREAMS": streams} if streams else {})}
    assert re_tunes(run_ranks("retuning.py", ranks, "restless", seed, 160, env=env, timeout_s=150).stdout, ranks) > 1


KNOBS = Knobs(unit_bytes=MIB, streams=1, transport=TransportKind.GLOO)
