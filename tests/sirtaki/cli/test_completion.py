import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sirtaki.cli.__main__ import main

COMPLETE = """
set -eu
source {script}
COMP_WORDS=({words} "{last}") COMP_CWORD={place} COMPREPLY=()
_shtab_{program} {program} "{last}" x || :
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "script"
    with path.open("w") as file, contextlib.redirect_stdout(file):
        assert main(["completion", "bash"]) == 0
    return path


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("sirtaki rep", {"replay", "report"}),
        ("sirtaki registry li", {"list"}),
        ("sirtaki top --on", {"--once"}),
        ("sirtaki translate tra", {"train.py"}),
        ("sirtaki completion ", {"bash", "zsh"}),
        ("sirtakirun --min", {"--min-np", "--min-num-proc"}),
        ("sirtakirun --hostfile tra", {"train.py"}),
        ("sirtakirun -np 2 tra", {"train.py"}),
    ],
)
def test_bash_completes_commands_options_and_files(line: str, offered: set[str], script: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    *words, last = line.split(" ")
    asked = COMPLETE.format(script=script, words=" ".join(words), last=last, place=len(words), program=words[0])
    answer = subprocess.run(["bash", "-c", asked], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(answer.stdout.split()) == offered


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_accepts_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    subprocess.run(
        ["zsh", "-c", 'autoload -Uz compinit; compinit -u -D; eval "$(cat)"'], input=script, text=True, check=True
    )


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'sirtaki[completion]'" in capsys.readouterr().err
