"""The finals of a warm-up: which setting is kept in the end."""

from dataclasses import replace

import pytest
from fakes.warmup_job import BEST, DEFAULT, SPACE, Believer, Job, ListArm, landscape, session, streams

from sirtaki.autotune.arms.techniques import GridArm
from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.meta.session import FINALS_ARM, Purpose


def test_close_finalists_are_measured_again_and_the_lucky_one_loses() -> None:
    """Two settings; the truly slower one was lucky in its trial."""
    lucky, good = streams(2), BEST
    spans = {lucky: iter([0.095, 0.096, *[0.108] * 50]), good: iter([0.1] * 50), DEFAULT: iter([0.2] * 50)}
    job = Job(session(ListArm(lucky, good)), span_of=lambda knobs: next(spans[knobs])).run()
    assert lucky in job.run_for(Purpose.FINALS)
    assert job.result.knobs == good
    assert any(trial.arm == FINALS_ARM for trial in job.session.trials)


def test_a_setting_that_the_surrogate_believes_in_comes_to_the_finals() -> None:
    near = [*(streams(count) for count in (2, 3, 4, 6, 8)), replace(BEST, streams=2)]
    spans = {knobs: 0.1 + 0.001 * i for i, knobs in enumerate(near)} | {DEFAULT: 0.2}
    doubted = Job(session(ListArm(*near)), span_of=spans.__getitem__).run()
    believed = Job(session(Believer(near[-1], *near)), span_of=spans.__getitem__).run()
    assert near[-1] not in doubted.run_for(Purpose.FINALS)
    assert near[-1] in believed.run_for(Purpose.FINALS)


def test_the_finals_take_more_of_the_budget_the_noisier_it_is() -> None:
    def share(noise: float) -> float:
        job = Job(session(GridArm(SPACE)), noise=noise).run()
        in_finals = [now.measured_iterations for now in job.assignments if now.purpose is Purpose.FINALS]
        return sum(in_finals) / job.iterations

    assert share(0.01) < 0.25 < 0.3 < share(0.2)


def test_a_winner_that_loses_to_the_default_in_alternation_is_not_kept() -> None:
    def shifting(knobs: Knobs) -> float:
        guarding = job.session.assignment.purpose is Purpose.FINALS
        return {DEFAULT: 0.1, BEST: 0.2 if guarding else 0.05}[knobs]

    job = Job(session(ListArm(BEST)), span_of=shifting)
    job.run()
    assert job.result.knobs == DEFAULT
    assert not job.result.tuned
    assert "no finalist beat the default" in job.result.reason


@pytest.mark.parametrize("noise", [0.03, 0.1])
def test_the_kept_setting_is_not_slower_than_the_default_beyond_the_noise(noise: float) -> None:
    """A landscape where nothing beats the default: only luck can look better."""
    for seed in range(30):
        job = Job(session(GridArm(SPACE)), span_of=lambda knobs: 1.0 / landscape(BEST), noise=noise, seed=seed).run()
        assert job.result.best_span_s <= job.result.default_span_s * (1.0 + 2.0 * noise)
    slower = {seed: Job(session(GridArm(SPACE), default=BEST), noise=noise, seed=seed).run() for seed in range(30)}
    assert all(landscape(job.result.knobs) <= landscape(BEST) * (1.0 + noise) for job in slower.values())
