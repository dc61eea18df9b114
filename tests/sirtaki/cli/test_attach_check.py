"""`sirtaki doctor --script` says whether the models of a script would be attached."""

from pathlib import Path

import pytest

from sirtaki.cli.attach_check import check_script, environment_obstacle
from sirtaki.errors import ConfigError


def found(tmp_path: Path, source: str) -> list[tuple[int, str, bool]]:
    script = tmp_path / "train.py"
    script.write_text(source)
    return [(each.line, each.what, not each.obstacle) for each in check_script(str(script))]


@pytest.mark.parametrize(
    ("source", "line", "what", "is_attached"),
    [
        ("import torch\nm = torch.nn.parallel.DistributedDataParallel(m)", 2, "DDP", True),
        ("from torch.nn.parallel import DistributedDataParallel as DDP\nm = DDP(m, static_graph=True)", 2, "DDP", True),
        ("import torch.nn as nn\nm = nn.parallel.DistributedDataParallel(m, mixed_precision=p)", 2, "DDP", False),
        ("from torch.distributed.fsdp import fully_shard\nfor b in m: fully_shard(b)", 2, "FSDP2", True),
        ("from torch.distributed import fsdp\nm = fsdp.FullyShardedDataParallel(m)", 2, "FSDP1", False),
        ("m.register_comm_hook(None, hook)", 1, "register_comm_hook()", False),
        ("from transformers import Trainer\nTrainer(model=m).train()", 2, "DDP of Hugging Face Trainer", True),
        ("from accelerate import Accelerator\na = Accelerator()", 2, "DDP or FSDP2 of Accelerate", True),
        ("import torch\nprint(torch.ones(3))", 0, "no model is wrapped here", False),
    ],
)
def test_each_way_to_wrap_a_model_is_found(
    tmp_path: Path, source: str, line: int, what: str, is_attached: bool
) -> None:
    assert found(tmp_path, source) == [(line, what, is_attached)]


def test_the_lines_of_several_models_are_in_order(tmp_path: Path) -> None:
    source = "from torch.nn.parallel import DistributedDataParallel as D\na = D(a)\nb = D(b)\nb.register_comm_hook(s)"
    assert [(line, attached) for line, _, attached in found(tmp_path, source)] == [(2, True), (3, True), (4, False)]


@pytest.mark.parametrize("text", [None, "def f(:"])
def test_a_file_that_is_no_script_is_refused(tmp_path: Path, text: str | None) -> None:
    script = tmp_path / "train.py"
    if text is not None:
        script.write_text(text)
    with pytest.raises(ConfigError, match=r"train\.py"):
        check_script(str(script))


def test_an_environment_in_which_torch_calls_no_entry_point_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pretend(version: str) -> None:
        metadata = tmp_path / version / f"torch-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path / version)

    pretend("2.9.1")
    assert environment_obstacle() == ("", "")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert environment_obstacle()[0].startswith("TORCH_DEVICE_BACKEND_AUTOLOAD=0")
    pretend("2.4.1")
    assert environment_obstacle()[0].startswith("`import torch` of PyTorch 2.4.1 calls no entry points")
