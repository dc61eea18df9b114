"""`import torch` learns that there is a backend "sirtaki", and loads nothing of it."""

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch.distributed as dist

from sirtaki.torch_backend import NAME, register

ROOT = Path(__file__).parents[2]


def test_registering_twice_is_harmless_and_leaves_other_backends_alone() -> None:
    before = dict(dist.Backend.default_device_backend_map)
    register()
    register()
    assert dist.Backend.backend_list.count(NAME) == 1
    assert dist.Backend.backend_capability[NAME] == ["cpu", "cuda"]
    assert dist.Backend.default_device_backend_map == before


def test_the_package_says_so_to_torch() -> None:
    (target,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "torch.backends"
    ].values()
    assert EntryPoint(name=NAME, value=target, group="torch.backends").load() is register


@pytest.mark.lengthy
def test_registering_loads_nothing_else() -> None:
    script = (
        "import sys, torch; before = set(sys.modules)\n"
        "import sirtaki.torch_backend; sirtaki.torch_backend.register()\n"
        "print(*sorted({name for name in sys.modules if name.startswith('sirtaki')} - before))"
    )
    told = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(told.split()) <= {"sirtaki", "sirtaki.torch_backend"}
