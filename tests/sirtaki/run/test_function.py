"""`run` turns its arguments into a launch and the ranks' results into a list."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sirtaki.errors import ConfigError, LaunchError
from sirtaki.run import launch as launching
from sirtaki.run.function import answer_call, run

Launched = list[argparse.Namespace]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Options of the launches; each calls the function in this process, for each rank."""
    found: Launched = []

    def launch(options: argparse.Namespace) -> int:
        found.append(options)
        for rank in range(options.ranks):
            answer_call(Path(options.command[-1]), rank)
        return 0

    monkeypatch.setattr(launching, "launch", launch)
    return found


def divide(a: int, b: int = 1) -> float:
    return a / b


def test_the_function_is_called_on_every_rank_and_results_come_by_rank(launched: Launched) -> None:
    assert run(divide, (6,), {"b": 3}, num_proc=3) == [2.0] * 3
    assert run(divide, [6]) == [6.0]
    assert [options.ranks for options in launched] == [3, 1]
    assert launched[0].command[:3] == [sys.executable, "-m", "sirtaki.run.function"]
    assert not Path(launched[0].command[-1]).exists()


def test_arguments_become_options(launched: Launched) -> None:
    run(
        divide,
        (6,),
        num_proc=1,
        np=2,
        hosts="localhost:2",
        start_timeout=7.0,
        ssh_port=2222,
        ssh_identity_file="/key",
        output_filename="/out",
        verbose=True,
        mpi_args="--mca a b",
        network_interface="eth0",
        executable="/usr/bin/python3",
    )
    (options,) = launched
    assert options.ranks == 2
    assert options.hosts == "localhost:2"
    assert options.start_timeout == 7.0
    assert (options.ssh_port, options.ssh_identity_file) == (2222, "/key")
    assert str(options.output_filename) == "/out"
    assert options.verbose
    assert options.mpi_args == "--mca a b"
    assert options.interfaces == "eth0"
    assert options.command[0] == "/usr/bin/python3"


def test_the_newer_name_of_an_argument_wins_and_those_without_effect_are_taken(launched: Launched) -> None:
    run(
        divide,
        (6,),
        network_interface="eth0",
        network_interfaces="eth1",
        use_gloo=True,
        use_mpi=False,
        disable_cache=True,
    )
    assert launched[0].interfaces == "eth1"
    assert not launched[0].verbose


ELASTIC = ("min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range", "host_discovery_script")


@pytest.mark.parametrize("name", [*ELASTIC, "min_np", "max_np"])
def test_elastic_arguments_are_refused_before_anything_starts(name: str, launched: Launched) -> None:
    arguments: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=r"run\(\) has a fixed number of ranks"):
        run(divide, (6,), **arguments)
    assert launched == []


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (lambda options: 3, "a rank failed with exit code 3; its traceback is in the output above"),
        (lambda options: 0, "there is no result of rank 0"),
    ],
)
def test_a_rank_that_failed_or_left_no_result_is_an_error_and_the_folder_is_gone(
    fails: Callable[[argparse.Namespace], int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []

    def launch(options: argparse.Namespace) -> int:
        folders.append(Path(options.command[-1]))
        assert folders[0].is_dir()
        return fails(options)

    monkeypatch.setattr(launching, "launch", launch)
    with pytest.raises(LaunchError, match=words):
        run(divide, (6,))
    assert not folders[0].exists()
