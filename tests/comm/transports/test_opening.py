"""What cannot be opened on one rank fails on all of them alike, and everything else goes on."""

import pytest
from rank_jobs import ONLY_OVER_MPI, Job, Play, RankCase, on_ranks, slow

from sirtaki.comm.transports.contract import open_together
from sirtaki.errors import TransportError


@ONLY_OVER_MPI
@on_ranks("opening", Job(3), slow(Job(2)), slow(Job(4)))
def test_all_ranks_agree_on_what_could_not_be_opened_and_go_on(play: Play, rank_case: RankCase) -> None:
    play(rank_case)


def test_what_is_open_here_is_closed_if_another_rank_could_not_open_it() -> None:
    closed: list[str] = []

    def another_fails(problem: str) -> None:
        assert not problem
        raise TransportError("rank 1: no descriptors")

    with pytest.raises(TransportError, match="no descriptors"):
        open_together("stream 0", lambda: "mine", agree=another_fails, close=closed.append)
    assert closed == ["mine"]


def test_a_rank_that_cannot_open_tells_the_others_what_and_why() -> None:
    told: list[str] = []

    def agree(problem: str) -> None:
        told.append(problem)
        raise TransportError(problem)

    def fail() -> str:
        raise RuntimeError("out of threads")

    with pytest.raises(TransportError):
        open_together("stream 3", fail, agree=agree, close=lambda _: pytest.fail("there is nothing to close"))
    assert told == ["stream 3: out of threads"]


def test_what_opens_everywhere_stays_open() -> None:
    assert open_together("stream 0", lambda: "mine", agree=lambda problem: None) == "mine"
