"""What transports and their users hand each other."""

import torch

from sirtaki.comm.transports.contract import NOTHING_TO_DO, FlatBuffer, StreamSpec


def test_the_work_of_an_empty_range_is_over_and_has_no_times() -> None:
    assert NOTHING_TO_DO.wait(0.0)
    assert NOTHING_TO_DO.is_done()
    assert NOTHING_TO_DO.times() == (None, None)


def test_buffers_are_told_apart_by_themselves_not_by_what_is_in_them() -> None:
    tensor = torch.zeros(3)
    one, other = FlatBuffer(tensor), FlatBuffer(tensor)
    assert one != other
    assert len({one, other, one}) == 2


def test_what_travels_on_one_stream_with_one_allowance_is_the_same() -> None:
    assert StreamSpec(1) == StreamSpec(1, None)
    assert len({StreamSpec(1), StreamSpec(1, 512), StreamSpec(2), StreamSpec(1)}) == 3
