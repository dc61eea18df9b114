"""The installed package has all files of the source tree, and provides what the README promises."""

import importlib.util
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

import sirtaki

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("autotune", "comm", "registry")

# Runs in the fresh environment, where only installed files are visible.
IMPORT_ALL = """
import importlib, pathlib, sys
import sirtaki
root = pathlib.Path(sirtaki.__file__).parent
assert root.is_relative_to(sys.prefix), f"{root} is not what was installed"
names = sorted(
    ".".join(("sirtaki", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
    for path in root.rglob("*.py")
)
for name in names:
    needs_others = name.endswith(".lightning") or name.startswith("sirtaki.integrations.ray.")  # what they are for
    if not name.endswith("__main__") and not needs_others:
        importlib.import_module(name)
print(*names)
"""


def modules_in_tree():
    folders = [(ROOT / "sirtaki", "sirtaki"), *((ROOT / name, f"sirtaki.{name}") for name in LINKED)]
    return {
        ".".join((package, *file.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
        for folder, package in folders
        for file in folder.rglob("*.py")
        if folder.name != "sirtaki" or file.relative_to(folder).parts[0] not in LINKED
    }


def test_the_three_parts_are_relative_links_inside_the_package():
    for name in LINKED:
        link = ROOT / "sirtaki" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..", name)
        assert (link / "__init__.py").is_file()


@pytest.mark.slow
def test_sdist_and_wheel_carry_every_module_the_pages_script_and_both_commands(tmp_path):
    dist, venv = tmp_path / "dist", tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "build", "--outdir", dist, ROOT], check=True, stdout=subprocess.DEVNULL)
    (wheel,) = dist.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", wheel], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    # Dependencies are taken from this environment, after the wheel.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    imported = subprocess.run(
        [venv / "bin" / "python", "-W", "error::ImportWarning", "-c", IMPORT_ALL],
        cwd=tmp_path, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert set(imported.stdout.split()) == modules_in_tree()
    for command in ("sirtakirun", "sirtaki"):
        shown = subprocess.run(
            [venv / "bin" / command, "--version"], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        assert shown.split() == [command, sirtaki.__version__]


def test_the_commands_exist():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert importlib.util.find_spec(module) is not None
        assert function == "main"


def test_importing_the_package_loads_neither_torch_nor_mpi():
    slow = {"torch", "mpi4py.MPI", "sqlalchemy", "optuna"}
    check = f"import sirtaki, sys; print(*sorted({slow} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    assert loaded.stdout.strip() == ""


@pytest.mark.parametrize("part", ["autotune", "comm", "registry"])
def test_a_part_has_one_name_even_at_the_checkouts_root(part):
    command = [sys.executable, "-c", f"import {part}"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert f"ImportError: write `import sirtaki.{part}`, not `import {part}`" in answer.stderr
