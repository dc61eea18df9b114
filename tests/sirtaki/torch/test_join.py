"""Ranks with fewer batches join, in random patterns of random optimizers, compared with one process."""

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., Any]
UNTUNED = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "0"}
TUNED = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "40"}


def test_ranks_with_fewer_batches_join_in_every_pattern_of_optimizers(run_ranks: RunRanks) -> None:
    run_ranks("join_patterns.py", 3, 1, 3, 4.0, env=UNTUNED, timeout_s=100)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "env"), [(1, UNTUNED), (2, TUNED), (3, TUNED), (4, UNTUNED), (4, TUNED)])
def test_any_number_of_ranks_joins_in_every_pattern_of_optimizers(
    run_ranks: RunRanks, ranks: int, env: dict[str, str]
) -> None:
    run_ranks("join_patterns.py", ranks, 100 + ranks, 40, 300.0, env=env, timeout_s=500)
