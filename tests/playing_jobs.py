"""Jobs that run training scripts successively, and keep their results (`translate/playing.py`)."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rank_jobs import UNTUNED

from sirtaki.machine import ReservedPorts

HERE = Path(__file__).parent


def play(results: Path, ranks: int, scripts: list[Path], mpiexec: list[str]) -> None:
    """Run scripts on some ranks, and write their results to `results`."""
    results.mkdir()
    port = ReservedPorts()
    several = [*mpiexec, "-np", str(ranks)] if ranks > 1 else []
    environment = {
        **os.environ,
        **UNTUNED,
        "MASTER_PORT": str(port.first),
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PYTHONPATH": str(HERE.parent),
    }
    playing = HERE / "sirtaki" / "integrations" / "translate" / "playing.py"
    command = [*several, sys.executable, playing, results, *scripts]
    with port:
        done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]


def left(results: Path, name: str, rank: int) -> dict[str, Any]:
    """Return a script's results on a rank: `printed`, `trained`, `written`."""
    found: dict[str, Any] = torch.load(results / f"{name}.{rank}.pt", weights_only=False)
    assert found["error"] == ""
    return found
