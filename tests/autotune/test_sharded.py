"""The search for the fastest setting of sharded training: it keeps what is faster, and nothing that only seems so."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from sirtaki.autotune.sharded import ShardKnobs, ShardSession, ShardSpace

SPACE = ShardSpace(modules=9, streams=(1, 2, 3, 4, 6, 8), whole_bytes=(100,) * 9, memory_bytes=0)
DEFAULT = ShardKnobs(streams=3)


def played(
    span_s: Callable[[ShardKnobs], float],
    *,
    space: ShardSpace = SPACE,
    budget: int = 200,
    noise: float = 0.0,
    seed: int = 0,
    first: ShardKnobs | None = None,
) -> tuple[ShardSession, int]:
    """A whole search on a job whose steps take so long; and how many it took."""
    session, steps = ShardSession(space, DEFAULT, budget=budget, first=first), 0
    rng = np.random.default_rng(seed)
    while not session.done:
        assert session.knobs in space
        session.record(span_s(session.knobs) * math.exp(noise * rng.standard_normal()))
        steps += 1
    return session, steps


def test_it_climbs_to_the_fastest_setting_within_its_budget() -> None:
    def span_s(knobs: ShardKnobs) -> float:
        return 1.0 + 0.2 * abs(math.log2(knobs.streams / 6)) + 0.05 * abs(knobs.ahead - 2) - 0.04 * (knobs.kept == 1)

    session, steps = played(span_s, noise=0.005)
    assert session.knobs == ShardKnobs(streams=6, ahead=2, kept=1)
    assert session.proved is not None
    assert session.proved.times == pytest.approx(1.25 / 0.96, abs=0.05)
    assert 1.0 < session.proved.low < 1.25 / 0.96 < session.proved.high
    assert steps <= 200


def test_where_nothing_helps_the_default_stays_whatever_the_noise() -> None:
    kept = [played(lambda knobs: 1.0, noise=0.05, seed=seed, budget=100)[0].knobs for seed in range(40)]
    assert sum(knobs != DEFAULT for knobs in kept) <= 2


def test_a_search_and_its_last_proof_take_no_more_steps_than_is_said() -> None:
    spent = []
    for seed in range(60):
        session, steps = played(lambda knobs: 1.0 - 0.1 * knobs.kept, noise=0.2, seed=seed, budget=100)
        assert steps == session.used <= session.at_most
        spent.append(steps)
    assert max(spent) > 100


def test_memory_is_used_only_as_far_as_it_is_allowed() -> None:
    def span_s(knobs: ShardKnobs) -> float:
        return 1.0 - 0.05 * knobs.kept - 0.02 * knobs.behind

    for memory_bytes, most_kept in ((0, 1), (350, 4), (10_000, 9)):
        space = ShardSpace(modules=9, streams=(3,), whole_bytes=(100,) * 9, memory_bytes=memory_bytes)
        session, _ = played(span_s, space=space)
        assert session.knobs.kept == most_kept
        assert space.extra_bytes(session.knobs) <= memory_bytes


def test_a_second_scatter_at_the_same_time_takes_the_memory_of_a_module() -> None:
    def span_s(knobs: ShardKnobs) -> float:
        return 1.0 / knobs.scattering

    for memory_bytes, most in ((99, 1), (100, 2)):
        session, _ = played(span_s, space=replace(SPACE, memory_bytes=memory_bytes))
        assert session.knobs.scattering == most


@pytest.mark.parametrize("helps", [True, False])
def test_what_an_earlier_job_has_found_is_tried_first_and_dropped_if_it_is_wrong(helps: bool) -> None:
    found = ShardKnobs(streams=8, ahead=2)
    session, steps = played(lambda knobs: 0.8 if (knobs == found) is helps else 1.0, first=found)
    assert (session.knobs == found) is helps
    assert steps <= 20 or not helps


def test_where_an_earlier_job_has_found_nothing_faster_no_search_begins() -> None:
    session, steps = played(lambda knobs: 1.0, first=DEFAULT)
    assert (session.knobs, session.tried, steps) == (DEFAULT, 1, 1)


def test_nothing_found_while_steps_scatter_is_no_answer() -> None:
    quiet, busy = (played(lambda knobs: 1.0, noise=noise, budget=100)[0] for noise in (0.01, 0.5))
    assert not quiet.doubt
    assert busy.doubt
    assert "others seem to use the host" in busy.why
    assert not played(lambda knobs: 0.5 if knobs.kept else 1.0)[0].doubt, "a proved gain leaves none"


def test_a_setting_that_cannot_be_run_is_not_kept() -> None:
    session, _ = played(lambda knobs: math.inf if knobs.streams > 3 else 1.0)
    assert session.knobs == DEFAULT


def test_without_a_budget_nothing_is_tried() -> None:
    session = ShardSession(SPACE, DEFAULT, budget=0)
    assert (session.done, session.knobs) == (True, DEFAULT)
