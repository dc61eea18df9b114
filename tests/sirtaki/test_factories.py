"""Tensors that Sirtaki makes for itself do not depend on the defaults of the script's process."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("autotune", "comm", "registry", "sirtaki")

WITH_DEVICE = {"arange", "asarray", "as_tensor", "randint", "randperm", "sparse_coo_tensor"}
WITH_BOTH = {
    *("empty", "empty_strided", "eye", "full", "linspace", "normal", "ones", "rand", "randn", "scalar_tensor"),
    *("tensor", "zeros"),
}


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)):
                yield name, node


def unnamed(path: Path) -> Iterator[str]:
    for name, call in calls(path):
        given = {keyword.arg for keyword in call.keywords}
        wanted = {"device"} if name in WITH_DEVICE else {"device", "dtype"} if name in WITH_BOTH else set()
        if missing := wanted - given:
            yield f"{path}:{call.lineno}: torch.{name} without {' and '.join(sorted(missing))}"


def test_each_created_tensor_names_its_device_and_its_dtype() -> None:
    paths = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if not path.parent.is_symlink()}
    assert len(paths) > 100
    assert [line for path in sorted(paths) for line in unnamed(path)] == []


def test_a_tensor_without_device_or_dtype_is_found(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "torch.zeros(3, dtype=torch.int8)\ntorch.arange(3)\ntorch.tensor([1.0], device='cpu')\n"
        "torch.cat([])\ntorch.ones(2, device='cpu', dtype=torch.int8)\n"
    )
    assert [line.removeprefix(f"{script}:") for line in unnamed(script)] == [
        "1: torch.zeros without device",
        "2: torch.arange without device",
        "3: torch.tensor without dtype",
    ]
