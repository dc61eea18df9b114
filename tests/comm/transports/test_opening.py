"""What cannot be opened on one rank fails on all of them alike, and everything else goes on."""

import os
import subprocess
import sys

from rank_jobs import Job, Play, RankCase, on_ranks, slow

from sirtaki.comm.transports.node_memory import _is_alive
from sirtaki.comm.transports.resources import StreamCost, held, streams_within


@on_ranks("opening", Job(3), slow(Job(2)), slow(Job(4)))
def test_all_ranks_agree_on_what_could_not_be_opened_and_go_on(play: Play, rank_case: RankCase) -> None:
    play(rank_case)


def test_streams_fit_into_the_descriptors_and_one_is_always_tried() -> None:
    cost = StreamCost(descriptors=9, threads=2)
    assert [streams_within(free, cost, most=24) for free in (0, 8, 9, 26, 27, 1000)] == [1, 1, 1, 2, 3, 24]
    assert streams_within(0, StreamCost(threads=1), most=24) == 24


def test_what_is_held_is_given_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with held(StreamCost(descriptors=5, threads=3)) as problem:
        assert not problem
        assert len(os.listdir("/proc/self/fd")) == before + 5
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_has_ended_is_not_alive_even_if_nobody_has_waited_for_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert _is_alive(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not _is_alive(process.pid)
    process.communicate()  # which closes its input, too
    assert not _is_alive(process.pid)
