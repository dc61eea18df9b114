"""The order in which a joined rank expects the others to step their optimizers."""

from typing import cast

import pytest

from sirtaki.engine.gradient_reducer import GradientReducer
from sirtaki.engine.joining import present_cycle


@pytest.mark.parametrize(
    ("finished", "cycle"),
    [
        ("", "ABC"),  # nothing was stepped yet: as they were made
        ("A", "A"),
        ("AAAA", "A"),
        ("BABA", "BA"),
        ("ABAB", "AB"),
        ("AABAAB", "AAB"),
        ("CCCAAB", "CCCAAB"),  # the first round is not over before one comes again
    ],
)
def test_the_pattern_since_the_last_one_came_the_last_time_is_repeated(finished: str, cycle: str) -> None:
    found = present_cycle(cast(list[GradientReducer], list(finished)), cast(list[GradientReducer], list("ABC")))
    assert "".join(cast(list[str], found)) == cycle
