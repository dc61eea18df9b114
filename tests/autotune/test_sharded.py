"""The search for the fastest setting of sharded training: it keeps what is faster, and nothing that only seems so."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from sirtaki.autotune.meta.session import Purpose, TuningSession
from sirtaki.autotune.shard_search import ShardArm, shard_session
from sirtaki.autotune.sharded import ShardedStep, ShardKnobs, ShardLink, ShardSpace

SPACE = ShardSpace(modules=9, streams=(1, 2, 3, 4, 6, 8), whole_bytes=(100,) * 9, dropped=tuple(range(9)))
DEFAULT = ShardKnobs(streams=3)


def played(
    span_s: Callable[[ShardKnobs], float],
    *,
    space: ShardSpace = SPACE,
    budget: int = 200,
    noise: float = 0.0,
    seed: int = 0,
    first: ShardKnobs | None = None,
    step: ShardedStep | None = None,
) -> tuple[TuningSession[ShardKnobs], int]:
    """Run a whole search on a job with these step times. Return the search and the number of steps."""
    session, steps = shard_session(space, DEFAULT, budget=budget, first=first, step=step), 0
    rng = np.random.default_rng(seed)
    while not session.done:
        now = session.assignment
        if now.purpose is Purpose.SEARCH:
            session.begin_search(ShardArm(space, DEFAULT, step), space=space)
            continue
        assert now.knobs in space
        steps += now.discarded_iterations + now.measured_iterations
        times = range(now.measured_iterations)
        session.record([span_s(now.knobs) * math.exp(noise * rng.standard_normal()) for _ in times])
    return session, steps


def test_it_climbs_to_the_fastest_setting_within_its_budget() -> None:
    def span_s(knobs: ShardKnobs) -> float:
        return (
            1.0 + 0.2 * abs(math.log2(knobs.streams / 6)) + 0.05 * abs(knobs.ahead - 2) - 0.04 * (len(knobs.kept) == 1)
        )

    session, steps = played(span_s, noise=0.005, space=replace(SPACE, memory_bytes=100))
    assert session.result.knobs == ShardKnobs(streams=6, ahead=2, kept=(8,))
    assert session.result.gain is not None
    assert session.result.gain.times == pytest.approx(1.25 / 0.96, abs=0.05)
    assert 1.0 < session.result.gain.low < 1.25 / 0.96 < session.result.gain.high
    assert steps <= 200


def test_where_nothing_helps_the_default_stays_under_any_noise() -> None:
    kept = [played(lambda knobs: 1.0, noise=0.05, seed=seed, budget=100)[0].result.knobs for seed in range(40)]
    assert sum(knobs != DEFAULT for knobs in kept) <= 2


def test_a_search_and_its_last_proof_take_at_most_the_stated_number_of_steps() -> None:
    spent = []
    for seed in range(60):
        session, steps = played(lambda knobs: 1.0 - 0.1 * len(knobs.kept), noise=0.02, seed=seed, budget=100)
        assert steps == session.result.iterations_used <= session.iterations_at_most
        spent.append(steps)
    assert max(spent) > 60


def test_memory_is_used_only_as_far_as_it_is_allowed() -> None:
    def span_s(knobs: ShardKnobs) -> float:
        return 1.0 - 0.05 * len(knobs.kept) - 0.02 * knobs.behind

    for memory_bytes, most_kept in ((0, 0), (99, 0), (350, 3), (10_000, 9)):
        space = replace(SPACE, streams=(3,), memory_bytes=memory_bytes)
        session, _ = played(span_s, space=space)
        assert len(session.result.knobs.kept) == most_kept
        assert space.extra_bytes(session.result.knobs) <= memory_bytes


def test_a_node_keeps_parameters_for_less_memory_than_each_of_its_ranks() -> None:
    def span_s(knobs: ShardKnobs) -> float:
        return 1.0 - 0.05 * len(knobs.kept) - 0.04 * len(knobs.near)

    for memory_bytes, kept, near in ((0, 0, 0), (300, 1, 6), (350, 1, 8), (599, 1, 8), (10_000, 9, 0)):
        space = replace(SPACE, streams=(3,), memory_bytes=memory_bytes, node_ranks=4)
        session, _ = played(span_s, space=space)
        assert (len(session.result.knobs.kept), len(session.result.knobs.near)) == (kept, near)
    assert played(span_s, space=replace(SPACE, memory_bytes=599))[0].result.knobs.near == (), "there is no other node"


def test_a_second_scatter_at_the_same_time_takes_the_memory_of_a_module() -> None:
    def span_s(knobs: ShardKnobs) -> float:
        return 1.0 / knobs.scattering

    for memory_bytes, most in ((99, 1), (100, 2)):
        session, _ = played(span_s, space=replace(SPACE, memory_bytes=memory_bytes))
        assert session.result.knobs.scattering == most


@pytest.mark.parametrize("helps", [True, False])
def test_an_earlier_jobs_setting_is_tried_first_and_dropped_if_it_is_wrong(helps: bool) -> None:
    found = ShardKnobs(streams=8, ahead=2)
    session, steps = played(lambda knobs: 0.8 if (knobs == found) is helps else 1.0, first=found)
    assert (session.result.knobs == found) is helps
    assert steps <= 20 or not helps


def test_where_an_earlier_job_has_found_nothing_faster_no_search_begins() -> None:
    session, steps = played(lambda knobs: 1.0, first=DEFAULT)
    assert (session.result.knobs, session.result.n_trials, steps) == (DEFAULT, 1, 3)


def test_nothing_found_while_steps_scatter_is_no_answer() -> None:
    quiet, busy = (played(lambda knobs: 1.0, noise=noise, budget=100)[0] for noise in (0.01, 0.3))
    assert not quiet.result.doubt
    assert "other jobs seem to use the host" in busy.result.doubt
    assert not played(lambda knobs: 0.5 if knobs.kept else 1.0)[0].result.doubt, "a proved gain leaves none"


def test_a_setting_that_cannot_be_run_is_not_kept() -> None:
    session, _ = played(lambda knobs: math.inf if knobs.streams > 3 else 1.0)
    assert session.result.knobs == DEFAULT


@pytest.mark.parametrize("budget", [0, 1, 17])
def test_with_too_small_a_budget_nothing_is_tried(budget: int) -> None:
    session, _ = played(lambda knobs: 1.0, budget=budget)
    assert session.result.knobs == DEFAULT


def test_modules_are_coalesced_up_to_a_limit_and_only_with_modules_of_the_same_kind() -> None:
    space = replace(SPACE, whole_bytes=(60, 30, 20, 10, 100, 10, 10, 10, 10), joinable=(1, 2, 3, 4, 5, 6, 8))
    assert space.joining(60) == (2, 3, 6, 8)
    assert ShardKnobs(streams=1, joined=(2, 3, 6, 8)).buckets(9) == [
        range(1),
        range(1, 4),
        range(4, 5),
        range(5, 7),
        range(7, 9),
    ]
    assert space.joining(0) == ()
    assert replace(DEFAULT, joined=(7,)) not in space


def test_joined_modules_are_found_where_messages_cost_more_than_their_bytes() -> None:
    def span_s(knobs: ShardKnobs) -> float:
        return 0.01 * len(knobs.buckets(9)) + 0.001 * knobs.streams

    space = replace(SPACE, joinable=tuple(range(1, 9)), streams=(3,))
    session, steps = played(span_s, space=space, noise=0.01)
    assert session.result.knobs.joined == space.joinable
    assert "8 sent with the module before" in session.result.knobs.describe()
    assert steps <= 200


def test_joined_modules_take_no_more_memory_than_is_allowed() -> None:
    """But for some that is less than what connections take."""
    mib, pairs = 1 << 20, (2, 4, 6, 8)
    space = replace(SPACE, joinable=tuple(range(1, 9)), whole_bytes=(30 * mib, *[4 * mib] * 8))
    assert space.extra_bytes(replace(DEFAULT, joined=pairs)) == 4 * 8 * mib
    assert space.extra_bytes(replace(DEFAULT, joined=pairs, behind=2)) == (30 + 5 * 8) * mib
    assert replace(DEFAULT, joined=pairs) not in space
    assert replace(DEFAULT, joined=pairs) in replace(space, memory_bytes=32 * mib)
    small = replace(space, whole_bytes=(30 * mib, *[mib // 8] * 8))
    assert small.extra_bytes(replace(DEFAULT, joined=tuple(range(2, 9)))) == 0
    assert replace(DEFAULT, joined=small.joining(mib)) in small


def drawn(rng: np.random.Generator, modules: int, *, node_ranks: int = 0) -> tuple[ShardedStep, ShardSpace]:
    """Draw a step whose first module stays gathered, on a link that one connection does not fill."""
    sizes = tuple(int(size) for size in rng.choice([3e6, 2e5, 1e6, 2e7], modules, p=[0.7, 0.1, 0.1, 0.1]))
    forward_s = rng.uniform(0.2, 1.0, modules) * rng.choice([0.003, 0.03, 0.1])
    rates = {1: 2e7, 2: 4e7, 4: 5e7, 8: 5e7}
    step = ShardedStep(
        forward_s=tuple(forward_s),
        backward_s=tuple(2 * forward_s),
        rest_s=0.01,
        gathered_bytes=sizes,
        scattered_bytes=sizes,
        link=ShardLink(latency_s=rng.choice([1e-4, 5e-3]), gathered=rates, scatter_times=1.05, near_bytes_per_s=2e9),
    )
    space = ShardSpace(
        modules=modules,
        streams=(1, 2, 3, 4, 8),
        whole_bytes=sizes,
        dropped=tuple(range(1, modules)),
        memory_bytes=int(rng.uniform(0, 1) * sum(sizes)),
        node_ranks=node_ranks,
    )
    return step, space


def test_the_length_of_a_step_follows_from_its_dependencies() -> None:
    link = ShardLink(latency_s=0.0, gathered={1: 100.0})
    step = ShardedStep(
        forward_s=(0.5, 0.5),
        backward_s=(1.0, 1.0),
        rest_s=0.25,
        gathered_bytes=(100, 100),
        scattered_bytes=(100, 100),
        link=link,
    )
    space = ShardSpace(modules=2, streams=(1,), whole_bytes=(100, 100), dropped=(0, 1), memory_bytes=1000)
    untuned = ShardKnobs(streams=1)
    # Gathers end at 1, 2, 3.5 and 4.5, scatters at 5.5 and 6.5 s.
    assert step.expected_s(space, untuned) == pytest.approx(6.75)
    assert step.expected_s(space, replace(untuned, ahead=0)) == pytest.approx(7.25)
    assert step.expected_s(space, replace(untuned, kept=(1,))) == pytest.approx(5.75)
    assert step.expected_s(space, replace(untuned, kept=(0, 1))) == pytest.approx(5.75), "it was on its way meanwhile"
    two = replace(step, link=replace(link, gathered={1: 100.0, 2: 200.0}))
    assert two.expected_s(space, replace(untuned, streams=2)) < 6.0


@pytest.mark.parametrize("node_ranks", [0, 2])
def test_the_setting_predicted_to_be_fastest_is_nearly_the_best_of_all(node_ranks: int) -> None:
    rng, behind, modes = np.random.default_rng(7), [], 3 if node_ranks else 2
    for _ in range(12):
        step, space = drawn(rng, 5, node_ranks=node_ranks)
        found = step.fastest(space, ShardKnobs(streams=4, ahead=2))
        assert found in space
        best_s = math.inf
        for kept in itertools.product(range(modes), repeat=4):
            places = [tuple(1 + place for place, each in enumerate(kept) if each == mode) for mode in (1, 2)]
            for ahead, behind_, scattering in itertools.product((1, 2, 4), (1, 2, 3), (1, 2)):
                knobs = ShardKnobs(
                    streams=4, ahead=ahead, behind=behind_, scattering=scattering, kept=places[0], near=places[1]
                )
                if knobs in space:
                    best_s = min(best_s, step.expected_s(space, knobs))
        behind.append(step.expected_s(space, found) / best_s - 1.0)
    assert np.mean(behind) < 0.005
    assert max(behind) < 0.03


def test_coalesced_modules_are_expected_to_save_the_cost_of_their_messages() -> None:
    link = ShardLink(latency_s=0.0, gathered={1: 100.0}, message_s=0.1)
    step = ShardedStep(
        forward_s=(0.5, 0.5),
        backward_s=(1.0, 0.1),
        rest_s=0.25,
        gathered_bytes=(1, 1),
        scattered_bytes=(1, 1),
        link=link,
    )
    space = ShardSpace(modules=2, streams=(1,), whole_bytes=(1, 1), dropped=(0, 1), joinable=(1,))
    joined = ShardKnobs(streams=1, joined=(1,))
    # Two bytes are gathered, then for the backward pass again, then scattered; three messages fewer begin.
    assert step.expected_s(space, joined) == pytest.approx(0.25 + 3 * 0.02 + 2.1 - 0.3)
    assert step.computed_s(range(2), backward=True) == pytest.approx(0.9)
    slow = replace(step, link=replace(link, message_s=9.0))
    assert slow.computed_s(range(2)) == pytest.approx(0.1), "traced computation is not all of it messages"
    assert step.fastest(space, ShardKnobs(streams=1, ahead=2)).joined == (1,)


def test_modules_are_joined_nearly_as_well_as_in_the_best_of_all_ways() -> None:
    """Compared with all divisions of eight modules into buckets, by the simulated step."""
    rng, behind, before = np.random.default_rng(3), [], []
    for _ in range(20):
        sizes = tuple(int(size) for size in rng.choice([4e3, 3e4, 2e5, 1e6], 8, p=[0.4, 0.3, 0.2, 0.1]))
        step, space = drawn(rng, 8)
        link = replace(step.link, latency_s=float(rng.choice([2e-4, 2e-3])))
        spans_s = [tuple(span_s / 30 for span_s in each) for each in (step.forward_s, step.backward_s)]
        step = ShardedStep(
            forward_s=spans_s[0],
            backward_s=spans_s[1],
            rest_s=0.001,
            gathered_bytes=sizes,
            scattered_bytes=sizes,
            link=link,
        )
        space = replace(space, whole_bytes=sizes, joinable=tuple(range(1, 8)), memory_bytes=int(rng.choice([0, 4e6])))
        default = ShardKnobs(streams=4, ahead=2)
        settings = [
            replace(default, joined=joined) for n in range(8) for joined in itertools.combinations(range(1, 8), n)
        ]
        best_s = min(step.expected_s(space, one) for one in settings if one in space)
        found = (replace(default, joined=step.joined(space, default, size)) for size in (10**4, 10**5, 10**6, 10**7))
        found_s = min(step.expected_s(space, one) for one in found if one in space)
        behind.append(found_s / best_s - 1.0)
        before.append(step.expected_s(space, default) / best_s - 1.0)
    assert np.mean(before) > 0.1
    assert np.mean(behind) < 0.04
    assert max(behind) < 0.15


def test_a_search_with_a_model_of_the_step_needs_few_steps_and_drops_wrong_settings() -> None:
    rng = np.random.default_rng(11)
    for _ in range(5):
        step, space = drawn(rng, 9)
        space = replace(space, memory_bytes=10**9)
        wanted = step.fastest(space, DEFAULT)
        knowing, blind = (
            played(lambda knobs: step.expected_s(space, knobs), space=space, budget=60, step=each)[0]  # noqa: B023 - called here
            for each in (step, None)
        )
        assert step.expected_s(space, knowing.result.knobs) <= 1.001 * step.expected_s(space, wanted)
        assert step.expected_s(space, knowing.result.knobs) <= step.expected_s(space, blind.result.knobs)
    session, _ = played(lambda knobs: 1.0 - 0.1 * (knobs.streams == 2), space=space, step=step)
    assert session.result.knobs.streams == 2
