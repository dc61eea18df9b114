"""Every route of a job passes the conformance suite, on one node and on simulated ones."""

import os

import pytest
from conftest import RunRanks
from rank_jobs import CONTROL, OVER_MESH

ONE_NODE = ["shared_memory flat", "mpi flat", "gloo flat"]
SEVERAL_NODES = ["gloo hierarchical", "gloo flat", "mpi flat", "mpi hierarchical"]
WITHOUT_MPI = ["shared_memory flat", "gloo flat"]
if os.environ.get(CONTROL) == "mesh":
    ONE_NODE, SEVERAL_NODES = WITHOUT_MPI, ["gloo hierarchical", "gloo flat"]
DIRECT = ["gloo flat direct"]
SEVERAL_NODES = [*SEVERAL_NODES, "gloo hierarchical direct", *DIRECT]


def passed(output: str) -> list[str]:
    return [line.removeprefix("ok ").rsplit(" ", 2)[0] for line in output.splitlines() if line.startswith("ok ")]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_route_of_one_node_reduces_right(run_ranks: RunRanks, ranks: int) -> None:
    assert passed(run_ranks("transports.py", ranks).stdout) == ONE_NODE + DIRECT


def test_a_single_rank_has_routes_that_work_too(run_ranks: RunRanks) -> None:
    assert passed(run_ranks("transports.py", 1).stdout) == ONE_NODE[1:] + DIRECT


@pytest.mark.integration
def test_every_route_between_simulated_nodes_reduces_right(run_ranks: RunRanks) -> None:
    assert passed(run_ranks("transports.py", 4, env={"TEST_LOCAL_SIZE": "2"}).stdout) == SEVERAL_NODES


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_route_without_mpi_reduces_right(run_ranks: RunRanks, ranks: int) -> None:
    assert passed(run_ranks("transports.py", ranks, env=OVER_MESH).stdout) == WITHOUT_MPI + DIRECT


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [5, 6])
def test_more_ranks_than_cores_reduce_right(run_ranks: RunRanks, ranks: int) -> None:
    assert passed(run_ranks("transports.py", ranks, timeout_s=110).stdout) == ONE_NODE + DIRECT


@pytest.mark.slow
def test_three_nodes_of_two_reduce_right(run_ranks: RunRanks) -> None:
    assert passed(run_ranks("transports.py", 6, env={"TEST_LOCAL_SIZE": "2"}, timeout_s=110).stdout) == SEVERAL_NODES
