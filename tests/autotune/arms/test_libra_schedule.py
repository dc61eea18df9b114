import math
import time
from itertools import product

import numpy as np
import pytest
from conformance.oracle import all_group_ends
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sirtaki.autotune.arms.planners import StageModel, allocate, backward_s, coarsen, fuse_and_allocate
from sirtaki.errors import TuningError

ROUNDING = 1e-8
"""The programme takes times that exceed a chunk's end by a billionth of it as equal to it."""


def model_of(*, alpha_s=0.5, overlapped=(1.0, 2.0), alone=(2.0, 3.0), speed=(0.9, 0.7)):
    return StageModel(
        alpha_s=alpha_s, overlapped_J=np.array(overlapped), alone_J=np.array(alone), speed_J=np.array(speed)
    )


def test_a_hidden_communication_costs_the_computation_it_slows_down():
    # 1 s for the first layer; then 2 bytes take 2.5 s, in which 2.25 s of the 4 s are computed; the rest undisturbed.
    assert backward_s([1.0, 4.0], [2, 0], [1, 2], [0, 0], model_of()) == pytest.approx(1 + 2.5 + 1.75)


def test_a_communication_that_outlasts_the_computation_goes_on_at_full_speed():
    # After 9 s of computation at speed 0.9, 10 of 20.5 s are done; the rest takes (20 / 2 + 0.5) · 10.5 / 20.5.
    assert backward_s([1.0, 9.0], [20, 0], [1, 2], [0, 0], model_of()) == pytest.approx(1 + 10 + 10.5 * 10.5 / 20.5)


def test_the_last_group_is_never_overlapped():
    assert backward_s([1.0, 1.0], [0, 4], [1, 2], [0, 1], model_of()) == pytest.approx(2 + 0.5 + 4 / 3)


@st.composite
def instances(draw, *, max_layers=5, max_allocations=2):
    n = draw(st.integers(1, max_layers))
    n_allocations = draw(st.integers(1, max_allocations))
    compute_s = draw(st.lists(st.floats(0, 4), min_size=n, max_size=n))
    sizes = draw(st.lists(st.integers(0, 20), min_size=n, max_size=n))
    rates = st.lists(st.floats(0.5, 10), min_size=n_allocations, max_size=n_allocations)
    overlapped = np.array(draw(rates))
    alone = overlapped * (1 + draw(st.floats(0, 1)))  # assumption 2: p ≥ q
    share = draw(st.lists(st.floats(0, 0.95), min_size=n_allocations, max_size=n_allocations))
    speed = 1 - np.array(share) * overlapped / alone  # assumption 3: (p + a)(1 − v) ≤ q + a
    model = StageModel(alpha_s=draw(st.floats(0, 3)), overlapped_J=overlapped, alone_J=alone, speed_J=speed)
    return compute_s, sizes, model


def listing_1(compute_s, sizes, model, *, chunks, max_groups):
    """LIBRA's listing 1 word for word, six loops deep."""
    n, w = len(sizes), sum(compute_s) / chunks
    table = np.full((max_groups + 1, n + 1, chunks + 1), math.inf)
    table[0, 0] = np.arange(chunks + 1) * w
    for i, layer, z in product(range(1, max_groups + 1), range(1, n + 1), range(chunks + 1)):
        z_min = math.ceil(sum(compute_s[:layer]) / w - 1e-9)
        for before, start, j in product(range(layer), range(z_min, z + 1), range(len(model.speed_J))):
            size = np.array(float(sum(sizes[before:layer])))
            overlapped_s, alone_s = float(model.overlapped_s(size)[j]), float(model.alone_s(size)[j])
            left_s = (z - start) * w
            slowed_s = left_s / model.speed_J[j]
            both_s = min(overlapped_s, slowed_s)
            compute_left_s = left_s * (1 - both_s / slowed_s) if left_s > 0 else 0.0
            unsent_s = alone_s * (1 - both_s / overlapped_s) if overlapped_s > 0 else 0.0
            if z < chunks and unsent_s > 1e-9:
                continue
            table[i, layer, z] = min(
                table[i, layer, z], table[i - 1, before, start] + both_s + compute_left_s + unsent_s
            )
    return table[1:, n, chunks].min()


@settings(max_examples=30, deadline=None)
@given(instances(max_layers=4), st.integers(1, 8), st.integers(1, 4))
def test_the_rearranged_programme_fills_the_same_table_as_listing_1(instance, chunks, max_groups):
    compute_s, sizes, model = instance
    assume(sum(compute_s) > 0.1)
    plan = fuse_and_allocate(compute_s, sizes, model, chunks=chunks, max_groups=max_groups)
    assert plan.discrete_s == pytest.approx(listing_1(compute_s, sizes, model, chunks=chunks, max_groups=max_groups))
    assert len(plan.ends) <= max_groups


@settings(max_examples=60, deadline=None)
@given(instances(), st.integers(1, 30), st.sampled_from([None, 2, 5]))
def test_theorem_2_bounds_the_plan_by_the_optimum_of_trying_all(instance, chunks, max_groups):
    compute_s, sizes, model = instance
    assume(sum(compute_s) > 0.1)
    plan = fuse_and_allocate(compute_s, sizes, model, chunks=chunks, max_groups=max_groups)
    reached_s = backward_s(compute_s, sizes, plan.ends, plan.choices, model)
    best_s = min(
        backward_s(compute_s, sizes, ends, choices, model)
        for ends in all_group_ends(len(sizes))
        if max_groups is None or len(ends) <= max_groups
        for choices in product(range(len(model.speed_J)), repeat=len(ends))
    )
    groups = min(len(sizes), max_groups or len(sizes))
    slack_s = ROUNDING * (1 + best_s)
    assert reached_s <= plan.discrete_s + slack_s
    assert best_s - slack_s <= reached_s <= (1 + (groups - 1) / chunks) * best_s + slack_s  # eq. (22)


@settings(max_examples=60, deadline=None)
@given(instances(max_allocations=3), st.integers(1, 30), st.data())
def test_theorem_1_bounds_the_allocation_by_the_optimum_of_trying_all(instance, chunks, data):
    compute_s, sizes, model = instance
    assume(sum(compute_s) > 0.1)
    ends = data.draw(st.sampled_from(list(all_group_ends(len(sizes)))))
    plan = allocate(compute_s, sizes, ends, model, chunks=chunks)
    assert plan.ends == tuple(ends)
    reached_s = backward_s(compute_s, sizes, ends, plan.choices, model)
    best_s = min(
        backward_s(compute_s, sizes, ends, choices, model)
        for choices in product(range(len(model.speed_J)), repeat=len(ends))
    )
    slack_s = ROUNDING * (1 + best_s)
    assert best_s - slack_s <= reached_s <= (1 + (len(ends) - 1) / chunks) * best_s + slack_s  # eq. (20)


SIX = StageModel(
    alpha_s=1e-3,
    overlapped_J=np.array([2, 3, 4, 5, 5.5, 6]) * 1e8,
    alone_J=np.array([3, 4, 5, 6, 6.5, 7]) * 1e8,
    speed_J=np.array([0.98, 0.97, 0.95, 0.9, 0.8, 0.65]),
)


def random_layers(n, *, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.exponential(0.2 / n, n).tolist(), rng.integers(1000, 2 * 90_000_000 // n, n).tolist())


def test_the_papers_size_takes_under_two_seconds():
    compute_s, sizes = random_layers(160)
    began = time.process_time()
    plan = fuse_and_allocate(compute_s, sizes, SIX, chunks=150, max_groups=10)
    assert time.process_time() - began < 2
    assert len(plan.ends) <= 10


def test_a_thousand_layers_are_planned_coarsely_in_under_five_seconds():
    compute_s, sizes = random_layers(1000)
    began = time.process_time()
    runs = coarsen(compute_s, sizes)
    bounds = list(zip([0, *runs], runs, strict=False))
    plan = fuse_and_allocate(
        [sum(compute_s[a:b]) for a, b in bounds], [sum(sizes[a:b]) for a, b in bounds], SIX, max_groups=10
    )
    assert time.process_time() - began < 5
    fine = backward_s(compute_s, sizes, [runs[end - 1] for end in plan.ends], plan.choices, SIX)
    assert fine <= plan.discrete_s + 1e-9


def test_more_groups_never_cost_more():
    compute_s, sizes = random_layers(40)
    times_s = [fuse_and_allocate(compute_s, sizes, SIX, max_groups=k).discrete_s for k in (1, 3, 10, None)]
    assert times_s == sorted(times_s, reverse=True)


def test_coarsening_keeps_a_big_layer_alone_and_the_number_within_the_limit():
    compute_s, sizes = [1.0] * 1000, [1] * 1000
    sizes[500] = 1000
    runs = coarsen(compute_s, sizes, limit=100)
    assert len(runs) <= 101
    assert runs[-1] == 1000
    assert runs == sorted(set(runs))
    begin = max((end for end in runs if end <= 500), default=0)
    assert next(end for end in runs if end > 500) - begin <= 11


def test_without_computation_everything_travels_in_one_message():
    plan = fuse_and_allocate([0.0, 0.0], [10, 10], model_of())
    assert (plan.ends, plan.choices) == ((2,), (1,))
    assert plan.discrete_s == pytest.approx(0.5 + 20 / 3)


def test_one_layer_and_no_layer():
    assert fuse_and_allocate([1.0], [4], model_of()).ends == (1,)
    with pytest.raises(TuningError, match="at least one layer"):
        fuse_and_allocate([], [], model_of())


@pytest.mark.parametrize("changes", [{"overlapped": (0.0, 1.0)}, {"speed": (0.0, 1.0)}, {"speed": (1.2, 1.0)}])
def test_stage_models_that_cannot_be_are_refused(changes):
    with pytest.raises(TuningError):
        model_of(**changes)
