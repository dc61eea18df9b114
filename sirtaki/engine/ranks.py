"""Which ranks a job has, and what carries their control plane: as the launcher's environment or the user says."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import msgspec

from sirtaki.comm.control.communicator import Backend, Communicator
from sirtaki.comm.control.mesh_rendezvous import Introduction, Meeting, alone, arrange, meet
from sirtaki.comm.control.waiting import Deadline, Poll, wait_for
from sirtaki.comm.plan import TransportKind
from sirtaki.engine.c10d import timeout_of
from sirtaki.engine.launchers import check_world_size, started_by_mpi, started_by_srun, started_by_torchrun, torch_place
from sirtaki.engine.settings import Settings
from sirtaki.errors import CommError, ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup


def choose_backend(settings: Settings, environ: Mapping[str, str] = os.environ) -> Backend:
    """What the user has set, else what the launcher speaks; a rank that nobody has launched needs no MPI."""
    if settings.control is not None:
        return settings.control
    if started_by_torchrun(environ):
        return Backend.MESH
    if started_by_mpi(environ):
        # srun may speak to MPI as the site has set it, and a job that has none need not care
        without_mpi = started_by_srun(environ) and find_spec("mpi4py") is None
        return Backend.MESH if without_mpi else Backend.MPI
    if environ.get("RANK") and environ.get("WORLD_SIZE"):
        return Backend.MESH
    wants_mpi = settings.transport is TransportKind.MPI or "mpi4py.MPI" in sys.modules
    return Backend.MPI if wants_mpi else Backend.MESH


def open_beside(settings: Settings, group: ProcessGroup) -> Communicator:
    """Collective over a process group of PyTorch's: a mesh of the same ranks, in the same order.

    Raises:
        CommError: the ranks do not find each other.
    """
    import torch.distributed as dist

    size = dist.get_world_size(group)

    def exchange(mine: Introduction) -> list[Introduction]:
        told = [mine] * size
        dist.all_gather_object(told, mine, group=group)
        return told

    return _introduced(settings, exchange, rank=dist.get_rank(group), size=size, timeout_s=settings.start_timeout_s)


def settings_beside(group: ProcessGroup) -> Settings:
    """Return this process's settings. Unless they limit the wait for missing ranks, the group's timeout does."""
    timeout = timeout_of(group)
    return Settings.from_environ() if timeout is None else Settings.from_environ(stall_shutdown_s=timeout)


def open_at_store(settings: Settings, store: Store, *, rank: int, size: int, timeout_s: float) -> Communicator:
    """Collective over the ranks of a process group that is being made: a mesh of them.

    Args:
        settings: of this process.
        store: theirs alone. It is only asked what is there: who waits in a store keeps its other users waiting.
        rank: of this process among them.
        size: how many there are.
        timeout_s: how long to wait for the others.

    Raises:
        CommError: the ranks do not find each other.
    """
    deadline = Deadline.after(timeout_s)

    def exchange(mine: Introduction) -> list[Introduction]:
        what = "places" if mine.attendee.places else "host"
        keys = [f"{what}/{other}" for other in range(size)]
        store.set(keys[rank], msgspec.json.encode(mine).decode())
        for other, key in enumerate(keys):
            if not wait_for(partial(store.check, [key]), deadline, Poll.SLICES):
                raise CommError(f"rank {other} of {size} did not come to rank {rank} within {timeout_s:g} s")
        return [msgspec.json.decode(store.get(key), type=Introduction) for key in keys]

    return _introduced(settings, exchange, rank=rank, size=size, timeout_s=timeout_s)


def _introduced(
    settings: Settings,
    exchange: Callable[[Introduction], list[Introduction]],
    *,
    rank: int,
    size: int,
    timeout_s: float,
) -> Communicator:
    """Collective: a mesh of ranks that can tell each other something."""
    if size == 1:
        return alone()
    name, appointment = arrange(exchange, interface=settings.gloo_interface, secret=settings.secret)
    return meet(
        Meeting(rank=rank, size=size, name=name, appointment=appointment),
        interface=settings.gloo_interface,
        secret=settings.secret,
        timeout_s=timeout_s,
        heartbeat_s=settings.heartbeat_s,
    )


def open_ranks(settings: Settings, comm: Sequence[int] | MPI.Comm | None = None) -> Communicator:
    """Collective: the communicator of all ranks of the job; freeing it is the last thing that a job does.

    Args:
        settings: of this process.
        comm: None = all ranks that the launcher started; an mpi4py communicator; or a list of ranks, which only
            those ranks call with.

    Raises:
        ConfigError: variables are missing or disagree, or this rank is not in `comm`.
        CommError: there is no usable MPI library, or the ranks do not find each other.
    """
    if comm is None or isinstance(comm, Sequence):
        over_mpi = choose_backend(settings) is Backend.MPI
        return _over_mpi(comm) if over_mpi else _over_mesh(settings, comm)
    if settings.control is Backend.MESH:
        raise ConfigError("init(comm=…) was given an MPI communicator, but SIRTAKI_CONTROL is mesh; leave it out")
    return _over_mpi(comm)


def _over_mpi(comm: Sequence[int] | MPI.Comm | None) -> Communicator:
    from sirtaki.comm.control.mpi import world

    everybody = world()
    check_world_size(everybody.size)
    if not comm:
        return everybody
    if not isinstance(comm, Sequence):
        return world(comm)
    _check_named(everybody.rank, comm)
    return everybody.subset(comm)


def _over_mesh(settings: Settings, comm: Sequence[int] | None) -> Communicator:
    place = torch_place()
    if place is None:
        _check_named(0, comm)
        return alone()
    _check_named(place.rank, comm)
    if odd := [rank for rank in comm or () if not 0 <= rank < place.size]:
        raise ConfigError(f"init(comm={list(comm or ())}) names rank {odd[0]}, but there are {place.size}")
    return meet(
        Meeting(
            rank=place.rank,
            size=place.size,
            host=place.host,
            port=place.port,
            agent_store=place.agent_store,
            name=place.attempt,
            members=tuple(comm or ()),
        ),
        interface=settings.gloo_interface,
        secret=settings.secret,
        timeout_s=settings.start_timeout_s,
        heartbeat_s=settings.heartbeat_s,
    )


def _check_named(rank: int, comm: Sequence[int] | None) -> None:
    if comm and rank not in comm:
        raise ConfigError(f"rank {rank} called init(comm={list(comm)}), which does not name it")
