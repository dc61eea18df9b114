import pytest
from conformance.oracle import all_group_ends, best_span_s
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.autotune.arms.planners import cuts_for_groups, merge_gradients, merge_optimally
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.measures import LinkModel

ROUTE = (TransportKind.GLOO, Algorithm.FLAT)


def end_s(ready_s, sizes, ends, *, alpha_s, beta):
    """When groups sent one behind the other are through."""
    free_s, begin = 0.0, 0
    for end in ends:
        free_s = max(ready_s[end - 1], free_s) + alpha_s + beta * sum(sizes[begin:end])
        begin = end
    return free_s


def test_a_gradient_is_merged_if_the_next_is_ready_before_a_startup_is_over():
    ends = merge_gradients([1.0, 1.5, 5.0], [1, 1, 1], alpha_s=1.0, beta_s_per_byte=0.1)
    assert ends == [2, 3]  # 1.5 < 1 + 1 (eq. 5); 5 is not before 1.5 + 1


def test_a_gradient_that_waits_for_the_link_is_merged_for_nothing():
    # The second waits until the first is through at 11.5: the third, ready at 9, joins it.
    assert merge_gradients([1.0, 8.0, 9.0], [10, 1, 1], alpha_s=0.5, beta_s_per_byte=1.0) == [1, 3]


def test_without_startup_time_nothing_is_merged():
    assert merge_gradients([1.0, 2.0, 3.0], [1, 1, 1], alpha_s=0.0, beta_s_per_byte=0.1) == [1, 2, 3]


def test_empty_gradients_travel_with_the_next_one():
    assert merge_gradients([1.0, 9.0], [0, 1], alpha_s=0.0, beta_s_per_byte=0.1) == [2]


def test_a_chain_of_short_waits_misleads_the_rule_but_not_the_optimum():
    ready_s, sizes = [0.0, 0.99, 1.9], [100, 1, 1]
    rule = merge_gradients(ready_s, sizes, alpha_s=1.0, beta_s_per_byte=1.0)
    best = merge_optimally(ready_s, sizes, alpha_s=1.0, beta_s_per_byte=1.0)
    assert rule == [3]
    assert best == [1, 3]
    assert end_s(ready_s, sizes, best, alpha_s=1, beta=1) < end_s(ready_s, sizes, rule, alpha_s=1, beta=1)


cases = st.integers(1, 7).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(0, 3), min_size=n, max_size=n),
        st.lists(st.integers(0, 40), min_size=n, max_size=n),
        st.floats(0, 3),
        st.floats(0.01, 1),
    )
)


@settings(deadline=None)  # a busy machine may pause any example
@given(cases)
def test_the_optimum_is_that_of_trying_all_groups(case):
    durations_s, sizes, alpha_s, beta = case
    ready_s = Profile.from_durations(durations_s).issuable_s
    ends = merge_optimally(ready_s, sizes, alpha_s=alpha_s, beta_s_per_byte=beta)
    best = min(end_s(ready_s, sizes, other, alpha_s=alpha_s, beta=beta) for other in all_group_ends(len(sizes)))
    assert end_s(ready_s, sizes, ends, alpha_s=alpha_s, beta=beta) == pytest.approx(best)


@settings(deadline=None)  # a busy machine may pause any example
@given(cases)
def test_one_step_of_the_rule_is_never_worse_than_not_merging(case):
    durations_s, sizes, alpha_s, beta = case
    ready_s = Profile.from_durations(durations_s[:2]).issuable_s
    sizes = [size + 1 for size in sizes[:2]]
    ends = merge_gradients(ready_s, sizes, alpha_s=alpha_s, beta_s_per_byte=beta)
    alone = end_s(ready_s, sizes, list(range(1, len(sizes) + 1)), alpha_s=alpha_s, beta=beta)
    assert end_s(ready_s, sizes, ends, alpha_s=alpha_s, beta=beta) <= alone + 1e-9


@settings(deadline=None)  # a busy machine may pause any example
@given(cases)
def test_the_optimum_agrees_with_the_simulator_and_the_oracle(case):
    durations_s, sizes, alpha_s, beta = case
    sizes = [size + 1 for size in sizes[:5]]
    model = PlanningModel(
        layout=GradientLayout(sizes=tuple(sizes), itemsize_bytes=1),
        profile=Profile.from_durations(durations_s[:5]),
        links={ROUTE: LinkModel(alpha_s=alpha_s, throughput=(1 / beta,))},
    )
    ends = merge_optimally(model.profile.issuable_s, sizes, alpha_s=alpha_s, beta_s_per_byte=beta)
    cuts = cuts_for_groups(model.layout, ends, streams=1)
    assert model.simulator(ROUTE).run_cuts(cuts).span_s == pytest.approx(best_span_s(model, ROUTE, streams=1))
