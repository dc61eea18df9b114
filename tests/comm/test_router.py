"""Available transports, their numbers of streams, and the fallback if one cannot be opened."""

import logging
import sys
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes.groups import LoneOpener

from bench.lib.cluster import LabShape, NetLab, why_unavailable
from sirtaki.comm import router as router_module
from sirtaki.comm.control.communicator import Backend
from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.device import Device, nccl_owners
from sirtaki.comm.nccl_streams.transport import NcclHierarchicalTransport, NcclTransport
from sirtaki.comm.plan import Algorithm, CommPlan, Route, TransportKind, Unit
from sirtaki.comm.router import MAX_COMMUNICATORS, Router, streams_of
from sirtaki.comm.transports.contract import NOTHING_TO_DO, FlatBuffer, StreamCost, StreamSpec, Work
from sirtaki.comm.transports.gloo import DirectTransport
from sirtaki.engine.tuning.plans import why_fewer_streams
from sirtaki.errors import CommError, PeerLostError, PlanError, TransportError

FLAT, TREE = Algorithm.FLAT, Algorithm.HIERARCHICAL
GLOO, MPI, STAGED = TransportKind.GLOO, TransportKind.MPI, TransportKind.STAGED


class Transport:
    """A transport that opens at most `possible` streams, and records calls."""

    def __init__(self, route: Route, *, max_streams: int, threads: tuple[int, ...], descriptors: int) -> None:
        self.kind, self.max_streams, self.threads = route[0], max_streams, threads
        self.stream_cost = StreamCost(descriptors=descriptors)
        self.possible = max_streams
        self.opened: list[list[StreamSpec]] = []
        self.asked: list[tuple[int, int, dict[str, Any]]] = []
        self.closed, self.ends = 0, True
        self.kept: list[int] = []

    def open_streams(self, streams: Sequence[StreamSpec]) -> None:
        if max(stream.number for stream in streams) >= self.possible:
            raise TransportError("no more threads")
        self.opened.append(list(streams))

    def all_reduce(self, buffer: FlatBuffer, start: int, stop: int, **how: Any) -> Work:
        self.asked.append((start, stop, how))
        return NOTHING_TO_DO

    def keep(self, streams: int) -> None:
        self.kept.append(streams)

    def close(self) -> bool:
        self.closed += 1
        return self.ends


ROUTES: tuple[Route, ...] = ((GLOO, TREE), (GLOO, FLAT), (MPI, FLAT))

Make = Callable[..., Router]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    def made(
        *,
        routes: tuple[Route, ...] = ROUTES,
        device: Device | None = None,
        descriptors: int = 10_000,
        limits: dict[Route, int] = {},  # noqa: B006
        threads: dict[Route, tuple[int, ...]] = {},  # noqa: B006
        impossible: Collection[Route] = (),
        stream_descriptors: int = 0,
        local_sizes: Sequence[int] = (1, 1),
    ) -> Router:
        def transport(self: Router, route: Route) -> Transport:
            if route in impossible:
                raise TransportError("no such network")
            most = limits.get(route, 24)
            return Transport(route, max_streams=most, threads=threads.get(route, ()), descriptors=stream_descriptors)

        monkeypatch.setattr(Router, "_possible", lambda self: routes)
        monkeypatch.setattr(Router, "_create", transport)
        control: Any = SimpleNamespace(
            rank=0,
            size=2,
            local_rank=0,
            local_sizes=local_sizes,
            one_node=False,
            failures=FailureBoard(),
            minimum=lambda values: np.full_like(values, descriptors),
            agree_on_success=lambda problem: None,
        )
        return Router(control, timeout_s=1.0, device=device or Device())

    return made


def plan(streams: int, *algorithms: Algorithm, kind: TransportKind = GLOO) -> CommPlan:
    """Units of one element, on the streams in turn."""
    units = tuple(
        Unit(start=number, stop=number + 1, stream=number % streams, algorithm=algorithm)
        for number, algorithm in enumerate(algorithms)
    )
    return CommPlan(numel=len(units), units=units, streams=streams, transport=kind)


def transport(router: Router, route: Route) -> Transport:
    found: Any = router.transports[route]
    return found  # type: ignore[no-any-return]


def test_the_streams_that_a_plan_uses_are_named_once_for_each_algorithm() -> None:
    units = (
        Unit(start=0, stop=1, stream=2, threads=512),
        Unit(start=1, stop=2, stream=0, algorithm=TREE),
        Unit(start=2, stop=3, stream=2, threads=512),
        Unit(start=3, stop=4, stream=2),
    )
    there = CommPlan(numel=4, units=units, streams=3, transport=GLOO)
    assert streams_of(there, FLAT) == [StreamSpec(2, 512), StreamSpec(2, None)]
    assert streams_of(there, TREE) == [StreamSpec(0)]


@pytest.mark.parametrize(("round_trip_s", "size", "direct"), [(0.01, 4, True), (0.0, 4, False), (0.01, 2, False)])
def test_units_are_sent_directly_only_where_packets_between_more_than_two_ranks_are_slow(
    monkeypatch: pytest.MonkeyPatch, round_trip_s: float, size: int, direct: bool
) -> None:
    monkeypatch.setattr(Router, "_possible", lambda self: ((GLOO, FLAT),))
    control: Any = SimpleNamespace(
        rank=0,
        size=size,
        local_sizes=(1,) * size,
        failures=FailureBoard(),
        minimum=lambda values: np.full_like(values, 1000.0),
        round_trip_s=round_trip_s,
        comm=SimpleNamespace(rank=0, size=size),
        address=lambda: "127.0.0.1",
        agree_on_success=lambda problem: None,
    )
    router = Router(control, timeout_s=1.0)
    assert isinstance(router.transports[GLOO, FLAT], DirectTransport) is direct


def test_routes_that_cannot_be_created_are_left_out_and_logged_by_rank_0(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        router = make(impossible={(GLOO, FLAT)})
    assert router.routes == ((GLOO, TREE), (MPI, FLAT))
    assert [record.getMessage() for record in caplog.records] == [
        "the transport gloo with the flat algorithm cannot be used: no such network; Sirtaki chooses among the "
        "remaining transports: gloo hierarchical, mpi flat"
    ]
    with pytest.raises(PlanError, match=r"gloo with the flat algorithm is not possible in this job; .*: gloo hier"):
        router.open_plan(plan(1, FLAT))


def test_the_streams_that_all_routes_offer_are_as_many_as_the_poorest_has(make: Make) -> None:
    router = make(limits={(GLOO, TREE): 7, (MPI, FLAT): 3})
    assert router.max_streams() == 3
    assert router.max_streams([(GLOO, TREE), (GLOO, FLAT)]) == 7
    assert router.why_not_more([(MPI, FLAT)]) == "mpi supports at most 3 streams"
    assert router.why_not_more([(MPI, FLAT), (GLOO, FLAT), (GLOO, TREE)]) == (
        "mpi supports at most 3 streams; with SIRTAKI_TRANSPORT set there can be 24 on gloo and 7 on gloo"
    )
    assert router.why_not_more([(GLOO, FLAT), (MPI, FLAT)]) == "gloo supports at most 24 streams"


@pytest.mark.parametrize(("ranks", "streams"), [(2, 24), (4, 16), (8, 6), (16, 3), (64, 1)])
def test_fewer_streams_are_tried_on_more_ranks_unless_the_user_fixes_the_number(
    make: Make, ranks: int, streams: int
) -> None:
    router = make()
    for each in router.transports.values():
        each.stream_cost = StreamCost(descriptors=ranks + 5, threads=2, connections=ranks - 1)
    assert router.max_streams() == streams
    assert bool(router.affordable_routes) == (ranks < 50)
    assert router.max_streams(fixed=True) == 24
    why = why_fewer_streams(router, (GLOO, FLAT), ranks=ranks)
    assert bool(why) == (streams < 24)
    assert not why or f"tries at most {streams} stream" in why
    assert not why or f"on {ranks} ranks each stream takes {ranks + 5} file descriptors and 2 threads" in why
    assert not why or "SIRTAKI_STREAMS permits up to 24" in why


def test_the_scarcest_ranks_descriptors_may_allow_fewer(make: Make) -> None:
    router = make(descriptors=45, stream_descriptors=9)
    assert router.max_streams() == 5
    assert "each stream of gloo takes 9 file descriptors on 2 ranks, and 45 can be used" in router.why_not_more(ROUTES)


def test_thread_allowances_are_those_that_every_route_has(make: Make) -> None:
    every = ROUTES
    router = make(threads=dict(zip(every, [(512, 1024, 2048), (2048, 512), (512, 2048)], strict=True)))
    assert router.threads() == (512, 2048)
    assert make(threads={every[0]: (512,)}).threads() == ()


def test_a_plan_opens_the_streams_of_each_of_its_algorithms_in_one_order(make: Make) -> None:
    router = make()
    router.open_plan(plan(3, TREE, FLAT, TREE))
    assert transport(router, (GLOO, FLAT)).opened == [[StreamSpec(1)]]
    assert transport(router, (GLOO, TREE)).opened == [[StreamSpec(0), StreamSpec(2)]]
    assert transport(router, (MPI, FLAT)).opened == []


def test_more_streams_than_are_possible_are_refused_with_the_reason(make: Make) -> None:
    router = make(limits={(GLOO, FLAT): 2})
    with pytest.raises(PlanError, match="must be at most 2, found 3; reason: gloo supports at most 2 streams"):
        router.open_plan(plan(3, FLAT))
    assert transport(router, (GLOO, FLAT)).opened == []
    router.open_plan(plan(2, FLAT, FLAT))


def test_of_idle_streams_those_of_a_plan_are_kept_and_others_can_be_opened_again(make: Make) -> None:
    router = make()
    flat, tree, mpi = (transport(router, route) for route in ROUTES[1::-1] + ROUTES[2:])
    router.open_plan(plan(4, FLAT, FLAT, FLAT, FLAT))
    router.open_plan(plan(2, TREE, TREE))
    router.open_plan(plan(2, FLAT, FLAT, kind=MPI))
    router.keep_only([plan(2, FLAT, FLAT), plan(3, TREE, FLAT, TREE)])
    assert (flat.kept, tree.kept, mpi.kept) == ([2], [], [0])
    router.keep_only([plan(2, FLAT, FLAT)])
    assert (flat.kept, tree.kept, mpi.kept) == ([2], [0], [0])
    router.open_plan(plan(4, FLAT, FLAT, FLAT, FLAT))
    router.keep_only([plan(4, FLAT, FLAT, FLAT, FLAT)])
    assert flat.kept == [2]


def test_streams_that_could_not_be_opened_are_an_error_and_half_of_them_are_not_tried_again(make: Make) -> None:
    router = make()
    gloo = transport(router, (GLOO, FLAT))
    gloo.possible = 4
    router.open_plan(plan(4, *[FLAT] * 4))
    with pytest.raises(TransportError, match=r"cannot open 12 streams .* of transport gloo: no more threads"):
        router.open_plan(plan(12, *[FLAT] * 12))
    assert router.max_streams([(GLOO, FLAT)]) == 8
    with pytest.raises(PlanError, match="more streams of gloo could not be opened"):
        router.open_plan(plan(9, *[FLAT] * 9))
    router.open_plan(plan(2, FLAT, FLAT))  # what was open is
    assert len(gloo.opened) == 2


def test_resources_that_some_rank_lacks_are_not_opened(make: Make) -> None:
    router = make(stream_descriptors=5)
    asked: list[str] = []

    def agree(problem: str) -> None:
        asked.append(problem)
        if len(asked) == 2:
            raise TransportError("rank 1: 10 more descriptors cannot be opened")

    router._control.agree_on_success = agree  # type: ignore[method-assign]
    for streams in (2, 1, 2):  # after the first there is nothing more to have
        router.open_plan(plan(streams, *[FLAT] * streams))
    assert len(asked) == 1
    with pytest.raises(
        TransportError, match=r"cannot open 3 streams .* of transport gloo: rank 1: 10 more descriptors"
    ):
        router.open_plan(plan(3, FLAT, FLAT, FLAT))
    assert len(transport(router, (GLOO, FLAT)).opened) == 3


class Late:
    """Done at the n-th question."""

    def __init__(self, questions: int, error: CommError | None = None) -> None:
        self.left, self._error = questions, error

    def wait(self, timeout_s: float) -> bool:
        self.left -= 1
        if self.left <= 0 and self._error is not None:
            raise self._error
        return self.left <= 0


def test_a_wait_ends_with_the_last_work_or_when_it_is_interrupted(make: Make) -> None:
    router = make()
    works: Any = [Late(1), Late(3), Late(2)]
    assert router.wait_for(works)
    assert [work.left for work in works] == [0, 0, 0]
    answers = iter([False, True])
    works = [Late(9), Late(1)]
    assert not router.wait_for(works, interrupted=lambda: next(answers))
    assert [work.left for work in works] == [7, 1]
    assert router.wait_for([])


def test_a_rank_that_has_left_is_blamed_for_a_broken_connection(make: Make) -> None:
    router = make()
    router._control.failures.report(PeerLostError("rank 1 has ended"))
    with pytest.raises(PeerLostError, match="rank 1 has ended"):
        router.wait_for([Late(1, CommError("connection closed"))])  # type: ignore[list-item]
    with pytest.raises(PeerLostError, match="rank 1 has ended"):
        router.wait_for([Late(5)])  # type: ignore[list-item]


def test_a_released_router_has_closed_every_transport_once(make: Make) -> None:
    router = make()
    there: list[Any] = list(router.transports.values())
    there[1].ends = False
    assert not router.release()
    router.close()
    assert [each.closed for each in there] == [1, 1, 1]


class Streams(Device):
    streams = True

    def __init__(self) -> None:
        self.allocated: list[torch.Tensor] = []

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.allocated.append(super().pinned(numel, dtype))
        return self.allocated[-1]


def test_a_devices_buffer_has_a_mirror_on_the_host_unless_nccl_carries_it(make: Make) -> None:
    device = Streams()
    router = make(device=device, routes=((STAGED, FLAT),))
    buffer = router.allocate(5, torch.float16)
    assert buffer.mirror is not None
    assert buffer.mirror.tensor.tolist() == buffer.tensor.tolist() == [0.0] * 5
    assert buffer.tensor.dtype is buffer.mirror.tensor.dtype is torch.float16
    assert device.allocated[0] is buffer.mirror.tensor
    router._pool = SimpleNamespace()  # type: ignore[assignment]
    assert router.allocate(5, torch.float16).mirror is None
    assert len(device.allocated) == 1


def test_nccls_pool_is_checked_and_closed_unless_the_job_is_lost(make: Make) -> None:
    for lost in (False, True):
        router, log = make(), list[str]()
        router.check()  # without NCCL there is nothing to find
        router._pool = SimpleNamespace(  # type: ignore[assignment]
            check=lambda log=log: log.append("check"), close=lambda log=log: log.append("close")
        )
        router.check()
        if lost:
            router._control.failures.report(CommError("rank 1 has ended"))
        router.close()
        assert log == (["check"] if lost else ["check", "close"])


@pytest.mark.parametrize("fails_at", [0, 1])
def test_where_memory_cannot_be_shared_other_transports_are_used(
    fails_at: int, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[int] = []

    def share(control: Any, size_bytes: int) -> list[torch.Tensor]:
        tried.append(size_bytes)
        if len(tried) > fails_at:
            raise TransportError("no memory files here")
        return [torch.zeros(size_bytes, dtype=torch.uint8)]

    monkeypatch.setattr(router_module, "share_memory", share)
    with caplog.at_level(logging.WARNING):
        router = make(routes=((STAGED, FLAT),), device=Streams(), local_sizes=[2])
        staged = transport(router, (STAGED, FLAT))
        buffer = router.allocate(4, torch.float32)
    assert buffer.mirror is not None
    assert buffer.mirror.peers == ()
    assert "over MPI or Gloo, because shared memory failed: no memory files here" in caplog.text
    assert tried == [1, 16][: fails_at + 1]
    # What was made to go over shared memory is made anew.
    assert staged.closed == fails_at
    assert (transport(router, (STAGED, FLAT)) is staged) == (not fails_at)
    assert not router._shares_memory


def job(
    local_sizes: list[int],
    *,
    shares_memory: bool = True,
    backend: Backend = Backend.MPI,
    device: Device | None = None,
    nccl: Any = None,
    **more: Any,
) -> Router:
    size = len(local_sizes)
    control: Any = SimpleNamespace(
        rank=0,
        size=size,
        local_rank=0,
        local_size=local_sizes[0],
        local_sizes=local_sizes,
        one_node=local_sizes[0] == size,
        round_trip_s=0.0,
        is_homogeneous=len(set(local_sizes)) == 1,
        backend=backend,
        minimum=lambda values: np.full_like(values, 10_000),
        maximum=lambda values: np.array([values[0]]),
        agree_on_success=lambda problem: None,
        broadcast=lambda value: value,
        **{
            "comm": SimpleNamespace(rank=0, size=size),
            "cross": SimpleNamespace(rank=0, size=size // local_sizes[0]),
            "address": lambda: "10.0.0.1",
            "duplicate": lambda **_: None,
            "failures": FailureBoard(),
            **more,
        },
    )
    with pytest.MonkeyPatch.context() as patch:

        def share(control: Any, size_bytes: int) -> list[torch.Tensor]:
            if not shares_memory:
                raise TransportError("no memory files here")
            return []

        patch.setattr(router_module, "share_memory", share)
        return Router(control, timeout_s=3.0, device=device or Device(), nccl=nccl)


def names(made: Router) -> list[str]:
    return [f"{kind.value} {algorithm.value}" for kind, algorithm in made.routes]


SHARED, ALONE, NODES, UNEVEN = [2, 2], [1], [2, 2, 2, 2], [2, 2, 1]


@pytest.mark.parametrize(
    ("local_sizes", "shares_memory", "routes"),
    [
        (SHARED, True, ["shared_memory flat", "mpi flat", "gloo flat"]),
        (SHARED, False, ["mpi flat", "gloo flat"]),
        (ALONE, False, ["mpi flat", "gloo flat"]),
        (NODES, True, ["gloo hierarchical", "gloo flat", "mpi flat", "mpi hierarchical"]),
        (NODES, False, ["gloo flat", "mpi flat"]),
        (UNEVEN, True, ["gloo hierarchical", "gloo flat", "mpi flat", "mpi hierarchical"]),
        ([1, 1], False, ["gloo flat", "mpi flat"]),
    ],
)
def test_on_the_host_shared_memory_is_first_within_a_node_and_gloo_between_nodes(
    local_sizes: list[int], shares_memory: bool, routes: list[str]
) -> None:
    assert names(job(local_sizes, shares_memory=shares_memory)) == routes
    over_mesh = job(local_sizes, shares_memory=shares_memory, backend=Backend.MESH)
    assert names(over_mesh) == [route for route in routes if not route.startswith("mpi")]


@pytest.mark.parametrize(
    ("local_sizes", "routes"),
    [
        (SHARED, ["nccl flat"]),
        (ALONE, ["nccl flat"]),
        (NODES, ["nccl flat", "nccl hierarchical"]),
        (UNEVEN, ["nccl flat"]),
        ([1, 1], ["nccl flat"]),
    ],
)
def test_nccl_is_hierarchical_over_nodes_with_equal_numbers_of_several_ranks(
    local_sizes: list[int], routes: list[str]
) -> None:
    assert names(job(local_sizes, nccl=LoneOpener(), device=Streams())) == routes


def test_communicators_may_be_aborted_while_the_router_waits_to_close_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may be lost meanwhile. The wait then raises the job's failure."""
    device, failures, opener = Streams(), FailureBoard(), LoneOpener()
    made = job(SHARED, nccl=opener, device=device, failures=failures)
    made.open_streams((TransportKind.NCCL, FLAT), 2)

    def synchronise() -> None:
        assert failures.raises_next
        failures.report(CommError("rank 1 was lost"))
        assert [owner.abort() for owner in nccl_owners() if owner is made._pool] == [2]

    monkeypatch.setattr(device, "synchronise", synchronise)
    with pytest.raises(CommError, match="rank 1 was lost"):
        made.close()
    assert all(group.closed for group in opener.made.values())


def test_without_nccl_a_device_uses_host_memory_with_each_available_algorithm() -> None:
    assert names(job(SHARED, device=Streams())) == ["staged flat"]
    assert names(job(NODES, device=Streams())) == ["staged hierarchical", "staged flat"]


def test_where_rank_0_cannot_be_reached_gloo_is_left_out() -> None:
    def unreachable() -> None:
        raise TransportError("rank 1 cannot reach rank 0")

    assert names(job(NODES, shares_memory=False, address=unreachable, backend=Backend.MPI)) == ["mpi flat"]


def test_all_nccl_transports_use_one_pool_and_nothing_is_opened_before_it_is_wanted() -> None:
    opener = LoneOpener()
    made = job(NODES, nccl=opener, device=Streams())
    flat, tree = (made._create((TransportKind.NCCL, algorithm)) for algorithm in Algorithm)
    assert type(flat) is NcclTransport
    assert type(tree) is NcclHierarchicalTransport
    assert opener.opened == []
    flat.open_streams([StreamSpec(0)])
    assert made._pool is not None
    assert len(made._pool.open) == 1
    assert made._pool.limit == MAX_COMMUNICATORS


ON_NODES = """
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.router import Router
from sirtaki.engine.ranks import open_ranks
from sirtaki.engine.settings import Settings

control = ControlPlane(open_ranks(Settings.from_environ()))
router = Router(control, timeout_s=30.0)
names = {type(each).__name__ for each in router.transports.values()}
router.close()
control.close()
if control.rank == 0:
    print("DirectTransport" in names)
"""


@pytest.mark.integration
@pytest.mark.skipif(why_unavailable() is not None, reason=f"no emulated cluster: {why_unavailable()}")
@pytest.mark.parametrize("delay_s", [0.0, 0.005])
def test_how_long_packets_take_between_nodes_is_measured_however_long_ranks_wait_for_each_other(delay_s: float) -> None:
    with NetLab(LabShape(nodes=3, delay_s=delay_s)) as lab:
        said = lab.run_ranks([sys.executable, "-c", ON_NODES], timeout_s=60)
    assert said.split() == [str(delay_s > 0)]
