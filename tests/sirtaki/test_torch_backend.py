"""`import torch` registers the backend "sirtaki" and loads nothing else."""

import os
import subprocess
import sys
import tomllib
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sirtaki.comm.nccl_streams.transport import LAUNCH_ORDER
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


TRAINS = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
{more}
dist.init_process_group("fake", store=FakeStore(), rank={rank}, world_size=2)
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
dist.destroy_process_group()
"""


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("more", "rank", "given", "told"),
    [
        ("", 0, {"SIRTAKI_TRIAL_LOG": "log"}, True),
        ("", 1, {"SIRTAKI_TRIAL_LOG": "log", "RANK": "0"}, False),  # RANK is that of the node
        ("", 0, {"SIRTAKI_TRIAL_LOG": "log", "SIRTAKI_ATTACH": "0"}, False),
        ("", 0, {"SIRTAKI_TRIAL_LOG": " "}, False),
        ("", 0, {}, False),
        ("import sirtaki.torch", 0, {"SIRTAKI_TRIAL_LOG": "log"}, False),
    ],
)
def test_rank_0_reports_a_setting_that_had_no_effect_on_an_unmodified_script(
    more: str, rank: int, given: dict[str, str], told: bool
) -> None:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("SIRTAKI_")}
    script = "import torch, sirtaki.torch_backend\nsirtaki.torch_backend.register()\n" + TRAINS.format(
        more=more, rank=rank
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=bare | given, capture_output=True, text=True, check=True
    )
    assert ("SIRTAKI_TRIAL_LOG had no effect" in done.stderr) is told, done.stderr


WITHOUT_DISTRIBUTED = """
import importlib.abc, importlib.util, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch._C":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            for name in ("_c10d_init", "_rpc_init", "_faulty_agent_init", "_dist_autograd_init"):
                if hasattr(module, name):
                    delattr(module, name)

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
import torch
import sirtaki.torch_backend
sirtaki.torch_backend.register()
assert not torch.distributed.is_available()
model = torch.nn.Sequential(torch.nn.Linear(3, 2))
model.module = torch.nn.Linear(2, 2)  # the name that DDP's constructor sets
model(torch.ones(1, 3)).sum().backward()
assert model[0].weight.grad.tolist() != [] and model.module.weight.grad is not None
"""


@pytest.mark.lengthy
def test_a_pytorch_without_torch_distributed_trains_as_before() -> None:
    subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_DISTRIBUTED],
        cwd=ROOT, env={**os.environ, "SIRTAKI_ATTACH": "auto"}, capture_output=True, text=True, check=True,
    )  # fmt: skip


@pytest.mark.lengthy
def test_registering_loads_nothing_else() -> None:
    script = (
        "import os, sys, torch; before = set(sys.modules)\n"
        "import sirtaki.torch_backend; sirtaki.torch_backend.register()\n"
        "assert 'NCCL_LAUNCH_ORDER_IMPLICIT' not in os.environ\n"
        "os.environ['SIRTAKI_ATTACH'] = 'auto'; sirtaki.torch_backend.register()\n"
        "assert os.environ['NCCL_LAUNCH_ORDER_IMPLICIT'] == '1'  # before NCCL reads it, at the first collective\n"
        "print(*sorted({name for name in sys.modules if name.startswith('sirtaki')} - before))"
    )
    env = {name: value for name, value in os.environ.items() if name not in ("SIRTAKI_ATTACH", LAUNCH_ORDER)}
    command = [sys.executable, "-c", script]
    told = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    assert set(told.split()) <= {"sirtaki", "sirtaki.torch_backend", "sirtaki.attach"}
