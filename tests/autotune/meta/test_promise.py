"""When first iterations show another link than an earlier job had."""

import numpy as np
import pytest

from sirtaki.autotune.knobs import MIB, Knobs
from sirtaki.autotune.meta.session import Promise, Setting
from sirtaki.comm.plan import TransportKind

QUIET = 0.02


def setting(*spans_s: float) -> Setting:
    knobs = Knobs(unit_bytes=MIB, streams=1, transport=TransportKind.GLOO)
    return Setting(knobs=knobs, arm="a", spans_s=list(spans_s))


def broken(promise: Promise, exact_s: float, default_s: float, noise: float = QUIET, count: int = 4) -> bool:
    return promise.broken_by(setting(*[exact_s] * count), setting(*[default_s] * count), noise=noise)


@pytest.mark.parametrize(
    ("exact_s", "default_s", "changed"),
    [
        (0.1, 0.2, False),
        (0.13, 0.26, False),  # a busier machine
        (0.2, 0.4, True),
        (0.05, 0.1, True),
        (0.1, 0.1, True),  # it gains nothing any more
        (0.1, 0.5, True),  # it gains more
        (0.11, 0.19, False),
        (0.15, 0.15, True),
    ],
)
def test_a_gain_that_differs_counts_more_than_times_that_do(exact_s: float, default_s: float, changed: bool) -> None:
    assert broken(Promise(exact_s=0.1, default_s=0.2, noise=QUIET), exact_s, default_s) == changed


def test_where_times_vary_more_only_they_are_forgiven() -> None:
    promise = Promise(exact_s=0.1, default_s=0.2, noise=QUIET, other_times=3.0)
    assert not broken(promise, 0.2, 0.4)
    assert broken(promise, 0.4, 0.8)
    assert broken(promise, 0.2, 0.25)


def test_a_default_that_was_the_best_has_no_gain_to_change() -> None:
    promise, both = Promise(exact_s=0.1, default_s=0.1), setting(0.14, 0.14)
    assert not promise.broken_by(both, both, noise=QUIET)
    slower = setting(0.3, 0.3)
    assert promise.broken_by(slower, slower, noise=QUIET)


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_noise_alone_breaks_hardly_any(noise: float) -> None:
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(300):
        then, now = (np.exp(noise * rng.standard_normal((2, 4))) for _ in range(2))
        promise = Promise(exact_s=0.1 * np.median(then[0]), default_s=0.2 * np.median(then[1]), noise=noise)
        exact, default = setting(*(0.1 * now[0]).tolist()), setting(*(0.2 * now[1]).tolist())
        found += promise.broken_by(exact, default, noise=noise)
    assert found <= 6


def test_what_could_not_be_measured_breaks_nothing() -> None:
    assert not broken(Promise(exact_s=0.1, default_s=0.2), float("inf"), 0.2)
