"""Flags that are reduced with the gradients."""

import itertools

import pytest
import torch

from sirtaki.comm.device import HostDevice
from sirtaki.comm.gradients.control_flags import FLAG_COUNT, REPROFILE, WRITTEN, ControlFlags, UsageFlags


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("own", "others"), list(itertools.product([(0, 0), (0, 1), (1, 0), (1, 1)], repeat=2)))
def test_what_any_rank_sets_is_heard_after_the_sum(
    dtype: torch.dtype, own: tuple[int, int], others: tuple[int, int]
) -> None:
    buffer = torch.zeros(FLAG_COUNT, dtype=dtype)
    flags = ControlFlags(HostDevice(), buffer)
    flags.write(reprofile=bool(own[0]), written=bool(own[1]))
    buffer += 7 * torch.tensor(others, dtype=dtype)  # of seven other ranks
    buffer /= 8  # an average
    for flag in (REPROFILE, WRITTEN):
        assert flags.is_set_now(flag) == bool(own[flag] or others[flag])
        assert not flags.is_set(flag), "it has not been read yet"
    flags.read_back()
    buffer.zero_()
    heard = [bool(mine or theirs) for mine, theirs in zip(own, others, strict=True)]
    assert [flags.is_set(flag) for flag in (REPROFILE, WRITTEN)] == heard
    flags.forget()
    assert not flags.is_set(REPROFILE)


def test_usage_is_known_for_each_parameter() -> None:
    buffer = torch.full((5,), 9.0)
    usage = UsageFlags(HostDevice(), buffer)
    usage.write([3, 0])
    buffer += torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0])
    assert usage.wanted
    assert usage.used() == [True, False, True, True, False]
    assert not UsageFlags(HostDevice(), torch.zeros(0)).wanted
