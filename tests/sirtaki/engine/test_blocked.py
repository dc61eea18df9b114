"""Whether a rank that waits for gradients is needed elsewhere."""

from collections.abc import Callable
from typing import Any


def test_a_rank_that_waits_for_gradients_learns_who_waits_for_it(run_ranks: Callable[..., Any]) -> None:
    run_ranks("blocked.py", 3, env={"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "0"}, timeout_s=100)
