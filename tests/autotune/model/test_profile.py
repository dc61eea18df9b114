import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.autotune.model.simulator import Profile
from sirtaki.comm.plan import GradientLayout
from sirtaki.errors import TuningError


def test_a_profile_without_gradients_is_refused():
    with pytest.raises(TuningError, match="at least one gradient"):
        Profile(ready_s=(), compute_s=1.0)


@pytest.mark.parametrize("ready_s", [(-1.0, 2.0), (math.nan, 1.0), (math.inf, 1.0)])
def test_times_that_cannot_be_are_refused(ready_s):
    with pytest.raises(TuningError, match="finite and not negative"):
        Profile(ready_s=ready_s, compute_s=2.0)


def test_a_negative_duration_is_refused():
    with pytest.raises(TuningError, match=r"the smallest is -0\.5 s"):
        Profile.from_durations([1.0, -0.5, 1.0])


def test_a_gradient_after_the_end_of_the_pass_is_refused():
    with pytest.raises(TuningError, match="after the backward pass ended"):
        Profile(ready_s=(1.0, 3.0), compute_s=2.0)


def test_all_gradients_ready_at_once_are_a_profile():
    profile = Profile(ready_s=(0.0, 0.0), compute_s=0.0)
    assert profile.durations_s == (0.0, 0.0)


def test_a_profile_is_refused_for_another_layout():
    with pytest.raises(TuningError, match="2 gradients for a layout of 3"):
        Profile(ready_s=(1.0, 2.0), compute_s=2.0).check_fits(GradientLayout(sizes=(1, 2, 3)))


@settings(deadline=None)  # a busy machine may pause any example
@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0, 5))
def test_durations_add_up_to_the_pass_and_issue_times_ascend(ready_s, tail_s):
    profile = Profile(ready_s=tuple(ready_s), compute_s=max(ready_s) + tail_s)
    assert sum(profile.durations_s) == pytest.approx(profile.compute_s, abs=1e-9)
    assert list(profile.issuable_s) == sorted(profile.issuable_s)
    assert all(issue >= ready for issue, ready in zip(profile.issuable_s, ready_s, strict=True))
    assert Profile.from_json(profile.to_json()) == profile
