"""Rounds are counted as the shipped barrier makes them; what a phase takes grows with what it is made of."""

import math

import pytest

from bench.lib.elastic.scale_model import Machine, Rounds, phases

ALONE = Machine(ranks_per_host=1, hosts_per_rack=1000, near_s=1.0, far_s=9.0, message_s=0.0)


@pytest.mark.parametrize("size", [1, 2, 5, 8, 33])
def test_a_barrier_takes_a_latency_for_each_of_its_rounds(size: int) -> None:
    rounds = math.ceil(math.log2(size))
    found = Rounds(size, ALONE)
    assert found.messages == size * rounds
    assert found.partners == rounds
    assert found.seconds == rounds


def test_messages_across_racks_take_longer_and_each_takes_its_core() -> None:
    assert Rounds(4, Machine(ranks_per_host=1, hosts_per_rack=2, near_s=1.0, far_s=9.0, message_s=0.0)).seconds == 18.0
    assert Rounds(2, Machine(near_s=1.0, message_s=0.25)).seconds == 1.5


def test_meeting_and_deciding_are_what_grows() -> None:
    small, large = (
        {phase.name: phase for phase in phases(size, Machine(), member_bytes=100, decide_s=size / 1000)}
        for size in (64, 512)
    )
    met = "met: each with each"
    assert large[met].messages == 511 * 510 // 2 * 6
    assert large[met].seconds > 7 * small[met].seconds
    assert sum(phase.seconds for phase in large.values()) > 0.512
    settled = "settled: two gathers and a barrier"
    assert large[settled].seconds < 4 * small[settled].seconds
