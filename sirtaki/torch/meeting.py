"""Waiting for each other: `barrier`, and `join` for ranks that have fewer data than others."""

from __future__ import annotations

from sirtaki.comm.collectives.requests import Kind
from sirtaki.engine import job

from .handles import Call, synchronize
from .process_sets import ProcessSet, engine_of, global_process_set


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Collective: returns once all ranks of the set have called it.

    Raises:
        ValueError: this rank is not in the process set.
        HorovodInternalError: a rank has joined, or the job has failed.
    """
    call = Call(kind=Kind.BARRIER, name=None, process_set=process_set, wake=False)
    synchronize(call.start([], lambda results: None))


def join(device: int = -1) -> int:
    """Collective: this rank has no more data; until all ranks have joined it takes part in all-reduces with zeros.

    Other collectives are an error meanwhile. Afterwards all ranks start anew together.

    Args:
        device: accepted for Horovod's sake; zeros are made where they are needed.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: the job has failed.
    """
    engine_of(global_process_set)  # which says what is wrong
    return job.current().joining.join()
