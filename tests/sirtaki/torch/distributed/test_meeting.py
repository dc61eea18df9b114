"""Ranks of every launcher connect if the script uses `init_method="sirtaki://"`."""

import pytest
import torch.distributed as dist
from conftest import RunRanks
from rank_jobs import ONLY_OVER_MPI, OVER_MESH

from sirtaki.engine.launchers import AGENT
from sirtaki.errors import ConfigError


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="mpiexec", marks=ONLY_OVER_MPI),
        pytest.param(OVER_MESH, id="torchrun", marks=pytest.mark.slow),
    ],
)
def test_ranks_meet(run_ranks: RunRanks, env: dict[str, str]) -> None:
    told = run_ranks("torch_backend_meeting.py", 3, env=env).stdout.splitlines()
    assert sorted(told) == [f"rank {rank} of 3: 3" for rank in range(3)]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "SIRTAKI_REGISTRY=off",
            "tunes the reduction of DDP gradients from each model's second step on (SIRTAKI_ATTACH=0 disables this)",
        ),
        ("SIRTAKI_TUNE=0", "reduces, without tuning, DDP gradients from each model's second step on"),
        pytest.param(
            "SIRTAKI_ATTACH=0", "without tuning (SIRTAKI_ATTACH=0); call ddp.attach", marks=pytest.mark.integration
        ),
        pytest.param("SIRTAKI_LOG=warning", "", marks=pytest.mark.integration),
    ],
)
def test_the_group_logs_once_that_it_attaches_and_how_to_disable_it(run_ranks: RunRanks, name: str, says: str) -> None:
    variable, _, value = name.partition("=")
    told = run_ranks("torch_backend_meeting.py", 2, env={**OVER_MESH, variable: value}).stderr
    assert told.count('the process group "sirtaki" has 2 ranks') == (1 if says else 0)
    assert says in told


def test_an_elastic_job_gets_an_error_instead_of_groups_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AGENT, "5")
    with pytest.raises(ConfigError, match="requires a fixed set of ranks"):
        dist.init_process_group("sirtaki", init_method="sirtaki://")
    assert not dist.is_initialized()
