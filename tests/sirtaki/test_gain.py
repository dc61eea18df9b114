"""The one way in which a gain is told."""

import pytest

from sirtaki.gain import faster


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
