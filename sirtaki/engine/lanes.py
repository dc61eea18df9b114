"""Opens the lanes of large tensors: of eager operations, of torch.distributed's process groups, of sharded models."""

from __future__ import annotations

import logging

import torch

from sirtaki.comm.control.communicator import Communicator
from sirtaki.comm.control.failure import Timeout
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.comm.router import Router
from sirtaki.comm.shards import ShardLanes, open_shard_lanes
from sirtaki.comm.transports.contract import raise_descriptor_limit
from sirtaki.comm.units import UnitPipeline
from sirtaki.engine.settings import Settings

from .tuning.plans import default_knobs, knob_space

logger = logging.getLogger(__name__)

TYPICAL_BYTES = 25 << 20
"""Units are as large as would be best for a tensor of this size, as DDP's buckets have it."""

SLOT_BYTES, SLOTS = 2 << 20, 4
"""The window in shared memory. Small slots stay in the processor's cache between the ranks that read and write them."""


def open_lanes(ranks: Communicator, *, settings: Settings, timeout_s: float) -> UnitPipeline:
    """Collective, from one thread of each rank: lanes of the route that is best untuned, as far as the user has a say.

    Args:
        ranks: nothing else may use this communicator until the lanes are closed.
        settings: of this process.
        timeout_s: how long streams wait for other ranks.

    Raises:
        ConfigError: on all ranks, the user has asked for something that these ranks cannot do.
        TransportError: on all ranks, streams could not be opened.
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
        how, word = f"{route[0].value} {route[1].value}", "stream" if streams == 1 else "streams"
        logger.info("large tensors between %d ranks: %s, %d %s", ranks.size, how, streams, word)
    through_slots = TransportKind.SHARED_MEMORY in route or Algorithm.HIERARCHICAL in route
    return UnitPipeline(
        router,
        control,
        route=route,
        streams=streams,
        unit_bytes=SLOT_BYTES if through_slots else knobs.unit_bytes,
        slots=slots if through_slots else None,
    )


FLOWS = 8
"""About so many connections out of a rank carry shards untuned: clouds cap each of them far below the link's rate."""


def untuned_streams(lanes: ShardLanes, settings: Settings) -> int:
    """Connections to each rank that one has connections to, as they are used untuned."""
    return min(settings.streams or -(-FLOWS // lanes.peers), lanes.most_streams)


def open_shards(control: ControlPlane, *, settings: Settings, timeout: Timeout) -> ShardLanes:
    """Collective, from one thread of each rank: lanes of gathers and scatters, untuned.

    Args:
        control: two ranks or more; nothing else may use it until the lanes are closed.
        settings: of this process.
        timeout: how long gathers and scatters wait for other ranks.

    Raises:
        TransportError: on all ranks, connections could not be opened.
        CommError: the job has failed.
    """
    lanes = open_shard_lanes(control, timeout=timeout, kind=settings.transport)
    lanes.use(untuned_streams(lanes, settings))
    return lanes


def control_of(ranks: Communicator, settings: Settings) -> ControlPlane:
    """Collective: what these ranks agree by, with the nodes that the settings pretend."""
    raise_descriptor_limit()
    # Nodes that are pretended, to try hierarchies, may not fit these ranks.
    pretended = settings.local_size if ranks.size % (settings.local_size or 1) == 0 else None
    return ControlPlane(ranks, local_size=pretended, interface=settings.gloo_interface)
