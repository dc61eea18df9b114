"""Sums by tables: Libra (sparse), §3.5."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.aggregator.server import table_sum, tables


def relative(x: np.ndarray, y: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    exact = x.astype(np.float64) + y
    return np.asarray(np.abs(table_sum(x, y) - exact) / np.abs(exact))


def test_seven_tables_take_what_the_paper_says() -> None:
    assert tables().papers_bytes == pytest.approx(408.5 * 1024)
    found = tables()
    for table in (found.exponent, found.log_m, found.log_m_ln2, found.small[1:], found.plus, found.power[:-1]):
        assert int(np.abs(table).max()) <= 65536  # 16 bits


def test_positive_numbers_are_added_to_a_ten_thousandth() -> None:
    x, y = np.random.default_rng(0).uniform(0, 1, (2, 100_000)).astype(np.float32)
    error = relative(x, y)
    assert error.max() < 1.5e-4
    assert np.median(error) < 4e-5  # the paper: 8e-4 on gradients
    assert error.max() > 2.0**-23  # it is an emulation, no plain sum


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e30])
def test_positive_numbers_of_any_size_are(scale: float) -> None:
    x, y = (scale * np.random.default_rng(0).lognormal(0, 3, (2, 10_000))).astype(np.float32)
    assert relative(x, y).max() < 2e-4


def test_numbers_of_different_sign_have_no_bound_but_that_of_the_larger_one() -> None:
    x, y = np.random.default_rng(0).uniform(-1, 1, (2, 100_000)).astype(np.float32)
    assert relative(x, y).max() > 0.05
    absolute = np.abs(table_sum(x, y) - (x.astype(np.float64) + y)) / np.maximum(np.abs(x), np.abs(y))
    assert absolute.max() < 5e-4


@given(st.floats(width=32, allow_subnormal=False), st.floats(width=32, allow_subnormal=False))
def test_order_does_not_matter_and_special_numbers_stay_what_they_are(x: float, y: float) -> None:
    one, other = np.array([x], np.float32), np.array([y], np.float32)
    np.testing.assert_array_equal(table_sum(one, other), table_sum(other, one))
    with np.errstate(over="ignore", invalid="ignore"):
        plain = one + other
        found = table_sum(one, other)
    if not np.isfinite(one).all() or not np.isfinite(other).all():
        np.testing.assert_array_equal(found, plain)
    np.testing.assert_array_equal(table_sum(one, np.zeros(1, np.float32)), one + 0)
    assert table_sum(one, -one)[0] == 0 or not np.isfinite(x)


def test_what_is_too_large_or_too_small_is_infinite_or_nothing() -> None:
    huge, tiny = np.array([3e38], np.float32), np.array([1e-42], np.float32)
    assert np.isinf(table_sum(huge, huge))[0]
    assert np.isneginf(table_sum(-huge, -huge))[0]
    assert table_sum(tiny, tiny)[0] == 0
