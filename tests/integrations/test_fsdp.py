"""Frameworks that shard with `fully_shard` train with attached shards as without."""

from pathlib import Path

import pytest
from integrations.launching import losses

FOLDER = Path(__file__).parent


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.parametrize("framework", ["accelerate", "lightning"])
def test_losses_are_those_without_sirtaki(framework: str, tmp_path: Path) -> None:
    script = str(FOLDER / f"fsdp_{framework}.py")
    expected = losses("torchrun", script, folder=tmp_path, over_sirtaki=False)
    assert sorted(expected) == [1, 2]
    assert expected[2] < expected[1]
    assert losses("torchrun", script, "attach", folder=tmp_path) == pytest.approx(expected, abs=2e-4)
