"""Open lanes (sets of connections between ranks) for large tensors of eager operations, process groups and sharded
models.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from sirtaki.comm.collectives.operations import Ranks
from sirtaki.comm.control.communicator import Communicator
from sirtaki.comm.control.failure import Timeout
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.device import cuda_device
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.comm.router import Router
from sirtaki.comm.shards import ShardLanes, open_shard_lanes
from sirtaki.comm.transports.contract import raise_descriptor_limit
from sirtaki.comm.units import UnitPipeline
from sirtaki.engine.settings import Settings
from sirtaki.errors import ConfigError, TransportError
from sirtaki.measures import counted

from .tuning.plans import default_knobs, knob_space

if TYPE_CHECKING:
    from sirtaki.comm.collectives.on_gpu import NcclRanks

logger = logging.getLogger(__name__)

TYPICAL_BYTES = 25 << 20
"""Bytes of a typical tensor: the size of DDP's buckets.

Lanes (sets of connections between ranks) divide tensors into units (buckets). Their unit size is the untuned default
for a tensor of this size.
"""

SLOT_BYTES, SLOTS = 2 << 20, 4
"""Bytes and number of the shared-memory buffers (slots) through which ranks of a host exchange data. A small slot is
still in the processor's cache when another rank reads it.
"""


def open_lanes(ranks: Communicator, *, settings: Settings, timeout_s: float) -> UnitPipeline:
    """Open lanes (connections) for all-reduce. Transport and algorithm are the user's choice or the defaults.
    Collective.

    Call from one thread per rank.

    Args:
        ranks: communicator of the ranks. The lanes own it until they are closed.
        settings: values of this process's environment variables.
        timeout_s: maximum time in seconds that an operation waits for a rank.

    Raises:
        ConfigError: the settings ask for something that these ranks do not support. Raised on all ranks.
        TransportError: connections for the all-reduces could not be opened. Raised on all ranks.
        CommError: the job has failed.
    """
    control = control_of(ranks, settings)
    router = Router(control, timeout_s=timeout_s)
    slots = router.allocate(SLOTS * SLOT_BYTES, torch.uint8)
    knobs = default_knobs(
        knob_space(router, settings, TYPICAL_BYTES), total_bytes=TYPICAL_BYTES, one_node=control.one_node
    )
    route, streams = (knobs.transport, knobs.algorithm), knobs.streams
    router.open_streams(route, streams)
    if ranks.rank == 0:
        how = f"{route[0].value} {route[1].value}"
        logger.info(
            "large tensors are reduced between %d ranks by the transport and algorithm %s, on %s",
            ranks.size,
            how,
            counted(streams, "parallel connection"),
        )
    through_slots = TransportKind.SHARED_MEMORY in route or Algorithm.HIERARCHICAL in route
    return UnitPipeline(
        router,
        control,
        route=route,
        streams=streams,
        unit_bytes=SLOT_BYTES if through_slots else knobs.unit_bytes,
        slots=slots if through_slots else None,
    )


def open_nccl(ranks: Ranks, index: int, where: str, *, settings: Settings) -> NcclRanks | None:
    """Open an NCCL communicator for eager operations on GPUs, and log whether it is used. Collective.

    Args:
        ranks: participating ranks. No other operation may use their communicator during the call.
        index: index of the GPU of this rank's tensors.
        where: text that names the process set. "" = all ranks.
        settings: values of this process's environment variables.

    Returns:
        None if NCCL cannot be used, or the user has set `SIRTAKI_TRANSPORT=staged`.
    """
    from sirtaki.comm.collectives.on_gpu import NcclRanks
    from sirtaki.comm.nccl_streams.transport import FIRST, find_nccl

    user, wanted = f"eager operations{where}", settings.transport
    if wanted is TransportKind.STAGED:
        if ranks.rank == 0:
            logger.info("%s on GPUs run through host memory, because SIRTAKI_TRANSPORT is staged", user)
        return None
    control, device = control_of(ranks.comm, settings), cuda_device(index)
    forced, timeout_s = wanted is TransportKind.NCCL, settings.transport_timeout_s
    try:
        opener = find_nccl(control, device, forced=forced, timeout_s=timeout_s, user=user)
    except (ConfigError, TransportError) as err:
        # All ranks raise this error together, so all of them continue without NCCL.
        opener = None
        if ranks.rank == 0:
            logger.warning("%s on GPUs run through host memory: %s", user, err)
    if opener is None:
        control.close()
        return None
    if ranks.rank == 0:
        logger.info("%s on GPUs run over NCCL", user)
    return NcclRanks(ranks, opener.open(FIRST), device, control)


FLOWS = 8
"""Approximate default number of connections of a rank for sharded models. Several are needed, because clouds limit the
rate of each connection.
"""


def untuned_streams(lanes: ShardLanes, settings: Settings) -> int:
    """Return the number of connections from this rank to each peer: the user's choice, otherwise an untuned default."""
    return min(settings.streams or -(-FLOWS // lanes.peers), lanes.most_streams)


def open_shards(control: ControlPlane, *, settings: Settings, timeout: Timeout) -> ShardLanes:
    """Open lanes (connections) for the all-gathers and reduce-scatters of sharded models, not tuned yet. Collective.
    Call from one thread per rank.

    Args:
        control: control plane (channel for all messages except tensors) of at least two ranks. The lanes own it until
            they are closed.
        settings: values of this process's environment variables.
        timeout: maximum time that an operation waits for a rank.

    Raises:
        TransportError: connections could not be opened. Raised on all ranks.
        CommError: the job has failed.
    """
    lanes = open_shard_lanes(control, timeout=timeout, kind=settings.transport)
    lanes.use(untuned_streams(lanes, settings))
    return lanes


def control_of(ranks: Communicator, settings: Settings) -> ControlPlane:
    """Open the control plane of `ranks`, which carries all messages except tensors. Collective.

    The settings may divide the ranks into simulated nodes.
    """
    raise_descriptor_limit()
    # Ignore simulated nodes if their size does not divide the number of these ranks.
    pretended = settings.local_size if ranks.size % (settings.local_size or 1) == 0 else None
    return ControlPlane(ranks, local_size=pretended, interface=settings.gloo_interface)
