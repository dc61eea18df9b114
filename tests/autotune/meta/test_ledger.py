"""Measurements pile up setting by setting; leads are counted in standard errors of learnt noise."""

import math

import numpy as np
import pytest

from sirtaki.autotune.knobs import MIB, Knobs
from sirtaki.autotune.meta.session import PRIOR_NOISE, Ledger
from sirtaki.autotune.trial import Proposal, TrialStatus
from sirtaki.comm.plan import TransportKind


def knobs(streams: int) -> Knobs:
    return Knobs(unit_bytes=MIB, streams=streams, transport=TransportKind.GLOO)


def ledger() -> Ledger:
    return Ledger(identity=lambda knobs: knobs)


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1])
def test_the_noise_is_learnt_from_repeated_measurements_and_not_from_differences_of_settings(noise: float) -> None:
    rng = np.random.default_rng(0)
    book = ledger()
    for streams in range(1, 101):
        book.add(knobs(streams), arm="a", spans_s=(streams * np.exp(noise * rng.standard_normal(3))).tolist())
    assert book.noise == pytest.approx(noise, rel=0.2)


def test_without_repeats_the_noise_is_the_usual_one() -> None:
    book = ledger()
    assert book.noise == PRIOR_NOISE
    book.add(knobs(1), arm="a", spans_s=[1.0])
    book.add(knobs(2), arm="a", spans_s=[9.0])
    assert book.noise == PRIOR_NOISE


def test_a_few_outliers_do_not_make_the_noise_large() -> None:
    book = ledger()
    for streams in range(1, 11):
        book.add(knobs(streams), arm="a", spans_s=[1.0, 1.01])
    book.add(knobs(11), arm="a", spans_s=[1.0, 50.0])
    assert book.noise < 0.04


def test_spans_of_one_setting_pile_up_under_the_first_arms_name() -> None:
    book = ledger()
    book.add(knobs(1), arm="a", spans_s=[3.0])
    setting = book.add(knobs(1), arm="b", spans_s=[1.0, 2.0])
    assert (setting.arm, setting.spans_s, setting.span_s, setting.spread_s) == ("a", [3.0, 1.0, 2.0], 2.0, 1.0)
    assert len(book) == 1


def test_settings_with_one_identity_are_one() -> None:
    book = Ledger(identity=lambda knobs: knobs.unit_bytes)
    book.add(knobs(1), arm="a", spans_s=[1.0])
    assert book.find(knobs(5)) is not None


@pytest.mark.parametrize("span_s", [math.inf, math.nan, 0.0, -1.0])
def test_a_span_that_cannot_be_is_a_failure(span_s: float) -> None:
    book = ledger()
    good = book.add(knobs(1), arm="a", spans_s=[1.0])
    bad = book.add(knobs(2), arm="a", spans_s=[1.0, span_s])
    assert bad.failed
    assert math.isinf(bad.span_s)
    assert bad.as_trial(Proposal(arm="a", knobs=knobs(2))).status is TrialStatus.FAILED
    assert book.ranked() == [good]
    assert book.lead(good, bad) == math.inf == -book.lead(bad, good)
    assert book.lead(bad, bad) == 0.0


def test_a_lead_grows_with_the_measurements_and_is_the_same_seen_from_the_other_side() -> None:
    few, many = ledger(), ledger()
    for book, repeats in ((few, 1), (many, 4)):
        book.add(knobs(1), arm="a", spans_s=[1.0] * repeats)
        book.add(knobs(2), arm="a", spans_s=[1.1] * repeats)
    leads = []
    for book in (few, many):
        first, second = book.ranked()
        assert book.lead(first, second) == pytest.approx(-book.lead(second, first))
        leads.append(book.lead(first, second))
    assert 0.0 < 2.0 * leads[0] <= leads[1]


def test_the_span_takes_an_outlier_like_a_median_and_two_spans_like_a_mean() -> None:
    book = ledger()
    assert book.add(knobs(1), arm="a", spans_s=[1.0, 2.0]).span_s == 1.5
    assert book.add(knobs(2), arm="a", spans_s=[1.0, 1.1, 0.9, 1.0, 50.0]).span_s == pytest.approx(1.05)


def test_the_span_needs_fewer_measurements_than_a_median() -> None:
    rng = np.random.default_rng(0)
    samples = np.exp(0.1 * rng.standard_normal((2000, 7)))
    spans = [ledger().add(knobs(1), arm="a", spans_s=row.tolist()).span_s for row in samples]
    assert np.std(spans) < 0.9 * np.std(np.median(samples, axis=1))
