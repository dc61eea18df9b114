"""A job whose trials, or whose default, cannot be opened trains on."""

import pytest
from conftest import RunRanks


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_a_trial_that_cannot_be_opened_on_one_rank_fails_alone(run_ranks: RunRanks, ranks: int) -> None:
    job = run_ranks("opening_training.py", ranks, env={"SIRTAKI_TRANSPORT": "gloo", "SIRTAKI_REGISTRY": "off"})
    assert "told ['failed', 'failed', " in job.stdout
    assert "told ['failed', 'failed', 'failed']" not in job.stdout
    assert "24 streams of gloo cannot be opened" in job.stderr
