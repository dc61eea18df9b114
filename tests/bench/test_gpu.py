"""What of the GPU benchmark can be tried without one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import overlap_s
from bench.lib.gpu_models import TokenModel, resnet50_like

REPOSITORY = Path(__file__).parents[2]


def test_time_together_is_counted_once() -> None:
    assert overlap_s([(0.0, 2.0)], [(1.0, 3.0)]) == pytest.approx(1.0)
    assert overlap_s([(0.0, 4.0), (1.0, 2.0)], [(1.0, 3.0), (2.0, 5.0)]) == pytest.approx(3.0)
    assert overlap_s([(0.0, 1.0)], [(1.0, 2.0)]) == 0.0
    assert overlap_s([], [(0.0, 1.0)]) == 0.0


def test_the_networks_have_the_sizes_that_they_are_named_for() -> None:
    model, images = resnet50_like(torch.device("cpu"), batch=1)
    assert len(list(model.parameters())) == 161
    assert sum(param.numel() for param in model.parameters()) == 25_557_032
    assert images.shape == (1, 3, 224, 224)
    small = TokenModel(vocabulary=50, width=64, layers=2, length=8, causal=True)
    assert small(torch.randint(0, 50, (3, 8))).shape == (3, 8, 50)


def test_a_causal_model_does_not_look_ahead() -> None:
    model = TokenModel(vocabulary=50, width=64, layers=2, length=8, causal=True).eval()
    tokens = torch.randint(0, 50, (1, 8))
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % 50
    torch.testing.assert_close(model(tokens)[0, :-1], model(changed)[0, :-1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so it would measure")
def test_without_a_gpu_it_says_so_and_is_no_failure() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu"], cwd=REPOSITORY, text=True, capture_output=True, check=True, timeout=60
    )
    assert "sees no GPU here" in done.stdout
