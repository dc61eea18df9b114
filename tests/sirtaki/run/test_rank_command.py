import sys

import pytest

from sirtaki.errors import ConfigError
from sirtaki.run.rank_command import rank_command, unescape

RUNNER = ("-m", "sirtaki.run.rank")


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("#!/usr/bin/env python\n")
    return "train.py"


def words(*command, as_horovod=False, check_files=True):
    return rank_command(command, as_horovod=as_horovod, check_files=check_files).words


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ((), ("train.py", "--lr", "1")),
        (("-u", "-W", "error", "-X", "dev"), ("train.py", "-m", "-c")),
        (("-u",), ("-m", "json.tool", "x")),
        ((), ("-c", "print(1)")),
    ],
)
def test_python_runs_the_script_inside_the_runner(script, options, arguments):
    assert words(sys.executable, *options, *arguments) == (sys.executable, *options, *RUNNER, "--", *arguments)


def test_an_attached_module_name_is_split_off(script):
    assert words(sys.executable, "-mjson.tool") == (sys.executable, *RUNNER, "--", "-m", "json.tool")


def test_the_runner_is_told_of_as_horovod(script):
    assert words(sys.executable, script, as_horovod=True) == (sys.executable, *RUNNER, "--as-horovod", "--", script)


def test_an_executable_python_script_is_run_by_its_interpreter(tmp_path):
    program = tmp_path / "tool"
    program.write_text(f"#!{sys.executable} -u\n")
    program.chmod(0o755)
    assert words(str(program), "x") == (sys.executable, "-u", *RUNNER, "--", str(program), "x")


@pytest.mark.parametrize(
    "command", [("sh", "-c", "true"), (sys.executable,), (sys.executable, "-"), (sys.executable, "-V")]
)
def test_what_is_not_a_python_script_is_handed_over(command):
    assert words(*command) == (sys.executable, *RUNNER, "--exec", "--", *command)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ((), "no command"),
        ((sys.executable, "nothere.py"), "no script 'nothere.py'"),
        (("nothere",), "no program 'nothere'"),
        (("train.py",), "python train.py"),
    ],
)
def test_what_does_not_exist_is_refused_before_anything_starts(script, command, message):
    with pytest.raises(ConfigError, match=message):
        words(*command)


def test_on_other_hosts_files_cannot_be_checked(script):
    assert words(sys.executable, "nothere.py", check_files=False)[-1] == "nothere.py"


@pytest.mark.parametrize("program", [(sys.executable, "-c", "1"), ("sh", "-c", "true")])
def test_a_colon_which_begins_the_next_program_for_mpiexec_reaches_the_script_all_the_same(program):
    arguments = (":", "\\:", "\\\\:", "a:b", "", "\\")
    passed = words(*program, *arguments)
    assert ":" not in passed
    assert tuple(map(unescape, passed[-len(arguments) :])) == arguments
