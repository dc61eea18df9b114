"""The one way in which a gain is told."""

import pytest

from sirtaki.measures import faster, faster_than


@pytest.mark.parametrize(
    ("before_s", "after_s", "words"),
    [
        (1.24, 1.0, "1.24× faster"),
        (1.0, 1.1, "1.10× slower"),
        (1.0, 1.004, "as fast"),
        (25.0, 1.0, "25× faster"),
    ],
)
def test_a_gain_is_a_factor_and_never_a_percentage(before_s: float, after_s: float, words: str) -> None:
    assert faster(before_s, after_s) == words


def test_a_comparison_is_a_sentence() -> None:
    assert faster_than(2.0, 1.0, other="before") == "2.00× faster than before"
    assert faster_than(1.0, 1.001, other="before") == "as fast as before"
