from collections.abc import Callable
from typing import Any

import pytest

UNTUNED = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "0"}


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_every_optimizer_and_model_starts_alike_on_all_ranks(run_ranks: Callable[..., Any], ranks: int) -> None:
    run_ranks("optimizer_state.py", ranks, env=UNTUNED, timeout_s=110)
