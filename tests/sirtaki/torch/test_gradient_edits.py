"""What scripts do to gradients between `backward()` and `step()` gives what one process would give."""

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., Any]

CASES = 8


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_edited_gradients_train_as_in_one_process(run_ranks: RunRanks, ranks: int) -> None:
    done = run_ranks("gradient_edits.py", ranks, env={"SIRTAKI_REGISTRY": "off"}, timeout_s=110)
    assert done.stdout.count("ok ") == CASES * ranks


def test_gradients_that_nobody_computes_are_none_where_that_is_asked_for(run_ranks: RunRanks) -> None:
    env = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_UNUSED": "none"}
    done = run_ranks("gradient_edits.py", 2, "unused_gradients", env=env)
    assert done.stdout.count("ok ") == 2
