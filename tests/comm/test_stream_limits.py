"""How many streams of a route can be open, and why not more."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.comm.router import StreamLimits
from sirtaki.comm.transports.contract import StreamCost, Transport

ROUTE = (TransportKind.GLOO, Algorithm.FLAT)


def limits(descriptors: int) -> StreamLimits:
    def minimum(values: Any) -> Any:
        return np.full_like(values, descriptors)

    return StreamLimits(cast(Any, SimpleNamespace(size=4, minimum=minimum)))


GLOO = cast(Transport, SimpleNamespace(stream_cost=StreamCost(descriptors=9, threads=2), max_streams=24))


def test_a_transport_has_its_own_limit() -> None:
    assert limits(1000).limit(ROUTE, GLOO) == (24, "gloo has at most 24")


def test_the_scarcest_ranks_descriptors_may_allow_fewer() -> None:
    most, why = limits(45).limit(ROUTE, GLOO)
    assert most == 5
    assert "each stream of gloo takes 9 descriptors on 4 ranks, and 45 can be used" in why


def test_half_of_what_could_not_be_added_is_not_tried_again() -> None:
    there = limits(1000)
    there.opened[ROUTE] = 4
    there.note_failure(ROUTE, 12)
    assert there.limit(ROUTE, GLOO) == (8, "more streams of gloo could not be opened")
    assert there.is_possible(ROUTE)


def test_a_refused_route_is_not_possible() -> None:
    there = limits(1000)
    there.refuse(ROUTE)
    assert not there.is_possible(ROUTE)
