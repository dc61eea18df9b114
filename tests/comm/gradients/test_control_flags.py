"""Flags that are reduced with the gradients."""

import itertools

import pytest
import torch

from sirtaki.comm.device import HostDevice
from sirtaki.comm.gradients.buffers import FLAG_COUNT, ControlFlags, Pace, Said, UsageFlags

ALL = [Said(*map(bool, bits)) for bits in itertools.product((0, 1), repeat=FLAG_COUNT)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_any_rank_says_is_heard_after_the_sum(dtype: torch.dtype) -> None:
    buffer = torch.zeros(FLAG_COUNT, dtype=dtype)
    flags = ControlFlags(HostDevice(), buffer)
    for own, others in itertools.product(ALL, repeat=2):
        if not (own.not_slower or own.not_faster):
            continue  # nobody finds both
        flags.pace = own.pace
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


@pytest.mark.parametrize(
    ("ranks", "agreed"),
    [
        ([Pace.SLOWER, Pace.SLOWER], Pace.SLOWER),
        ([Pace.FASTER, Pace.FASTER], Pace.FASTER),
        ([Pace.USUAL, Pace.USUAL], Pace.USUAL),
        ([Pace.SLOWER, Pace.USUAL], Pace.USUAL),
        ([Pace.FASTER, Pace.USUAL], Pace.USUAL),
        ([Pace.SLOWER, Pace.FASTER], Pace.USUAL),
    ],
)
def test_communication_has_changed_only_if_all_ranks_say_so(ranks: list[Pace], agreed: Pace) -> None:
    heard = Said(
        not_slower=any(pace is not Pace.SLOWER for pace in ranks),
        not_faster=any(pace is not Pace.FASTER for pace in ranks),
    )
    assert heard.pace is agreed
    assert Said().pace is Pace.USUAL, "nothing was read"
