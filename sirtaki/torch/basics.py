"""`init`, `shutdown`, ranks and sizes, the timeline (a trace of communication), and recording of profiles."""

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
    """Start to record a profile of this job if the settings request one. Call after `init()`, on all ranks."""
    if job.current().settings.profile is not None:
        from sirtaki.analysis.recorder import begin_as_set

        begin_as_set()


logger = logging.getLogger(__name__)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start to record this rank's communication in a Chrome trace. All ranks of one host write to the same file.

    Args:
        file_path: path of the trace. A trace of another job is overwritten.
        mark_cycles: also record each cycle, in which the ranks agree on the collectives to run next.

    Raises:
        ValueError: `init()` has not been called, the environment variable HOROVOD_TIMELINE was not set when `init()`
            was called (the value `DYNAMIC` starts without a trace), or the file cannot be written.
    """
    current = job.current()
    if current.clock_offset_s is None:
        raise ConfigError(
            "start_timeline() requires HOROVOD_TIMELINE, which was not set when init() was called; set "
            "HOROVOD_TIMELINE=DYNAMIC before the job starts"
        )
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
        raise ConfigError(f"the timeline file {path} cannot be written: {err}; check its folder") from err


def stop_timeline() -> None:
    """Stop recording the trace that `start_timeline` began. The trace file is complete when this function returns.

    Raises:
        ValueError: `init()` has not been called.
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
    """Start Sirtaki: connect the ranks of the job. Collective. Does nothing if Sirtaki is running already.

    Args:
        comm: ranks that take part. None for all ranks that the launcher has started. Otherwise an mpi4py communicator
            of the ranks, or a list of ranks, which only the listed ranks may pass.
        process_sets: process sets to open, equal on all ranks. "dynamic" is accepted for compatibility with Horovod and
            has no effect, because process sets can always be added and removed later.

    Raises:
        ValueError: an environment variable or argument is invalid.
        HorovodInternalError: MPI is required but no usable MPI library is found, or a rank cannot be reached.
    """
    if is_initialized():
        return
    global _process_sets
    _process_sets = process_sets
    job.init(comm)
    try:
        open_static(process_sets)
    except SirtakiError:  # All ranks raise this error, so they can shut down together.
        shutdown()
        raise
    record_if_wanted()
    settings = job.current().settings
    if settings.timeline not in (None, TIMELINE_DYNAMIC):
        try:
            start_timeline(settings.timeline, settings.timeline_mark_cycles)
        except ConfigError as err:
            logger.warning("the job continues without recording a timeline (HOROVOD_TIMELINE): %s", err)


# Argument `process_sets` of the last call of `init`, which `init_again` reuses.
_process_sets: Sequence[ProcessSet] | str | None = None


def init_again() -> None:
    """Connect the new set of ranks of an elastic job, with the arguments of the last `init`.

    Collective over the ranks of the new generation, which is the time until the set of ranks changes again.

    Raises:
        HorovodInternalError: a rank of the new set was lost while it connected.
        LaunchError: the launcher starts no further set of ranks.
    """
    job.init()
    open_static(_process_sets)


def shutdown() -> None:
    """End Sirtaki on all ranks. Afterwards `init()` may be called again. Does nothing before `init()`. Collective."""
    elastic = is_initialized() and job.current().elastic is not None
    job.shutdown()
    if elastic:
        detach_all()


def detach_all() -> None:
    """Detach asynchronous operations, optimizers and process sets from the job's ranks, which change.

    Not collective. Handles of operations become invalid. Optimizers and process sets are attached to the new ranks
    later.
    """
    collectives.forget_all()
    lasting_optimizers.detach_all()
    process_sets_.end_generation()


def rank() -> int:
    """Return the rank of this process in the job."""
    return job.current().control.rank


def size() -> int:
    """Return the number of ranks (processes) in the job."""
    return job.current().control.size


def local_rank() -> int:
    """Return the rank of this process among the processes of its node."""
    return job.current().control.local_rank


def local_size() -> int:
    """Return the number of processes on this node."""
    return job.current().control.local_size


def cross_rank() -> int:
    """Return the index of this node among the nodes that have a process with this local rank."""
    return job.current().control.cross_rank


def cross_size() -> int:
    """Return the number of nodes that have a process with this local rank."""
    return job.current().control.cross_size


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of processes."""
    return job.current().control.is_homogeneous


def mpi_threads_supported() -> bool:
    """Return whether several threads may call MPI.

    True whenever Sirtaki uses MPI, because `init()` requires such an MPI.

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    return job.current().backend is Backend.MPI


def mpi_enabled() -> bool:
    """Return whether ranks exchange control messages over MPI.

    Before `init()`, return whether `init()` would choose MPI.
    """
    if is_initialized():
        return job.current().backend is Backend.MPI
    return choose_backend(Settings.from_environ()) is Backend.MPI


@cache
def mpi_built() -> bool:
    """Return whether mpi4py can load an MPI library.

    A subprocess tries to load it, because loading has side effects.
    """
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
    """Return whether Gloo can be used for gradients."""
    return gloo_built()


def gloo_built() -> bool:
    """Return whether PyTorch was built with Gloo."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def nccl_built() -> int:
    """Return NCCL's version as a number such as 22803. Return 0 if PyTorch was built without NCCL."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return 0
    from torch.cuda import nccl

    major, minor, patch = nccl.version()[:3]  # type: ignore[no-untyped-call]  # untyped in PyTorch
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def cuda_built() -> bool:
    """Return whether PyTorch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether PyTorch was built with ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Return False: IBM's DDL is not supported."""
    return False


def ccl_built() -> bool:
    """Return False: Intel's oneCCL is not supported."""
    return False
