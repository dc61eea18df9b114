from collections.abc import Callable
from typing import Any

import pytest

UNTUNED = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "0"}
SLOW = [pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 3, 4)]


@pytest.mark.parametrize("ranks", [2, *SLOW])
def test_normalising_on_several_ranks_equals_normalising_the_joined_batch(
    run_ranks: Callable[..., Any], ranks: int
) -> None:
    run_ranks("bn_sync_batch_norm.py", ranks, env=UNTUNED, timeout_s=110)
