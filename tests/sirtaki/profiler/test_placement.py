import os
from types import SimpleNamespace
from typing import Any

from sirtaki.analysis.recorder import clock_identity, own_placement


def test_a_rank_says_where_it_runs() -> None:
    control: Any = SimpleNamespace(rank=2, hosts=[0, 0, 2, 2], node_ranks=[2, 3], host_names=["a", "a", "b", "b"])
    place = own_placement(control)
    assert (place.rank, place.host, place.node, place.host_name) == (2, 2, 2, "b")
    assert set(place.processors) == os.sched_getaffinity(0)
    assert place.host_processors >= len(place.processors) >= 1


def test_processes_of_one_machine_read_one_clock() -> None:
    assert clock_identity() == clock_identity() != ""
