"""Connect the ranks of a job over MPI or over a mesh (TCP connections between all pairs of ranks)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from sirtaki.comm.control.communicator import Backend, Communicator
from sirtaki.comm.control.members import Meeting, Membership, StoreExchange, alone, meet, rendezvous
from sirtaki.comm.control.waiting import Deadline
from sirtaki.comm.plan import TransportKind
from sirtaki.engine.c10d import timeout_of
from sirtaki.engine.launchers import check_world_size, started_by_mpi, started_by_srun, started_by_torchrun, torch_place
from sirtaki.engine.settings import Settings
from sirtaki.errors import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup


def choose_backend(settings: Settings, environ: Mapping[str, str] = os.environ) -> Backend:
    """Choose MPI or TCP for the control plane, which carries all messages except gradients.

    The user's choice takes precedence. Otherwise the launcher decides.
    """
    if settings.control is not None:
        return settings.control
    if started_by_torchrun(environ):
        return Backend.MESH
    if started_by_mpi(environ):
        # Under srun, choose TCP if mpi4py is not installed. It depends on the site whether srun has started the ranks
        # for MPI.
        without_mpi = started_by_srun(environ) and find_spec("mpi4py") is None
        return Backend.MESH if without_mpi else Backend.MPI
    if environ.get("RANK") and environ.get("WORLD_SIZE"):
        return Backend.MESH
    wants_mpi = settings.transport is TransportKind.MPI or "mpi4py.MPI" in sys.modules
    return Backend.MPI if wants_mpi else Backend.MESH


def open_beside(settings: Settings, group: ProcessGroup, store: Store | None = None) -> Communicator:
    """Connect the ranks of a PyTorch process group by a mesh of TCP connections. Ranks keep their order. Collective
    over the group.

    Args:
        settings: values of this process's environment variables.
        group: the process group.
        store: key-value store by which the ranks exchange addresses, used by these ranks only. None to exchange them by
            an all-gather of the group, which hangs on the other ranks if one rank fails before it takes part.

    Raises:
        CommError: a rank cannot be reached.
    """
    import torch.distributed as dist

    size = dist.get_world_size(group)
    if size == 1:
        return alone()

    def gather(own: Membership) -> list[Membership]:
        by_rank = [own] * size
        dist.all_gather_object(by_rank, own, group=group)
        return by_rank

    rank, deadline = dist.get_rank(group), Deadline.after(settings.start_timeout_s)
    by_store = store and StoreExchange(store, range(size), own=rank, size=size, place=f"rank {rank}", deadline=deadline)
    return rendezvous(
        by_store or gather,
        rank=rank,
        interface=settings.gloo_interface,
        secret=settings.secret,
        deadline=deadline,
        heartbeat_s=settings.heartbeat_s,
    )


def settings_beside(group: ProcessGroup) -> Settings:
    """Return this process's settings. If they set no time limit for missing ranks, the limit is
    the timeout of `group`.
    """
    timeout = timeout_of(group)
    return Settings.from_environ() if timeout is None else Settings.from_environ(stall_shutdown_s=timeout)


def open_at_store(settings: Settings, store: Store, *, rank: int, size: int, timeout_s: float) -> Communicator:
    """Connect the ranks of a process group that is being created by TCP. Collective over these ranks.

    Args:
        settings: values of this process's environment variables.
        store: store for the rendezvous, which only these ranks use.
        rank: rank of this process in the group.
        size: number of ranks in the group.
        timeout_s: maximum time to wait until all ranks have connected, in seconds.

    Raises:
        CommError: a rank cannot be reached.
    """
    if size == 1:
        return alone()
    deadline = Deadline.after(timeout_s)
    return rendezvous(
        StoreExchange(store, range(size), own=rank, size=size, place=f"rank {rank}", deadline=deadline),
        rank=rank,
        interface=settings.gloo_interface,
        secret=settings.secret,
        deadline=deadline,
        heartbeat_s=settings.heartbeat_s,
    )


def open_ranks(settings: Settings, comm: Sequence[int] | MPI.Comm | None = None) -> Communicator:
    """Open the communicator of all ranks of the job. Collective. The job owns it and frees it at its end.

    Args:
        settings: values of this process's environment variables.
        comm: ranks of the job. None for all ranks that the launcher started. Otherwise an mpi4py communicator, or a
            list of ranks. Only the listed ranks may call this function.

    Raises:
        ConfigError: variables are missing or contradict each other, or this rank is not in `comm`.
        CommError: there is no usable MPI library, or a rank cannot be reached.
    """
    if comm is None or isinstance(comm, Sequence):
        over_mpi = choose_backend(settings) is Backend.MPI
        return _over_mpi(comm) if over_mpi else _over_mesh(settings, comm)
    if settings.control is Backend.MESH:
        raise ConfigError(
            "init(comm=…) was given an MPI communicator, but SIRTAKI_CONTROL=mesh selects TCP instead of MPI; "
            "unset this variable"
        )
    return _over_mpi(comm)


def _over_mpi(comm: Sequence[int] | MPI.Comm | None) -> Communicator:
    from sirtaki.comm.control.mpi import world

    all_ranks = world()
    check_world_size(all_ranks.size)
    if not comm:
        return all_ranks
    if not isinstance(comm, Sequence):
        return world(comm)
    _check_named(all_ranks.rank, comm)
    return all_ranks.subset(comm)


def _over_mesh(settings: Settings, comm: Sequence[int] | None) -> Communicator:
    place = torch_place()
    if place is None:
        _check_named(0, comm)
        return alone()
    _check_named(place.rank, comm)
    if odd := [rank for rank in comm or () if not 0 <= rank < place.size]:
        raise ConfigError(
            f"init(comm={list(comm or ())}) lists rank {odd[0]}, but the job has only the ranks 0 to {place.size - 1}"
        )
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
        raise ConfigError(
            f"rank {rank} called init(comm={list(comm)}), but this list does not contain rank {rank}; "
            "call init() only on the listed ranks"
        )
