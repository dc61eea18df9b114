"""From what the user wants to start to what each rank runs: the command, wrapped in `sirtaki.run.rank`."""

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sirtaki.errors import ConfigError

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_COLON = re.compile(r"\\*:")  # a word `:` begins the next program for any mpiexec
_OPTIONS_WITH_ARGUMENT = ("-W", "-X", "--check-hash-based-pycs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommand:
    """What each rank runs.

    Attributes:
        python: the interpreter whose MPI library counts: the script's, or the launcher's for other programs.
        words: the whole command line.
        script: the file among them that is run; "" = a module, code or no Python.
    """

    python: str
    words: tuple[str, ...]
    script: str = ""


def rank_command(command: Sequence[str], *, as_horovod: bool, check_files: bool) -> RankCommand:
    """`python -u train.py --lr 1` → `python -u -m sirtaki.run.rank -- train.py --lr 1`.

    Args:
        command: the user's words.
        as_horovod: `import horovod` is to give Sirtaki.
        check_files: all ranks run on this machine, so that programs and scripts must exist here.

    Raises:
        ConfigError: there is no command, program or script.
    """
    if not command:
        raise ConfigError("no command to run; write it last: sirtakirun -np 4 python train.py")
    command = _with_interpreter(list(command))
    program = shutil.which(command[0])
    if program is None and check_files:
        hint = f"; is it a script? Then: python {command[0]}" if Path(command[0]).is_file() else ""
        raise ConfigError(f"there is no program {command[0]!r} on PATH{hint}")
    program = program or command[0]
    flags = ("--as-horovod",) if as_horovod else ()
    split = _script_position(command)
    if split is None:
        words = (sys.executable, "-m", "sirtaki.run.rank", *flags, "--exec", "--", *map(_escape, command))
        return RankCommand(python=sys.executable, words=words)
    script = command[split:]
    if script[0].startswith(("-m", "-c")) and len(script[0]) > 2:  # `-mtrain` is `-m train`
        script = [script[0][:2], script[0][2:], *script[1:]]
    if check_files and not script[0].startswith("-") and not Path(script[0]).exists():
        raise ConfigError(f"there is no script {script[0]!r} in {Path.cwd()}")
    words = (program, *command[1:split], "-m", "sirtaki.run.rank", *flags, "--", *map(_escape, script))
    return RankCommand(python=program, words=words, script="" if script[0].startswith("-") else script[0])


def unescape(word: str) -> str:
    """The user's word, on the rank's side."""
    return word[1:] if _COLON.fullmatch(word) and word != ":" else word


def _escape(word: str) -> str:
    return f"\\{word}" if _COLON.fullmatch(word) else word


def _with_interpreter(command: list[str]) -> list[str]:
    """An executable Python script (`./train.py`, a console script) is run by the interpreter in its first line."""
    program = shutil.which(command[0])
    if program is None:
        return command
    with open(program, "rb") as file:
        first = file.readline(256).decode(errors="replace")
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    if words and Path(words[0]).name == "env":
        del words[0]
    if words and _PYTHON.fullmatch(Path(words[0]).name):
        return [*words, program, *command[1:]]
    return command


def _script_position(command: Sequence[str]) -> int | None:
    """Where the script, `-m` or `-c` stands in a Python command line; None if this is not one."""
    if not _PYTHON.fullmatch(Path(command[0]).name):
        return None
    index = 1
    while index < len(command) and command[index].startswith("-") and command[index] != "-":
        if command[index].startswith(("-m", "-c")):
            return index if len(command[index]) > 2 or index + 1 < len(command) else None
        index += 2 if command[index] in _OPTIONS_WITH_ARGUMENT else 1
    return index if index < len(command) and command[index] != "-" else None
