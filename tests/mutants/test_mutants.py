"""Each deliberate error in the product is detected by the tests that the table names.

The repository is copied, one line of the copy is replaced, and a test of the copy must fail.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
WHERE = "import sirtaki, sys; sys.exit(not sirtaki.__file__.startswith(sys.argv[1]))"


def copy_of_repository(path: Path) -> dict[str, str]:
    """Copy the files that git tracks. Return an environment in which Python imports Sirtaki from the copy."""
    known = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(known, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).exists():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, path / name, follow_symlinks=False)
    env = {**os.environ, "PYTHONPATH": str(path)}
    subprocess.run([sys.executable, "-c", WHERE, f"{path}/"], cwd=path.parent, env=env, check=True)
    return env


def run(path: Path, env: dict[str, str], tests: str) -> subprocess.CompletedProcess[str]:
    file, _, names = tests.partition(" ")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{file}"]
    command += ["-m", "not slow and not gpu", *(["-k", names] if names else [])]
    return subprocess.run(command, cwd=path, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what.replace(" ", "_"))
def test_the_table_is_of_lines_that_are_there_once(mutant: Mutant) -> None:
    assert (ROOT / "sirtaki" / mutant.file).read_text().count(mutant.right) == 1, "renew the table"
    assert (ROOT / "tests" / mutant.tests.partition(" ")[0]).is_file()


def test_the_table_names_tests_that_are_there() -> None:
    programs = "".join(path.read_text() for path in (ROOT / "tests/ranks").glob("*.py"))
    for tests in {mutant.tests for mutant in MUTANTS}:
        file, _, names = tests.partition(" ")
        defined = re.findall(r"(?m)^def (\w+)", (ROOT / "tests" / file).read_text() + programs)
        words = set(re.findall(r"\w+", names)) - {"and", "or", "not"}
        assert all(any(word in name for name in defined) for word in words), f"renew the table: {tests}"


def test_the_table_has_no_duplicates() -> None:
    assert max(Counter(mutant.what for mutant in MUTANTS).values()) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tests", sorted({mutant.tests for mutant in MUTANTS}))
def test_where_no_line_is_wrong_the_same_tests_pass(tests: str, tmp_path: Path) -> None:
    ended = run(tmp_path, copy_of_repository(tmp_path), tests)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what.replace(" ", "_"))
def test_a_wrong_line_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    env, path = copy_of_repository(tmp_path), tmp_path / "sirtaki" / mutant.file
    path.write_text(path.read_text().replace(mutant.right, mutant.wrong))
    ended = run(tmp_path, env, mutant.tests)
    assert ended.returncode == 1, f"{mutant.tests} did not notice {mutant.what}: {ended.stdout[-2000:]}{ended.stderr}"
