"""What a search may choose from, by what was measured before it."""

from sirtaki.autotune.knobs import KnobSpace
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.engine.tuning.probes import Measured, without_planners

GLOO, MPI, SHARED = (
    (kind, Algorithm.FLAT) for kind in (TransportKind.GLOO, TransportKind.MPI, TransportKind.SHARED_MEMORY)
)


def test_routes_that_were_not_probed_again_may_be_chosen_and_only_some_of_them_promise_something() -> None:
    probed = KnobSpace(routes=(GLOO,))
    found = Measured(space=probed, promising=probed).with_routes([SHARED, GLOO, MPI], promising=[SHARED, GLOO])
    assert found.space.routes == (SHARED, GLOO, MPI)
    assert found.promising.routes == (SHARED, GLOO)


def test_without_probes_nobody_tunes_threads() -> None:
    found = without_planners(KnobSpace(routes=(GLOO,), threads=(None, 512)))
    assert found.space.threads == found.promising.threads == (None,)
    assert found.links == {}
    assert found.model([], [], 0.0, 0.0) is None  # type: ignore[arg-type]
