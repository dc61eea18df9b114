import contextlib
import os
import pty
import select
import shutil
import subprocess
import sys
import time
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


CASES = pytest.mark.parametrize(
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


@CASES
def test_bash_completes_commands_options_and_files(line: str, offered: set[str], script: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    *words, last = line.split(" ")
    asked = COMPLETE.format(script=script, words=" ".join(words), last=last, place=len(words), program=words[0])
    answer = subprocess.run(["bash", "-c", asked], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(answer.stdout.split()) == offered


class Zsh:
    """One at a terminal, which has read the script as its users have it do."""

    def __init__(self, folder: Path) -> None:
        self.terminal, theirs = pty.openpty()
        self.process = subprocess.Popen(
            ["zsh", "-f", "-i"],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "TERM": "dumb"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.type("PS1='ready''> '; autoload -Uz compinit; compinit -u -D; source script\n")
        self.until("ready> ")

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def until(self, *words: str, timeout_s: float = 30.0) -> str:
        shown, deadline_s = "", time.monotonic() + timeout_s
        while not all(word in shown for word in words):
            assert select.select([self.terminal], [], [], max(0.0, deadline_s - time.monotonic()))[0], shown
            shown += os.read(self.terminal, 65536).decode(errors="replace")
        return shown

    def close(self) -> None:
        os.close(self.terminal)
        self.process.wait(timeout=10.0)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_completes_commands_options_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", "zsh"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "train.py").touch()
    zsh = Zsh(tmp_path)
    try:
        for line, offered in CASES.args[1]:
            zsh.type(f"{line}\t\t")
            shown = zsh.until(*offered)
            assert "error" not in shown.lower()
            assert "can only be called" not in shown
            zsh.type("\x15")  # deletes the line
    finally:
        zsh.close()


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'sirtaki[completion]'" in capsys.readouterr().err
