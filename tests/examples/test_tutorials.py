"""The scripts of the tutorials run, and do what the pages promise."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import OVER_MESH

TUTORIALS = Path(__file__).parents[2] / "examples" / "tutorial"
ENV = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "26"}

pytestmark = pytest.mark.integration

RunRanks = Callable[..., Any]


def losses(out: str) -> list[float]:
    return [float(found) for found in re.findall(r"epoch \d+: loss ([\d.]+)$", out, re.MULTILINE)]


def learns(out: str) -> bool:
    """Return whether the loss is below 2.3, the loss of guessing among ten digits; the last, small batch scatters."""
    found = losses(out)
    return len(found) == 10 and max(found[-3:]) < 0.5


def run(*command: str | Path, **env: str) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **ENV, **env}
    job = subprocess.run(list(map(str, command)), env=environ, capture_output=True, text=True, timeout=110, check=False)
    assert job.returncode == 0, job.stderr
    return job.stdout


def test_the_script_translated_from_a_plain_loop_learns_on_two_ranks(run_ranks: RunRanks) -> None:
    assert learns(run_ranks(TUTORIALS / "pytorch_after.py", 2, env=ENV, timeout_s=110).stdout)


def test_an_unchanged_horovod_script_learns_on_two_ranks(tmp_path: Path) -> None:
    launcher = Path(sys.executable).with_name("sirtakirun")
    out = run(
        *(launcher, "-np", "2", "--no-prefix", "--as-horovod", sys.executable, TUTORIALS / "horovod.py"),
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert learns(out)


@pytest.mark.slow
def test_the_script_translated_from_ddp_prints_the_losses_of_ddp(run_ranks: RunRanks) -> None:
    after = run_ranks(TUTORIALS / "ddp_after.py", 2, env=ENV, timeout_s=110).stdout
    before = run(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", TUTORIALS / "ddp_before.py")
    assert learns(before)
    assert losses(after) == pytest.approx(losses(before), abs=2e-4)


@pytest.mark.slow
def test_ddp_with_one_line_more_prints_the_losses_that_ddp_prints() -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
    attached, before = (
        run(*torchrun, script) for script in (TUTORIALS.parent / "ddp_attached.py", TUTORIALS / "ddp_before.py")
    )
    assert learns(before)
    assert losses(attached) == pytest.approx(losses(before), abs=2e-4)


def test_a_script_over_the_backend_learns(run_ranks: RunRanks) -> None:
    assert learns(run_ranks(TUTORIALS.parent / "torch_backend.py", 2, env={**ENV, **OVER_MESH}, timeout_s=110).stdout)


@pytest.mark.slow
def test_the_plain_loop_that_the_tutorial_starts_from_learns() -> None:
    assert learns(run(sys.executable, TUTORIALS / "pytorch_before.py"))
