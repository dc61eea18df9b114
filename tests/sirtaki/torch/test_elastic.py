"""Scripts written for elastic training run on ranks that stay."""

import pytest
from conftest import RunRanks


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.integration)])
def test_state_is_committed_shared_and_restored(run_ranks: RunRanks, ranks: int) -> None:
    output = run_ranks("elastic_training.py", ranks, env={"SIRTAKI_REGISTRY": "off"}).stdout
    assert output.count("a rank is lost") == ranks
