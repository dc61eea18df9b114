"""What is measured of a link."""

import math
from dataclasses import replace

import pytest

from sirtaki.autotune.model.fits import LinkProbe
from sirtaki.errors import TuningError

PROBE = LinkProbe(unit_bytes=1024, streams=2, seconds=3.0, rounds=4)


def test_a_round_takes_its_share_of_the_time() -> None:
    assert PROBE.round_s == 0.75
    assert replace(PROBE, rounds=1).round_s == 3.0


@pytest.mark.parametrize(
    "change",
    [
        {"unit_bytes": 0},
        {"streams": 0},
        {"rounds": 0},
        {"seconds": 0.0},
        {"seconds": -1.0},
        {"seconds": math.inf},
        {"seconds": math.nan},
    ],
)
def test_what_cannot_have_been_measured_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(TuningError, match="a probe needs positive bytes, streams, rounds and seconds"):
        replace(PROBE, **change)
