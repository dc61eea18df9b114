"""`import torch` registers the backend "sirtaki" and loads nothing else."""

import subprocess
import sys
import tomllib
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sirtaki.torch_backend import NAME, register

ROOT = Path(__file__).parents[2]


def test_registering_twice_is_harmless_and_leaves_other_backends_alone() -> None:
    before = dict(dist.Backend.default_device_backend_map)
    register()
    register()
    assert dist.Backend.backend_list.count(NAME) == 1
    assert dist.Backend.backend_capability[NAME] == (["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"])
    assert dist.Backend.default_device_backend_map == before


def test_the_package_registers_its_backend_with_torch() -> None:
    (target,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "torch.backends"
    ].values()
    assert EntryPoint(name=NAME, value=target, group="torch.backends").load() is register


def test_an_error_in_the_registration_does_not_break_import_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        warnings.warn("a backend cannot be registered", stacklevel=1)
        raise RuntimeError("refused")

    monkeypatch.setattr(dist.Backend, "backend_list", [])
    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register()
    assert NAME not in dist.Backend.backend_list


@pytest.mark.lengthy
def test_torch_is_imported_without_a_warning_and_without_asking_for_a_gpu() -> None:
    script = (
        "import sys, sirtaki.torch_backend, torch\n"
        "sirtaki.torch_backend.register()\n"
        "import torch.distributed as dist\n"
        "assert 'sirtaki' in dist.Backend.backend_list\n"
        "assert not torch.cuda.is_initialized() and torch.cuda._cached_device_count is None"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)


@pytest.mark.lengthy
def test_registering_loads_nothing_else() -> None:
    script = (
        "import sys, torch; before = set(sys.modules)\n"
        "import sirtaki.torch_backend; sirtaki.torch_backend.register()\n"
        "print(*sorted({name for name in sys.modules if name.startswith('sirtaki')} - before))"
    )
    told = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(told.split()) <= {"sirtaki", "sirtaki.torch_backend"}
