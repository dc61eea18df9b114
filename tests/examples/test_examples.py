"""Every example runs and does what its description promises."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import OVER_MESH
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"
ENV = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "26"}

pytestmark = pytest.mark.integration

RunRanks = Callable[..., Any]


def test_the_classic_script_learns_and_resumes(run_ranks: RunRanks, tmp_path: Path) -> None:
    checkpoint = tmp_path / "digits.pt"
    script, common = EXAMPLES / "digits_classic.py", ("--checkpoint", checkpoint, "--sync-batch-norm")
    first = run_ranks(script, 2, "--epochs", 2, *common, env=ENV, timeout_s=60).stdout
    resumed = run_ranks(script, 2, "--epochs", 3, *common, env=ENV, timeout_s=60).stdout
    assert [line.split(":")[0] for line in resumed.splitlines()] == ["epoch 3"]
    accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+) %", first + resumed)]
    assert len(accuracies) == 3
    assert accuracies[-1] > 85


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--fp16-allreduce", "--bf16-allreduce", "--use-adasum"])
def test_the_classic_script_learns_with_every_option(run_ranks: RunRanks, option: str) -> None:
    out = run_ranks(EXAMPLES / "digits_classic.py", 2, "--epochs", 8, option, env=ENV, timeout_s=110).stdout
    assert float(re.findall(r"accuracy ([\d.]+) %", out)[-1]) > 85


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "conv", "transformer"])
def test_the_benchmark_tells_samples_a_second(run_ranks: RunRanks, model: str) -> None:
    options = ("--num-iters", 3, "--num-batches-per-iter", 2, "--num-warmup-batches", 3, "--batch-size", 4)
    out = run_ranks(EXAMPLES / "synthetic_benchmark.py", 2, "--model", model, *options, env=ENV, timeout_s=110).stdout
    found = re.search(r"Total samples/s on 2 CPU\(s\): ([\d.]+)", out)
    assert found is not None
    assert float(found[1]) > 0


@pytest.mark.slow
def test_the_language_model_learns_though_ranks_have_different_amounts_of_text(run_ranks: RunRanks) -> None:
    out = run_ranks(EXAMPLES / "language_model.py", 3, "--epochs", 3, env=ENV, timeout_s=110).stdout
    bits = [float(found) for found in re.findall(r"([\d.]+) bits a character", out)]
    assert len(bits) == 3
    assert bits[-1] < bits[0] < 7


def test_the_sharded_transformer_learns_a_sentence_by_heart(run_ranks: RunRanks) -> None:
    job = run_ranks(EXAMPLES / "fsdp_transformer.py", 2, env={**ENV, **OVER_MESH}, timeout_s=60)
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", job.stdout)]
    assert len(losses) == 3
    assert re.search(r"sirtaki 0\] the shards of 5 modules are exchanged between 2 ranks through ", job.stderr)
    assert re.search(r"sirtaki 0\] tuned in \d+ steps with ", job.stderr)
    assert losses[-1] < losses[0] / 2


@pytest.mark.slow
def test_the_elastic_looking_script_learns_on_ranks_that_stay(run_ranks: RunRanks) -> None:
    out = run_ranks(EXAMPLES / "elastic_digits.py", 2, env=ENV, timeout_s=60).stdout
    assert float(re.findall(r"accuracy: ([\d.]+) %", out)[-1]) > 90


@pytest.mark.slow
def test_process_sets_learn_different_functions(run_ranks: RunRanks) -> None:
    out = run_ranks(EXAMPLES / "process_sets.py", 3, env=ENV, timeout_s=60).stdout
    learned = re.findall(r"rank (\d) has learned (\w+), mean squared error ([\d.e-]+)", out)
    assert [(rank, name) for rank, name, _ in learned] == [("0", "sin"), ("1", "cos"), ("2", "sin")]
    assert all(float(error) < 0.1 for *_, error in learned)


def test_the_two_towers_learn_tastes_and_report_the_sparse_algorithms(run_ranks: RunRanks) -> None:
    sizes = ("--users", 1000, "--items", 300, "--width", 16, "--batch-size", 128, "--epochs", 6)
    out = run_ranks(EXAMPLES / "two_tower.py", 2, *sizes, env=ENV, timeout_s=60).stdout
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    recall, popular = re.search(r"recall@10 .* ([\d.]+) %, by popularity ([\d.]+) %", out).groups()
    assert float(recall) > 1.2 * float(popular)
    assert re.search(r"^item\.rows\.weight \(300 × 16\): .* of rows .* by \w+", out, re.MULTILINE)
    assert re.search(r"^user\.rows\.weight \(1000 × 16\): ", out, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["tensor", "pipeline"])
def test_a_grid_of_ranks_learns_what_one_process_in_float64_learns(
    run_ranks: RunRanks, tmp_path: Path, other: str
) -> None:
    options = ("--other", other, "--epochs", 3, "--save", tmp_path / "model.pt")
    out = run_ranks(EXAMPLES / "hybrid.py", 4, *options, env={**ENV, **OVER_MESH}, timeout_s=110).stdout
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", out)]
    example = runpy.run_path(str(EXAMPLES / "hybrid.py"))
    images, labels, *_ = example["digits"]()
    alone = example["make_model"]().double()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for epoch, told in enumerate(losses):
        total = torch.zeros((), dtype=torch.float64)
        for batch in example["batches"](epoch, len(labels)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(alone(images[batch].double()), labels[batch])
            loss.backward()
            optimizer.step()
            total += loss.detach()
        assert told == pytest.approx(float(total) / (len(labels) / 64), rel=2e-6)
    assert len(losses) == 3
    for name, param in torch.load(tmp_path / "model.pt").items():
        torch.testing.assert_close(param.double(), alone.state_dict()[name], rtol=0, atol=2e-6)
    assert float(re.findall(r"accuracy .* ([\d.]+) %", out)[0]) > 70
