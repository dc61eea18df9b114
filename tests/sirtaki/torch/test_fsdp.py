"""Models under `fully_shard`, whose shards Sirtaki carries, give what one process would give."""

from pathlib import Path

import pytest
import torch
from conftest import RunRanks
from rank_jobs import OVER_MESH, Job, Play, RankCase, on_ranks, slow
from torch.distributed.fsdp import FSDPModule

from sirtaki.errors import ConfigError
from sirtaki.torch import fsdp

SHARED = {**OVER_MESH, "SIRTAKI_REGISTRY": "off"}
SOCKETS = {**SHARED, "SIRTAKI_TRANSPORT": "gloo"}

JOBS = (
    Job(2, env=SHARED),
    slow(Job(3, "sockets", env=SOCKETS)),
    slow(Job(3, env=SHARED)),
    slow(Job(4, "sockets", env=SOCKETS)),
    slow(Job(4, env=SHARED)),
)


@on_ranks("fsdp_attached", *JOBS)
def test_attached_models_train_as_in_one_process(play: Play, rank_case: RankCase) -> None:
    play(rank_case)


@pytest.mark.parametrize("env", [pytest.param(SHARED, marks=pytest.mark.slow), SOCKETS])
def test_a_rank_that_dies_is_named_to_those_who_wait(run_ranks: RunRanks, env: dict[str, str]) -> None:
    job = run_ranks("fsdp_faults.py", 3, env=env, check=False, timeout_s=60)
    assert job.stdout.count("PeerLostError: rank 1 has ended") == 2, job.stdout + job.stderr


@pytest.mark.slow
def test_a_checkpoint_is_loaded_by_another_number_of_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    for ranks, act in ((3, "save"), (2, "load")):
        run_ranks("fsdp_checkpoint.py", ranks, act, tmp_path / "checkpoint", env=SHARED, timeout_s=90)


def test_a_pytorch_without_the_hooks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter")
    with pytest.raises(ConfigError, match="set_custom_reduce_scatter"):
        fsdp.attach(torch.nn.Linear(2, 2))
