"""A host says what it lacks, in one sentence."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from sirtaki.run.host_check import Need, finding_here, interface_problem, problem_here, versions_here

NOTHING = Need(folder="/", script="", interfaces=(), versions={})


def test_versions_must_be_the_same() -> None:
    assert problem_here(replace(NOTHING, versions=versions_here())) == ""
    other = {**versions_here(), "PyTorch": "1.0"}
    assert "and 1.0 where the job is started" in problem_here(replace(NOTHING, versions=other))


def test_the_script_must_be_there_seen_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    need = replace(NOTHING, folder=str(tmp_path), script="train.py")
    assert problem_here(need) == ""
    assert problem_here(replace(need, folder="/")).startswith("there is no script /train.py: copy it there")


def test_one_of_the_interfaces_must_be_there() -> None:
    assert interface_problem(("nowhere0", "lo")) == ""
    assert interface_problem(()) == ""
    assert "lo (127.0.0.1)" in interface_problem(("nowhere0",))


def test_as_a_program_it_answers_in_a_line() -> None:
    need = replace(NOTHING, interfaces=("nowhere0",), versions=versions_here())
    assert Need.of(json.loads(need.as_json())) == need
    answer = subprocess.run(
        [sys.executable, "-m", "sirtaki.run.host_check"],
        input=f"{need.as_json()}\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    here = asdict(finding_here(need))
    assert here["problem"]
    assert json.loads(answer.stdout) == {**here, "networks": list(here["networks"])}
    assert Need.of({**asdict(need), "more": 1}) == need
