"""A paired comparison finds what is faster, hardly ever calls an equal setting faster, and believes no outlier."""

import math
from collections.abc import Generator, Sequence

import numpy as np
import pytest
from scipy.stats import wilcoxon

from bench.paired import NOISES, SCALE_WITHOUT_GAIN, summarise
from sirtaki.autotune.paired import (
    FEWEST_PAIRS,
    FEWEST_PAIRS_KNOWN,
    FIRST_LOOK,
    GUESS_PAIRS,
    PairedComparison,
    Verdict,
    interval,
    pairs_wanted,
)
from sirtaki.errors import TuningError
from sirtaki.measures import Gain

LUCK = (0.001, -0.002, 0.003, -0.001, 0.002, 0.0005, -0.0015, 0.0025, -0.0005, 0.0015, -0.003, 0.001) + (0.0,) * 4
"""Deviations of pairs of a quiet host."""


def compared(leads: Sequence[float], **options: object) -> PairedComparison:
    """Return a comparison that gets these leads until it has a verdict."""
    pairs = PairedComparison(**{"looks": (FEWEST_PAIRS, len(LUCK)), **options})  # type: ignore[arg-type]
    for lead in leads:
        if pairs.verdict is not Verdict.OPEN:
            break
        pairs.add(math.exp(lead), 1.0)
    return pairs


@pytest.mark.lengthy
@pytest.mark.parametrize("noise", NOISES)
def test_equal_settings_are_hardly_ever_called_different(noise: str) -> None:
    proved, n_pairs = summarise(noise, 4000, seed=1, scale=SCALE_WITHOUT_GAIN)
    assert proved <= 0.04
    assert n_pairs < 20.0, "most of them are given up before the last look"


@pytest.mark.parametrize(("noise", "least"), [("normal", 0.99), ("5 % outliers", 0.88), ("t, 2 degrees", 0.8)])
def test_a_gain_of_ten_per_cent_is_found_at_a_scatter_of_five(noise: str, least: float) -> None:
    assert summarise(noise, 200, seed=2, scale=0.05, gain=0.1)[0] >= least


@pytest.mark.parametrize("n_pairs", [6, 7, 10, 15, 24])
def test_the_interval_leaves_out_no_gain_exactly_where_scipys_test_rejects_it(n_pairs: int) -> None:
    rng = np.random.default_rng(n_pairs)
    rejected = 0
    for _ in range(300):
        leads = rng.normal(0.6, 1.0, n_pairs)
        for rate in (0.0158, 0.05):
            p = wilcoxon(leads, alternative="greater", method="exact").pvalue
            assert (interval(leads.tolist(), rate)[1] > 0.0) == (p <= rate)
            rejected += p <= rate
    assert 50 < rejected < 550


@pytest.mark.parametrize("n_pairs", [6, 12, 24])
def test_the_interval_contains_the_true_lead_as_often_as_promised_under_any_noise(n_pairs: int) -> None:
    rng = np.random.default_rng(0)
    missed = np.zeros(2)
    for _ in range(2000):
        _, low, high = interval((0.3 + rng.standard_t(2, n_pairs)).tolist(), 0.02)
        missed += low > 0.3, high < 0.3
    assert (missed / 2000 < 0.03).all()


def test_the_estimate_is_the_median_of_all_means_of_two() -> None:
    assert interval([0.0, 1.0, 5.0], 0.02)[0] == 1.75  # of 0, 0.5, 1, 2.5, 3 and 5


def test_a_gain_is_proved_at_the_first_look_with_an_interval_that_holds_it() -> None:
    pairs = compared([0.05 + luck for luck in LUCK])
    assert (pairs.verdict, pairs.n_pairs) == (Verdict.FASTER, FEWEST_PAIRS)
    assert pairs.gain.low < math.exp(0.05) < pairs.gain.high
    assert pairs.gain.high - pairs.gain.low < 0.01


def test_nothing_is_proved_between_two_looks() -> None:
    leads = [-0.01, *(0.05 + luck for luck in LUCK[1:])]
    pairs = compared(leads[:10])
    assert pairs.gain.low > 1.0
    assert pairs.verdict is Verdict.OPEN
    assert compared(leads).verdict is Verdict.FASTER


@pytest.mark.parametrize("surprise", [-3.0, 3.0])
@pytest.mark.parametrize("place", range(FEWEST_PAIRS))
def test_one_surprising_measurement_decides_nothing(surprise: float, place: int) -> None:
    equal = list(LUCK)
    equal[place] = surprise
    assert compared(equal).verdict is Verdict.NOT_PROVED
    faster = [0.05 + luck for luck in LUCK]
    faster[place] += surprise
    found = compared(faster)
    assert found.verdict is Verdict.FASTER
    assert found.gain.times == pytest.approx(math.exp(0.05), abs=0.003)


def test_a_candidate_that_is_slower_in_each_of_a_few_pairs_is_given_up() -> None:
    pairs = compared([-0.05 + luck for luck in LUCK])
    assert (pairs.verdict, pairs.n_pairs) == (Verdict.SLOWER, GUESS_PAIRS)


def test_a_candidate_that_gains_too_little_is_given_up_and_not_called_slower() -> None:
    pairs = compared([0.005 + luck for luck in LUCK], least_gain=0.01)
    assert (pairs.verdict, pairs.n_pairs) == (Verdict.NOT_PROVED, GUESS_PAIRS)


def test_a_gain_that_an_earlier_job_has_proved_needs_fewer_pairs() -> None:
    earlier = Gain(times=1.05, low=1.03, high=1.07)
    pairs = compared([0.05 + luck for luck in LUCK], looks=(FEWEST_PAIRS_KNOWN,), earlier=earlier)
    assert (pairs.verdict, pairs.n_pairs) == (Verdict.FASTER, FEWEST_PAIRS_KNOWN)
    assert pairs.pooled.high - pairs.pooled.low < earlier.high - earlier.low
    slower = compared([-0.05 + luck for luck in LUCK], looks=(FEWEST_PAIRS_KNOWN,), earlier=earlier)
    assert slower.verdict is Verdict.SLOWER
    with pytest.raises(TuningError, match="numbers of at least 6, found"):
        PairedComparison(looks=(FEWEST_PAIRS_KNOWN,), earlier=Gain(times=1.05, low=0.99, high=1.1))


@pytest.mark.parametrize("looks", [(), (5,), (12, 12), (12, 6), (6, 12, 24)])
def test_looks_that_would_prove_luck_are_rejected(looks: tuple[int, ...]) -> None:
    with pytest.raises(TuningError, match="one or two ascending numbers of at least 6"):
        PairedComparison(looks=looks)


def test_a_busy_host_and_a_drifting_baseline_are_doubts() -> None:
    rough = PairedComparison(looks=(FEWEST_PAIRS,), noise_before=0.02)
    for lead in (0.1, 0.4, 0.7, 1.0, 1.3, 1.6):
        rough.add(math.exp(lead), 1.0)
    assert rough.gain.low > 1.0
    assert rough.verdict is Verdict.NOT_PROVED
    assert "other jobs seem to use the host" in rough.doubt
    drifting = PairedComparison(looks=(FEWEST_PAIRS,), noise_before=0.02)
    for number, luck in enumerate(LUCK[:FEWEST_PAIRS]):
        drifting.add(math.exp(0.1 * number + 0.05 + luck), math.exp(0.1 * number))
    assert drifting.verdict is Verdict.NOT_PROVED
    assert "the default itself became 1.3" in drifting.doubt


@pytest.mark.parametrize("broken", [math.inf, math.nan, 0.0, -1.0])
def test_a_setting_that_cannot_be_run_ends_the_comparison(broken: float) -> None:
    order = ""

    def measured(name: str, seconds: float) -> Generator[str, None, float]:
        nonlocal order
        order += name
        yield name
        return seconds

    pairs = PairedComparison(looks=(6,))
    assert list(pairs.run(lambda: measured("a", 1.0), lambda: measured("b", broken))) == ["a", "b"]
    assert pairs.verdict is Verdict.FAILED
    order = ""
    list(PairedComparison(looks=(6,)).run(lambda: measured("a", 1.0), lambda: measured("b", 0.5), candidate_first=True))
    assert order == "baabbaabbaab"


def test_finished_measurements_are_compared_and_a_few_prove_nothing() -> None:
    assert PairedComparison.of([1.1] * 6, [1.0] * 6).verdict is Verdict.FASTER
    assert PairedComparison.of([1.1] * 5, [1.0] * 5).verdict is not Verdict.FASTER
    assert PairedComparison.of([1.0] * 6, [1.1] * 6).verdict is Verdict.SLOWER
    with pytest.raises(ValueError, match="shorter"):
        PairedComparison.of([1.0], [])


@pytest.mark.parametrize(("lead", "noise"), [(0.05, 0.02), (0.05, 0.03), (0.1, 0.05)])
def test_as_many_pairs_as_are_wanted_prove_a_lead_most_of_the_time(lead: float, noise: float) -> None:
    n_pairs = pairs_wanted(lead, noise, most=40)
    assert 6 <= n_pairs < 40
    rng = np.random.default_rng(0)
    leads = lead + math.sqrt(2.0) * noise * rng.standard_normal((400, n_pairs))
    proved = sum(interval(row.tolist(), FIRST_LOOK)[1] > 0.0 for row in leads)
    assert 0.5 * 400 < proved < 0.97 * 400


def test_no_lead_wants_all_pairs_there_are_and_a_large_one_the_fewest() -> None:
    assert pairs_wanted(0.0, 0.05, most=24) == pairs_wanted(0.001, 0.05, most=24) == 24
    assert pairs_wanted(1.0, 0.05, most=24) == FEWEST_PAIRS
