"""The script for GPUs without a GPU: it ends hanging parts, and reports what it could not run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from bench.gpu.models import TokenModel, resnet50_like
from bench.gpu.parts.kernels import TUNING, overlap_s
from bench.gpu.runner import PARTS
from bench.gpu_wheels import assumed, missing, needs, own_metadata, satisfied, wheels

REPOSITORY = Path(__file__).parents[2]

PLAYED = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, "tests")
from bench.gpu.runner import BenchPart, Runner

def run(run):
    with run.check("first"):
        pass
    {body}

sys.modules["bench.gpu.parts.played"] = SimpleNamespace(run=run)
runner = Runner(Path(sys.argv[1]), dry=True, slack=1.0)
runner.run(BenchPart(name="played", limit_s={limit_s}, ranks={ranks}))
"""


def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHON": sys.executable,
    }


def played(tmp_path: Path, body: str, ranks: int = 1, limit_s: float = 90.0) -> dict[str, Any]:
    """Return the line of a part whose function has this body."""
    code = PLAYED.format(body=body, ranks=ranks, limit_s=limit_s)
    command = [sys.executable, "-c", code, tmp_path]
    subprocess.run(command, cwd=REPOSITORY, env=environment(tmp_path), timeout=200, check=False)
    [line] = (tmp_path / "results.jsonl").read_text().splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("time.sleep(600)", "timed out"),
        ("run.skip('there is none')", "skipped"),
        ("raise ValueError('half-way')", "failed"),
        ("[].append(run.check('second').__enter__())", "passed"),
    ],
    ids=["hangs", "is-skipped", "raises", "passes"],
)
def test_the_finished_checks_of_a_part_are_kept_however_it_ends(tmp_path: Path, body: str, status: str) -> None:
    line = played(tmp_path, body, limit_s=25.0 if status == "timed out" else 90.0)
    assert line["status"] == status
    assert line["checks"][0]["check"] == "first"
    assert line["checks"][0]["ok"]
    if status == "failed":
        assert "half-way" in line["output_tails"][0]


@pytest.mark.lengthy
def test_a_check_that_fails_on_another_rank_fails_the_part(tmp_path: Path) -> None:
    body = "\n    ".join(["with run.check('second'):", "    assert run.rank == 0, 'not this one'"])
    line = played(tmp_path, body, ranks=2)
    assert line["status"] == "failed"
    assert [check["check"] for check in line["checks"] if not check["ok"]] == ["second"]
    assert "not this one" in line["checks"][-1]["error"]


def test_all_parts_together_take_330_s_so_that_they_can_be_repeated() -> None:
    assert sum(part.limit_s for part in PARTS) <= 330


def dry_run(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return the lines of a dry run, all of whose parts must pass."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho a GPU that is not there\n")
    tool.chmod(0o755)
    env = environment(tmp_path)
    # pip has no index here, as on a machine without a network.
    env |= {"PATH": f"{tool.parent}{os.pathsep}{env['PATH']}", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    command = ["bench/gpu.sh", "--dry-run", "--slack", "4", "--out", str(tmp_path), *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=900, check=False)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    failed = [(line["part"], line["status"], [c for c in line["checks"] if not c["ok"]]) for line in lines]
    assert done.returncode == 0, f"{failed}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return lines


@pytest.mark.lengthy
def test_some_parts_of_the_script_run_without_a_gpu(tmp_path: Path) -> None:
    lines = dry_run(tmp_path, "--only", "communicators", "kernels")
    assert [line["part"] for line in lines] == ["communicators", "kernels"]
    assert [line["status"] for line in lines] == ["passed", "passed"]


@pytest.mark.integration
@pytest.mark.timeout(1000)
def test_the_whole_script_runs_without_a_gpu(tmp_path: Path) -> None:
    lines = dry_run(tmp_path)
    assert [line["part"] for line in lines] == [part.name for part in PARTS]
    assert {line["status"] for line in lines} == {"passed"}
    steps = next(line for line in lines if line["part"] == "steps")
    assert {"none", "ddp", "optimizer", "attached"} <= {row.get("contender") for row in steps["rows"]}
    assert all(row["ratio_to_ddp"]["median"] > 0 for row in steps["rows"] if "contender" in row)


# ── what is installed on the machine ─────────────────────────────────────────────────────────────────────────────────


def test_wheels_and_assumed_packages_meet_all_requirements_of_sirtaki() -> None:
    versions = {each.name: next(iter(each.specifier)).version for each in wheels()}
    present = {each.name for each in assumed()}
    lacking = [need for need in needs(own_metadata(), "3.12") if not satisfied(need, versions, present)]
    assert lacking == []
    assert {each.name for each in wheels()} == {each.name for each in wheels(enough=True)}
    assert all(enough.specifier.contains(versions[enough.name]) for enough in wheels(enough=True))
    assert not satisfied(Requirement("setuptools>=200"), versions, present)


def test_packages_that_an_image_lacks_are_named() -> None:
    lacking = missing([Requirement("torch>=2.4"), Requirement("torch>=99"), Requirement("no-such-package")])
    assert [str(each) for each in lacking] == ["torch>=99", "no-such-package"]


# ── what the parts compute ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_gpus_time_together_is_counted_once_and_its_networks_have_their_sizes() -> None:
    assert overlap_s([(0.0, 4.0), (1.0, 2.0)], [(1.0, 3.0), (2.0, 5.0)]) == pytest.approx(3.0)
    assert overlap_s([(0.0, 1.0)], [(1.0, 2.0)]) == overlap_s([], [(0.0, 1.0)]) == 0.0
    model, images = resnet50_like(torch.device("cpu"), batch=1)
    assert sum(param.numel() for param in model.parameters()) == 25_557_032
    assert images.shape == (1, 3, 224, 224)
    small = TokenModel(vocabulary=50, width=64, layers=2, length=8, causal=True).eval()
    tokens = torch.randint(0, 50, (1, 8))
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % 50
    torch.testing.assert_close(small(tokens)[0, :-1], small(changed)[0, :-1])  # it does not look ahead


def test_nccls_log_tells_algorithm_protocol_and_channels() -> None:
    line = "host:1:2 [0] NCCL INFO AllReduce: 4194304 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..3}"
    found = TUNING.search(line)
    assert found is not None
    assert found.groups() == ("4194304", "RING", "LL128", "0", "3")
