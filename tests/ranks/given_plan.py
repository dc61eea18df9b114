"""Jobs with a given plan. Started by test_given_plan.py."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.training import main, sgd
from rank_jobs import cases
from torch import nn

import sirtaki.torch as hvd
from sirtaki.analysis.recording import read_folder as read
from sirtaki.cli.__main__ import main as sirtaki
from sirtaki.comm.plan import TransportKind
from sirtaki.engine import job
from sirtaki.errors import ConfigError
from sirtaki.profiler import profile
from sirtaki.torch.compile_backend import usual_part_bytes


@contextlib.contextmanager
def settings(**changes: Any) -> Iterator[None]:
    """Change the settings of optimizers that are created in the body."""
    current = job.current()
    before = current.settings
    current.settings = replace(before, **changes)
    try:
        yield
    finally:
        current.settings = before


@contextlib.contextmanager
def common_folder() -> Iterator[Path]:
    """Yield a folder that all ranks share. Collective."""
    made = tempfile.mkdtemp() if hvd.rank() == 0 else ""
    folder = Path(hvd.broadcast_object(made, name="folder"))
    try:
        yield folder
    finally:
        hvd.barrier()
        if hvd.rank() == 0:
            shutil.rmtree(folder)


def model_of(width: int = 300) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(300, width), nn.ReLU(), nn.Linear(width, 300), nn.ReLU(), nn.Linear(300, 4))


def trained(steps: int, width: int = 300) -> list[torch.Tensor]:
    """Train for some steps, and return the parameters. Collective."""
    model = model_of(width)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 300, generator=generator)).square().mean().backward()
        optimizer.step()
    return list(model.parameters())


def optimized(folder: Path) -> dict[str, Any]:
    """Record a job, optimize its plan, and return the knobs. Collective."""
    with (
        settings(tune=False, unit_bytes=4 * 1024, streams=1, transport=TransportKind.SHARED_MEMORY),
        profile(folder, iterations=2),
    ):
        trained(6)
    hvd.barrier()
    if hvd.rank() == 0:
        assert sirtaki(["optimize", str(folder)]) == 0
        plan = json.loads((folder / "plan.json").read_text())
        # Use any setting that differs from the default, on the job's transport.
        plan["knobs"] |= {"streams": 2, "cuts": None, "unit_bytes": 128 * 1024, "transport": "gloo"}
        (folder / "plan.json").write_text(json.dumps(plan))
    hvd.barrier()
    return dict(json.loads((folder / "plan.json").read_text())["knobs"])


def a_recorded_jobs_plan_runs_where_nothing_is_tuned() -> None:
    with common_folder() as folder:
        knobs = optimized(folder / "first")
        # Rank 0's setting applies to all ranks.
        path = str(folder / "first") if hvd.rank() == 0 else None
        with settings(tune=False, plan=path), profile(folder / "again", iterations=2):
            with_plan = trained(6)
        hvd.barrier()
        (buffer,) = read(folder / "again").job.buffers
        assert buffer.knobs.to_json() == knobs
        with settings(tune=False):
            without = trained(6)
        for one, other in zip(with_plan, without, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def it_is_the_first_trial_where_a_job_is_tuned() -> None:
    with common_folder() as folder:
        knobs = optimized(folder / "first")
        log = folder / "trials.jsonl"
        changes = {"plan": str(folder / "first" / "plan.json"), "warmup_iterations": 26, "trial_log": str(log)}
        with settings(**changes):
            trained(26)
        hvd.barrier()
        records = [one for one in map(json.loads, log.read_text().splitlines()) if one["event"] == "trial"]
        assert [one["arm"] for one in records[:2]] == ["default", "plan"]
        assert records[1]["knobs"] == knobs


def what_cannot_be_read_or_must_run_and_does_not_fit_is_an_error_on_all_ranks() -> None:
    with common_folder() as folder:
        with settings(plan=str(folder / "nowhere")), pytest.raises(ConfigError, match="nowhere cannot be read"):
            trained(1)
        optimized(folder / "first")
        refused = pytest.raises(ConfigError, match="is for other gradients: 6 of")
        with settings(plan=str(folder / "first"), tune=False), refused:
            trained(3, width=200)
        trained(2)  # and the ranks can continue


def a_tuned_job_goes_on_without_a_plan_that_does_not_fit() -> None:
    with common_folder() as folder:
        optimized(folder / "first")
        with settings(plan=str(folder / "first"), warmup_iterations=10):
            trained(15, width=200)


def what_it_says_of_compiled_models_is_told_to_all_ranks_by_init() -> None:
    with common_folder() as folder:
        optimized(folder / "first")
        path = folder / "first" / "plan.json"
        hvd.barrier()
        if hvd.rank() == 0:
            path.write_text(json.dumps({**json.loads(path.read_text()), "part_bytes": 4321}))
            os.environ["SIRTAKI_PLAN"] = str(path)
        assert job.current().part_bytes is None
        hvd.shutdown()
        hvd.init()
        assert (job.current().part_bytes, usual_part_bytes(100_000)) == (4321, 4321)
        os.environ.pop("SIRTAKI_PLAN", None)
        hvd.shutdown()
        hvd.init()


CASES = cases(globals())

if __name__ == "__main__":
    main(CASES)
