"""A short search after the warm-up: it begins with what runs, and nothing replaces that but what beats it."""

from dataclasses import replace

import pytest
from fakes.warmup_job import BEST, DEFAULT, Job, ListArm, landscape, session, streams
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.autotune.knobs import MIB, Knobs
from sirtaki.autotune.meta.session import Purpose

BUDGET = 20


def test_what_runs_is_measured_first_and_nothing_of_it_is_discarded() -> None:
    first = session(ListArm(), default=BEST, retune=True, budget_iterations=BUDGET).assignment
    assert (first.knobs, first.purpose, first.discarded_iterations) == (BEST, Purpose.DEFAULT, 0)


def test_what_runs_stays_if_nothing_beats_it() -> None:
    arm = ListArm(streams(2), streams(3), replace(BEST, unit_bytes=8 * MIB))
    job = Job(session(arm, default=BEST, retune=True, budget_iterations=BUDGET, seeds=[DEFAULT])).run()
    assert job.result.knobs == BEST
    assert not job.result.tuned
    assert "the setting that ran" in job.result.reason


def test_the_untuned_default_takes_over_where_it_has_become_the_fastest() -> None:
    job = Job(
        session(ListArm(), default=BEST, retune=True, budget_iterations=BUDGET, seeds=[DEFAULT]),
        span_of=lambda knobs: 1.0 / landscape(knobs),
    ).run()
    assert job.result.knobs == DEFAULT
    assert job.result.default_span_s == pytest.approx(1.0 / landscape(BEST)), "what ran"


@given(noise=st.sampled_from([0.0, 0.03, 0.1, 0.3]), seed=st.integers(0, 99), discarded=st.integers(0, 2))
def test_twenty_iterations_are_never_exceeded(noise: float, seed: int, discarded: int) -> None:
    job = Job(
        session(
            default=streams(2), retune=True, budget_iterations=BUDGET, seeds=[DEFAULT], discarded_iterations=discarded
        ),
        noise=noise,
        seed=seed,
    ).run()
    assert job.iterations <= BUDGET


def test_of_a_few_proposals_the_best_is_found_at_a_noise_of_ten_per_cent() -> None:
    def changed(knobs: Knobs) -> float:
        return landscape(replace(knobs, streams=max(1, knobs.streams // 4)))  # four times as many streams are needed

    better = replace(BEST, streams=8)
    found = [
        Job(
            session(ListArm(streams(2), better, streams(6)), default=DEFAULT, retune=True, budget_iterations=BUDGET),
            span_of=changed,
            noise=0.1,
            seed=seed,
        )
        .run()
        .result.knobs
        for seed in range(40)
    ]
    assert found.count(better) >= 30
