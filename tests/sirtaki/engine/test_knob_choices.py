"""What may be tuned follows from what the router can do and the user has fixed."""

from collections.abc import Sequence

import pytest

from sirtaki.autotune.knobs import MIB
from sirtaki.comm.plan import Algorithm, Route, TransportKind
from sirtaki.engine.tuning.plans import knob_space
from sirtaki.settings import Settings

ROUTE = (TransportKind.NCCL, Algorithm.FLAT)


TREE = (TransportKind.NCCL, Algorithm.HIERARCHICAL)


class NcclRouter:
    """A router over NCCL, as far as a knob space asks for it."""

    def __init__(self, streams: int, *, on_tree: int = 0) -> None:
        self._limits = {ROUTE: streams, **({TREE: on_tree} if on_tree else {})}
        self.routes = tuple(self._limits)

    def max_streams(self, routes: Sequence[Route] | None = None) -> int:
        return min(self._limits[route] for route in routes or self.routes)

    def why_not_more(self, routes: Sequence[Route]) -> str:
        return "as is"

    def threads(self) -> tuple[int, ...]:
        return 512, 1024


@pytest.mark.parametrize(("streams", "offered"), [(24, (None, 512, 1024)), (1, (None,))])
def test_several_allowances_are_offered_where_their_communicators_may_overlap(
    streams: int, offered: tuple[int | None, ...]
) -> None:
    space = knob_space(NcclRouter(streams), Settings.from_environ({}), 64 * MIB)  # type: ignore[arg-type]
    assert space.threads == offered
    assert space.streams[-1] == streams


def test_a_route_that_opens_fewer_streams_than_another_is_offered_with_as_many_as_it_opens() -> None:
    space = knob_space(NcclRouter(24, on_tree=8), Settings.from_environ({}), 64 * MIB)  # type: ignore[arg-type]
    assert space.streams_on(ROUTE)[-1] == 24
    assert space.streams_on(TREE)[-1] == 8
    assert space.routes == (ROUTE, TREE)


@pytest.mark.parametrize(("streams", "routes"), [("8", (ROUTE, TREE)), ("12", (ROUTE,))])
def test_routes_that_do_not_open_as_many_streams_as_the_user_asks_for_are_left_out(
    streams: str, routes: tuple[Route, ...]
) -> None:
    settings = Settings.from_environ({"SIRTAKI_STREAMS": streams})
    assert knob_space(NcclRouter(24, on_tree=8), settings, 64 * MIB).routes == routes  # type: ignore[arg-type]
