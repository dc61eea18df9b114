"""Which routes a job has follows from its nodes, its device and what carries its control plane."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes.groups import LoneOpener

from sirtaki.comm.control.communicator import Backend
from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.device import HostDevice
from sirtaki.comm.nccl_streams.transport import NcclHierarchicalTransport, NcclTransport
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.comm.router import MAX_COMMUNICATORS, TransportFactory
from sirtaki.comm.transports.contract import StreamSpec
from sirtaki.comm.transports.gloo import GlooTransport
from sirtaki.comm.transports.mpi import MpiTransport
from sirtaki.comm.transports.shared_memory import SharedMemoryTransport
from sirtaki.comm.transports.staged import StagedTransport
from sirtaki.errors import TransportError


class Streams(HostDevice):
    streams = True


def factory(
    local_sizes: list[int],
    *,
    shares_memory: bool = True,
    backend: Backend = Backend.MPI,
    device: HostDevice | None = None,
    nccl: Any = None,
    **more: Any,
) -> TransportFactory:
    size = len(local_sizes)
    control: Any = SimpleNamespace(
        rank=0,
        size=size,
        local_rank=0,
        local_size=local_sizes[0],
        local_sizes=local_sizes,
        cross_rank=0,
        cross_size=size // local_sizes[0],
        one_node=local_sizes[0] == size,
        is_homogeneous=len(set(local_sizes)) == 1,
        backend=backend,
        failures=FailureBoard(),
        maximum=lambda values: np.array([values[0]]),
        agree_on_success=lambda problem: None,
        store=lambda: ("the store", "10.0.0.1"),
        next_prefix=lambda: "sirtaki/7",
        **more,
    )
    made = TransportFactory(control, timeout_s=3.0, device=device or HostDevice(), nccl=nccl)
    made.shares_memory = shares_memory
    return made


def names(made: TransportFactory) -> list[str]:
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
def test_on_the_host_shared_memory_comes_first_within_a_node_and_gloo_between_nodes(
    local_sizes: list[int], shares_memory: bool, routes: list[str]
) -> None:
    assert names(factory(local_sizes, shares_memory=shares_memory)) == routes
    over_mesh = factory(local_sizes, shares_memory=shares_memory, backend=Backend.MESH)
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
def test_nccl_goes_hierarchically_over_nodes_that_hold_the_same_number_of_several_ranks(
    local_sizes: list[int], routes: list[str]
) -> None:
    assert names(factory(local_sizes, nccl=LoneOpener(), device=Streams())) == routes


def test_without_nccl_a_device_goes_through_the_host_by_each_algorithm_that_there_is() -> None:
    assert names(factory(SHARED, device=Streams())) == ["staged flat"]
    assert names(factory(NODES, device=Streams())) == ["staged hierarchical", "staged flat"]


def test_staging_goes_over_the_best_route_of_its_algorithm() -> None:
    for shares_memory, kind in ((True, SharedMemoryTransport), (False, MpiTransport)):
        there = factory(SHARED, shares_memory=shares_memory, device=Streams(), duplicate=lambda: None)
        made = there.make((TransportKind.STAGED, Algorithm.FLAT))
        assert isinstance(made, StagedTransport)
        assert type(made._inner) is kind


def test_hierarchical_transports_share_memory_and_cross_by_sockets_of_this_local_rank() -> None:
    crossing: list[str] = []
    made = factory(NODES, duplicate_cross=lambda: crossing.append("cross"), duplicate=lambda: crossing.append("all"))
    gloo: Any = made.make((TransportKind.GLOO, Algorithm.HIERARCHICAL))
    assert isinstance(gloo, SharedMemoryTransport)
    across = gloo._across()
    assert isinstance(across, GlooTransport)
    assert across._prefix() == "sirtaki/7/local0"
    assert (across._rank, across._size) == (0, 2)
    mpi: Any = made.make((TransportKind.MPI, Algorithm.HIERARCHICAL))
    assert isinstance(mpi._across(), MpiTransport)
    assert crossing == []  # nothing is opened yet


def test_flat_sockets_are_among_all_ranks() -> None:
    made: Any = factory(NODES).make((TransportKind.GLOO, Algorithm.FLAT))
    assert isinstance(made, GlooTransport)
    assert made._prefix() == "sirtaki/7/all"
    assert (made._rank, made._size) == (0, 4)


def test_shared_memory_alone_crosses_no_node() -> None:
    made: Any = factory(SHARED).make((TransportKind.SHARED_MEMORY, Algorithm.FLAT))
    assert isinstance(made, SharedMemoryTransport)
    assert made._across is None


def test_where_the_store_cannot_be_reached_gloo_cannot_be_made() -> None:
    def unreachable() -> None:
        raise TransportError("rank 1 cannot reach rank 0")

    made = factory(NODES)
    made._control.store = unreachable  # type: ignore[method-assign, assignment]
    with pytest.raises(TransportError, match="cannot reach rank 0"):
        made.make((TransportKind.GLOO, Algorithm.FLAT))


def test_all_nccl_transports_use_one_pool_and_nothing_is_opened_before_it_is_wanted() -> None:
    opener = LoneOpener()
    made = factory(NODES, nccl=opener, device=Streams())
    flat, tree = (made.make((TransportKind.NCCL, algorithm)) for algorithm in Algorithm)
    assert type(flat) is NcclTransport
    assert type(tree) is NcclHierarchicalTransport
    assert opener.opened == []
    flat.open_streams([StreamSpec(0)])
    assert made.pool is not None
    assert len(made.pool) == 1
    assert made.pool.limit == MAX_COMMUNICATORS


def test_without_nccl_there_is_no_pool() -> None:
    assert factory(SHARED).pool is None
