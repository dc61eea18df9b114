"""Flags that are reduced with the gradients."""

import itertools

import pytest
import torch

from sirtaki.comm.device import HostDevice
from sirtaki.comm.gradients.control_flags import FLAG_COUNT, ControlFlags, Said, UsageFlags

ALL = [Said(*map(bool, bits)) for bits in itertools.product((0, 1), repeat=FLAG_COUNT)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_any_rank_says_is_heard_after_the_sum(dtype: torch.dtype) -> None:
    buffer = torch.zeros(FLAG_COUNT, dtype=dtype)
    flags = ControlFlags(HostDevice(), buffer)
    for own, others in itertools.product(ALL, repeat=2):
        flags.write(own)
        buffer += 7 * torch.tensor(others, dtype=dtype)  # of seven other ranks
        buffer /= 8  # an average
        heard = Said(*(mine or theirs for mine, theirs in zip(own, others, strict=True)))
        assert flags.now() == heard
        assert flags.before() == Said(), "it has not been read yet"
        flags.read_back()
        buffer.zero_()
        assert flags.before() == heard
        flags.forget()
        assert flags.before() == Said()


def test_usage_is_known_for_each_parameter() -> None:
    buffer = torch.full((5,), 9.0)
    usage = UsageFlags(HostDevice(), buffer)
    usage.write([3, 0])
    buffer += torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0])
    assert usage.wanted
    assert usage.used() == [True, False, True, True, False]
    assert not UsageFlags(HostDevice(), torch.zeros(0)).wanted
