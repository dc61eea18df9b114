"""`init`, `shutdown`, ranks and sizes, the timeline and recordings."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sirtaki.comm import timeline
from sirtaki.comm.control.communicator import Backend
from sirtaki.engine import job
from sirtaki.engine.job import is_initialized
from sirtaki.engine.mpi_library import find_mpi_library
from sirtaki.engine.ranks import choose_backend
from sirtaki.engine.settings import TIMELINE_DYNAMIC, Settings
from sirtaki.errors import ConfigError, LaunchError, SirtakiError

from . import collectives, lasting_optimizers
from . import process_sets as process_sets_
from .process_sets import ProcessSet, open_static

if TYPE_CHECKING:
    from mpi4py import MPI


def record_if_wanted() -> None:
    """After `init()`, on all ranks."""
    if job.current().settings.profile is not None:
        from sirtaki.analysis.recorder import begin_as_set

        begin_as_set()


logger = logging.getLogger(__name__)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Records what this rank does in a Chrome trace from now on; ranks of one host write to the same file.

    Args:
        file_path: of the trace; one that another job has left is overwritten.
        mark_cycles: record the rounds of eager operations, too.

    Raises:
        ValueError: before `init()`, without `HOROVOD_TIMELINE` set then (to `DYNAMIC`, if no trace is wanted at
            first), or if the file cannot be written.
    """
    current = job.current()
    if current.clock_offset_s is None:
        raise ConfigError("start_timeline() wants HOROVOD_TIMELINE to be set when init() is called; DYNAMIC will do")
    control = current.control
    number = sorted(set(control.hosts)).index(control.hosts[control.rank])
    path = timeline.path_on_host(Path(file_path), number)
    writer = timeline.Writer(
        job=current.job,
        rank=control.rank,
        host=control.host_names[control.rank],
        clock_offset_s=current.clock_offset_s,
    )
    try:
        timeline.start(timeline.Timeline(path, writer, mark_cycles=mark_cycles))
    except OSError as err:
        raise ConfigError(f"the timeline {path} cannot be written: {err}") from err


def stop_timeline() -> None:
    """Ends the trace; the file is complete when this returns.

    Raises:
        ValueError: before `init()`.
    """
    job.current()
    timeline.stop()


__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
]


def init(comm: Sequence[int] | MPI.Comm | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Collective: starts Sirtaki on all ranks; harmless if it has been started.

    Args:
        comm: None = all ranks that the launcher started; an mpi4py communicator; or a list of ranks, which only
            those ranks call with.
        process_sets: sets to open at once, the same on all ranks; "dynamic" is accepted for Horovod's sake, since
            sets can be added and removed at any time.

    Raises:
        ValueError: an environment variable or argument is invalid.
        HorovodInternalError: there is no usable MPI library where one is needed, or ranks do not come.
    """
    if is_initialized():
        return
    global _process_sets
    _process_sets = process_sets
    job.init(comm)
    try:
        open_static(process_sets)
    except SirtakiError:  # on all ranks
        shutdown()
        raise
    record_if_wanted()
    settings = job.current().settings
    if settings.timeline not in (None, TIMELINE_DYNAMIC):
        try:
            start_timeline(settings.timeline, settings.timeline_mark_cycles)
        except ConfigError as err:
            logger.warning("%s; the job goes on without it", err)


_process_sets: Sequence[ProcessSet] | str | None = None  # as `init` was given them last


def init_again() -> None:
    """Collective over the members of the next generation, once this process has left the one before: as `init` did.

    Raises:
        HorovodInternalError: a member was lost meanwhile.
        LaunchError: there is no next generation.
    """
    job.init()
    open_static(_process_sets)


def shutdown() -> None:
    """Collective: ends Sirtaki on all ranks; `init()` may be called again. Harmless if it was not started."""
    elastic = is_initialized() and job.current().elastic is not None
    job.shutdown()
    if elastic:
        let_go()


def let_go() -> None:
    """Not collective: what the script holds of a generation of an elastic job, which has ended, waits for the next."""
    collectives.forget_all()
    lasting_optimizers.detach_all()
    process_sets_.end_generation()


def rank() -> int:
    """This process among all."""
    return job.current().control.rank


def size() -> int:
    """Number of processes."""
    return job.current().control.size


def local_rank() -> int:
    """This process among those of its node."""
    return job.current().control.local_rank


def local_size() -> int:
    """Number of processes on this node."""
    return job.current().control.local_size


def cross_rank() -> int:
    """This node among the nodes that have this local rank."""
    return job.current().control.cross_rank


def cross_size() -> int:
    """Number of nodes that have this local rank."""
    return job.current().control.cross_size


def is_homogeneous() -> bool:
    """Every node has the same number of processes."""
    return job.current().control.is_homogeneous


def mpi_threads_supported() -> bool:
    """Several threads may call MPI: wherever it is the control plane, since `init()` insists on it.

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    return job.current().backend is Backend.MPI


def mpi_enabled() -> bool:
    """MPI is the control plane; before `init()`: it would be."""
    if is_initialized():
        return job.current().backend is Backend.MPI
    return choose_backend(Settings.from_environ()) is Backend.MPI


@cache
def mpi_built() -> bool:
    """There is an MPI library that mpi4py can load; asked in another process, since loading it has consequences."""
    if "mpi4py.MPI" in sys.modules:
        return True
    if importlib.util.find_spec("mpi4py") is None:
        return False
    try:
        find_mpi_library(sys.executable)
    except LaunchError:
        return False
    return True


def gloo_enabled() -> bool:
    """Gloo can carry gradients."""
    return gloo_built()


def gloo_built() -> bool:
    """This PyTorch has Gloo."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def nccl_built() -> int:
    """NCCL's version as a number such as 22803, 0 if this PyTorch has none."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return 0
    from torch.cuda import nccl

    major, minor, patch = nccl.version()[:3]  # type: ignore[no-untyped-call]  # torch's
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def cuda_built() -> bool:
    """This PyTorch has CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """This PyTorch has ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """IBM's DDL: never."""
    return False


def ccl_built() -> bool:
    """Intel's oneCCL: never."""
    return False
