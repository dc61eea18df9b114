"""`run` turns its arguments into a launch and the ranks' results into a list."""

import argparse
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


def test_arguments_become_options_the_newer_name_wins_and_those_without_effect_are_taken(launched: Launched) -> None:
    given = {
        "hosts": "localhost:2", "start_timeout": 7.0, "ssh_port": 2222, "ssh_identity_file": "/key",
        "output_filename": "/out", "verbose": True, "mpi_args": "--mca a b",
    }  # fmt: skip
    found = run(
        divide, (6,), num_proc=1, np=2, network_interface="eth0", network_interfaces="eth1",
        executable="/usr/bin/python3", use_gloo=True, use_mpi=False, disable_cache=True, **given,
    )  # fmt: skip
    assert found == [6.0, 6.0]
    (options,) = launched
    assert {name: getattr(options, name) for name in given} == given
    assert (options.ranks, options.interfaces, options.command[0]) == (2, "eth1", "/usr/bin/python3")
    assert not Path(options.command[-1]).exists()


ELASTIC = ("min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range", "host_discovery_script")


@pytest.mark.parametrize("name", [*ELASTIC, "min_np", "max_np"])
def test_elastic_arguments_are_refused_before_anything_starts(name: str, launched: Launched) -> None:
    arguments: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=r"run\(\) starts a fixed number of ranks"):
        run(divide, (6,), **arguments)
    assert launched == []


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (lambda options: 3, "a rank failed with exit code 3; its traceback is in the output above"),
        (lambda options: 0, "rank 0 has written no result"),
    ],
)
def test_a_rank_that_failed_or_left_no_result_is_an_error_and_the_folder_is_removed(
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
