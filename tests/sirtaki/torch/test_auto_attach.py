"""Models of unmodified scripts are attached with SIRTAKI_ATTACH=auto, or stay PyTorch's on all ranks."""

import os
import subprocess
import sys

import pytest
from conftest import RunRanks
from rank_jobs import OVER_MESH, Job, played_on_ranks, slow

ENV = {**OVER_MESH, "SIRTAKI_REGISTRY": "off", "SIRTAKI_ATTACH": "auto"}

test_models_are_attached_without_a_call = played_on_ranks(
    "auto_attached", Job(2, env=ENV), slow(Job(3, env=ENV)), slow(Job(4, env=ENV))
)

test_models_are_attached_if_ranks_meet_at_a_file = played_on_ranks(
    "auto_attached", Job(2, label="file", env={**ENV, "STORE": "file"}), only="first_step"
)

test_models_are_attached_if_the_scripts_store_has_a_prefix = played_on_ranks(
    "auto_attached", Job(2, label="prefix", env={**ENV, "STORE": "prefix"}), only="first_step"
)

ALONE_AT_A_HASH_STORE = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
alone = torch.nn.Linear(3, 2)
model = DistributedDataParallel(torch.nn.Linear(3, 2))
model.module.load_state_dict(alone.state_dict())
for one in (alone, model):
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        one(torch.full((4, 3), 1.0 + step)).square().sum().backward()
        optimizer.step()
assert torch.equal(model.module.weight, alone.weight)
dist.destroy_process_group()
"""


@pytest.mark.lengthy
def test_pytorch_trains_the_model_of_a_process_alone_at_a_hash_store() -> None:
    """Processes cannot share a HashStore."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", ALONE_AT_A_HASH_STORE],
        env={**os.environ, **ENV}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (ended.stdout, ended.stderr) == ("", "")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("missing", "rank 1 runs without SIRTAKI_ATTACH=auto"),
        ("setting", "rank 1: the setting SIRTAKI_STREAMS='many' is invalid"),
        ("connection", "connect"),
        ("late", "a rank did not answer within 1 s"),
    ],
)
def test_pytorch_trains_the_model_if_one_rank_cannot_attach_it(run_ranks: RunRanks, kind: str, reason: str) -> None:
    ended = run_ranks("auto_attach_refused.py", 2, kind, env={**ENV, "SIRTAKI_START_TIMEOUT_S": "5"})
    (line,) = [line for line in ended.stderr.splitlines() if "without Sirtaki" in line]
    assert reason in line
