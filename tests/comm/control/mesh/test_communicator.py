"""Contexts: who belongs together finds each other without a message, and what nobody wants is dropped."""

from collections.abc import Iterator

import numpy as np
import pytest
from fakes.meshes import close, connected, on_all, until

from sirtaki.comm.control.communicator import Op
from sirtaki.comm.control.failure import poll_until
from sirtaki.comm.control.mesh import MeshCommunicator
from sirtaki.comm.control.mesh_links import Links


@pytest.fixture
def links() -> Iterator[list[Links]]:
    links = connected(3)
    yield links
    close(links)
    assert not any(each.failures.error for each in links)


def test_contexts_have_one_number_on_all_ranks_and_no_other_has_it(links: list[Links]) -> None:
    worlds = [MeshCommunicator(each) for each in links]
    first = [world.duplicate() for world in worlds]
    second = [world.duplicate() for world in worlds]
    inner = [comm.duplicate() for comm in first]
    numbers = [[comm._context for comm in each] for each in zip(worlds, first, second, inner, strict=True)]
    assert numbers[0] == numbers[1] == numbers[2]
    assert len(set(numbers[0])) == 4


def test_a_subset_needs_nothing_of_the_others(links: list[Links]) -> None:
    worlds = [MeshCommunicator(each) for each in links]
    for _ in range(3):
        worlds[0].subset([0, 1])  # which rank 2 knows nothing of
        worlds[1].subset([0, 1])
    assert len({worlds[rank].subset([2, 0])._context for rank in (0, 2)}) == 1
    assert len({world.duplicate()._context for world in worlds}) == 1
    assert worlds[0].subset([0, 1])._context != worlds[0].subset([1, 0])._context


def test_what_comes_early_is_kept_and_what_comes_late_is_dropped(links: list[Links]) -> None:
    worlds = [MeshCommunicator(each) for each in links]
    ahead = worlds[0].duplicate()
    test = ahead.broadcast(np.arange(3.0), 0)
    assert test()
    until(lambda: worlds[1].collect() is None and len(links[1]._mailboxes) == 2)  # the world's, and that one's
    behind, received = worlds[1].duplicate(), np.zeros(3)
    poll_until(behind.broadcast(received, 0), failures=behind.failures)
    assert received.tolist() == [0.0, 1.0, 2.0]
    behind.free()
    ahead.post(1, 7, b"too late")
    worlds[0].post(1, 7, b"in time")
    until(lambda: worlds[1].collect() == (0, 7, b"in time"))
    assert len(links[1]._mailboxes) == 1


def test_a_rank_may_post_to_itself(links: list[Links]) -> None:
    world = MeshCommunicator(links[1])
    world.post(1, 3, b"mine")
    assert world.collect() == (1, 3, b"mine")
    assert world.collect() is None


def test_an_operation_that_was_given_up_does_not_disturb_others(links: list[Links]) -> None:
    def act(comm: MeshCommunicator) -> list[float]:
        abandoned, used = comm.duplicate(), comm.duplicate()
        if comm.rank:
            assert not abandoned.all_reduce(np.ones(2), Op.SUM)()
        array = np.full(2, float(comm.rank))
        poll_until(used.all_reduce(array, Op.SUM), failures=comm.failures)
        return array.tolist()

    assert on_all(links, act) == [[3.0, 3.0]] * 3
