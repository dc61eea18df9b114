"""What may be tuned follows from what the router can do and the user has fixed."""

from collections.abc import Sequence

import pytest

from sirtaki.autotune.knobs import MIB
from sirtaki.comm.plan import Algorithm, Route, TransportKind
from sirtaki.engine.knob_choices import knob_space
from sirtaki.settings import Settings

ROUTE = (TransportKind.NCCL, Algorithm.FLAT)


class NcclRouter:
    """A router over NCCL, as far as a knob space asks for it."""

    routes = (ROUTE,)

    def __init__(self, streams: int) -> None:
        self._streams = streams

    def max_streams(self, routes: Sequence[Route] | None = None) -> int:
        return self._streams

    def threads(self) -> tuple[int, ...]:
        return 512, 1024


@pytest.mark.parametrize(
    ("streams", "fixed", "offered"),
    [
        (24, {}, (None, 512, 1024)),
        (1, {}, (None,)),
        (24, {"SIRTAKI_THREADS": "1024"}, (1024,)),
        (1, {"SIRTAKI_THREADS": "1024"}, (1024,)),
    ],
)
def test_several_allowances_are_offered_where_their_communicators_may_overlap_and_a_fixed_one_anywhere(
    streams: int, fixed: dict[str, str], offered: tuple[int | None, ...]
) -> None:
    space = knob_space(NcclRouter(streams), Settings.from_environ(fixed), 64 * MIB)  # type: ignore[arg-type]
    assert space.threads == offered
    assert space.streams[-1] == streams
