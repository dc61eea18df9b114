"""Warm start of a job: find similar entries of earlier jobs, and adapt their settings."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET

from sirtaki.autotune.knobs import Knobs, KnobSpace
from sirtaki.comm.plan import Route
from sirtaki.errors import CorruptStoreError, RegistryError
from sirtaki.measures import LARGEST_UNIT_BYTES, SMALLEST_UNIT_BYTES, LinkModel

from .cluster import ClusterShape, LinkClass, Topology
from .graph import (
    DOUBLING_COST,
    EDGE_COST,
    NODE_COST,
    ModelGraph,
    OperationLabel,
    distance,
    fingerprint,
    histogram_bounds,
    mass,
    node_cost,
    normalised,
    signature,
)
from .schema import EntryKey, JobRecord

if TYPE_CHECKING:
    from .store import Store

# Weights of the model's and the cluster's distance. The model has more, because it influences the best setting more.
MODEL_WEIGHT = 0.7
TOPOLOGY_WEIGHT = 0.3
OTHER_DTYPE = 0.05

# Step sizes of the search: the database lists _STRETCH entries at a time. _BATCH of their model graphs at a time are
# compared with the job's graph.
_STRETCH = 32
_BATCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """An entry of the registry, and its distance from a job.

    Attributes:
        id: id of the entry.
        distance: 0 = same model on the same cluster; about 1 = nothing in common.
        model_distance: normalised edit distance of the models.
        topology_distance: normalised distance of the clusters.
    """

    id: str
    distance: float
    model_distance: float
    topology_distance: float


def topology_distance(first: ClusterShape, second: ClusterShape, *, link_octaves: int = 0) -> float:
    """Return the normalised cost of turning one cluster into the other, host by host; 0 to 1, symmetric.

    This is the edit distance of two star graphs, with a node for each host and one for the network. Equal hosts are
    paired first, the others by size. Edges are labelled with the bandwidth of the network (AIACC § VI). For each factor
    of two, changing the label costs a part of the edge's cost, at most the whole cost.

    Args:
        first: a cluster.
        second: another cluster.
        link_octaves: distance of the measured links (`LinkClass.octaves_from`); 0 if they were not measured.
    """
    if first == second and link_octaves == 0:
        return 0.0
    counts = [Counter({(detail, ranks): count for detail, ranks, count in shape.hosts}) for shape in (first, second)]
    alike = counts[0] & counts[1]
    n_hosts = [count.total() for count in counts]
    cost = (NODE_COST + EDGE_COST) * abs(n_hosts[0] - n_hosts[1])
    share = 1.0 if first.network != second.network else min(1.0, DOUBLING_COST * link_octaves)
    cost += EDGE_COST * share * min(n_hosts)
    left, right = (sorted((count - alike).items(), key=_by_size) for count in counts)
    # Pair the largest hosts that have no partner yet.
    while left and right:
        (host, n_left), (other, n_right) = left[0], right[0]
        n_paired = min(n_left, n_right)
        cost += n_paired * node_cost(_host(host), _host(other))
        for side, n_before in ((left, n_left), (right, n_right)):
            side[0] = (side[0][0], n_before - n_paired)
            if side[0][1] == 0:
                side.pop(0)
    return normalised(cost, (NODE_COST + EDGE_COST) * sum(n_hosts) + 2 * NODE_COST)


def _by_size(item: tuple[tuple[str, int], int]) -> tuple[int, str]:
    (detail, ranks), _ = item
    return -ranks, detail


def _host(detail_and_ranks: tuple[str, int]) -> OperationLabel:
    return OperationLabel(kind="host", detail=detail_and_ranks[0], size=detail_and_ranks[1])


def nearest(
    store: Store,
    model: ModelGraph,
    topology: Topology,
    *,
    dtype: str,
    device: str,
    k: int = 5,
    max_distance: float = 0.6,
    budget_s: float = 0.08,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Match]:
    """Return the `k` nearest entries for this kind of device, by ascending distance.

    Of equally near entries, complete ones come first. Distances are upper bounds, and are stored for later jobs. After
    `budget_s`, the nearest entries found until then are returned.

    Raises:
        RegistryError: the store cannot be read.
    """
    end_s = clock() + budget_s
    if k < 1:
        return []
    name, shape = fingerprint(model), topology.shape()
    names, signatures = store.signatures()
    costs = histogram_bounds(signature(model), signatures)
    masses = signatures[:, :2] @ np.array([NODE_COST, EDGE_COST]) + mass(model)
    # Lower bounds of the models' normalised distances, `(n_models,)`.
    bounds = 2 * costs / np.maximum(masses + costs, 1e-9)
    clusters = {other: topology_distance(shape, there) for other, there in store.shapes().items()}
    computed, new = {**store.distances(name), name: 0.0}, dict[str, float]()
    found: list[tuple[float, bool, str, Match]] = []
    limit = max_distance  # Largest distance of an entry that can still be among the `k` nearest.
    order = np.argsort(bounds, kind="stable")
    for first in range(0, len(order), _STRETCH):
        floors = {names[index]: MODEL_WEIGHT * bounds[index] for index in order[first : first + _STRETCH]}
        if min(floors.values()) > limit or (first and clock() > end_s):
            break
        extras = []  # (lower bound, extra distance of cluster and dtype, cluster distance, candidate)
        for candidate in store.candidates(device, list(floors)):
            # Assume the distance 1.0 if another process has just added the cluster.
            cluster = clusters.get(candidate.topology, 1.0)
            extra = TOPOLOGY_WEIGHT * cluster + (0.0 if candidate.dtype == dtype else OTHER_DTYPE)
            extras.append((floors[candidate.model] + extra, extra, cluster, candidate))
        extras.sort(key=lambda item: item[0])
        for start in range(0, len(extras), _BATCH):
            batch = [item for item in extras[start : start + _BATCH] if item[0] <= limit]
            unknown = sorted({candidate.model for *_, candidate in batch} - computed.keys())
            # After the time limit, use only stored distances, so that a job on a busy host still finds the entries of
            # its own model.
            if not batch or ((first or start) and unknown and clock() > end_s):
                break
            graphs = store.models(unknown) if unknown else {}
            # Use the distance 1.0 if another process has just removed the graph.
            new |= {other: distance(model, graphs[other]) if other in graphs else 1.0 for other in unknown}
            computed |= new
            for _, extra, cluster, candidate in batch:
                apart = MODEL_WEIGHT * computed[candidate.model] + extra
                match = Match(
                    id=candidate.id,
                    distance=apart,
                    model_distance=computed[candidate.model],
                    topology_distance=cluster,
                )
                found.append((apart, not candidate.complete, candidate.id, match))
            found = sorted(item for item in found if item[0] <= max_distance)[:k]
            if len(found) == k:
                limit = found[-1][0]
    # Save new distances, so that the next job of this model need not compute them.
    store.save_distances(name, new)
    return [match for *_, match in found]


# Ratios of sizes and speeds below this factor count as 1, because measured latencies and bandwidths are noisy.
_ALIKE = 1.25

# Smallest relative gain in throughput that justifies another stream (parallel connection).
_LEAST_GAIN = 0.05

# Lower limit of a link's start-up time in seconds. A fit may return almost 0, and a ratio of two such values is only
# noise.
_LEAST_STARTUP_S = 1e-6


def alike(factor: float) -> bool:
    """Return whether a ratio of sizes or speeds is so close to 1 that its difference from 1 may be noise."""
    return 1 / _ALIKE < factor < _ALIKE


def link_class(link: LinkModel) -> LinkClass:
    """Return the rounded speed of a measured link.

    Its highest throughput is the bandwidth, its start-up time the latency.
    """
    return LinkClass.of(bandwidth_bytes_per_s=max(link.throughput), latency_s=_startup_s(link))


def link_ratios(there: LinkModel, here: LinkModel) -> tuple[float, float]:
    """Return the ratios `here` / `there` of two links: of their start-up times, and of their one-stream throughputs."""
    return _startup_s(here) / _startup_s(there), here.throughput[0] / there.throughput[0]


def unit_factor(latency_ratio: float, bandwidth_ratio: float, size_ratio: float) -> float:
    """Return the factor by which an earlier job's unit (bucket) size must be multiplied.

    The best size is proportional to √(M·α/β), where M is the size of the gradients, α the latency, and 1/β the
    bandwidth.
    """
    return math.sqrt(latency_ratio * bandwidth_ratio * size_ratio)


def with_uniform_units(knobs: Knobs, itemsize_bytes: int) -> Knobs:
    """Replace planned unit (bucket) boundaries by units of one size: that of the unit that contains the median byte.

    The median is taken over bytes, not over units, because plans often have small units at both ends on purpose.
    """
    if not knobs.cuts:
        return knobs.but(cuts=None)
    stops = [0, *(cut.stop for cut in knobs.cuts)]
    units = [(stop - start, cut.threads) for (start, stop), cut in zip(pairwise(stops), knobs.cuts, strict=True)]
    units.sort(key=lambda unit: unit[0])
    carried = accumulate(size for size, _ in units)
    size, threads = next(unit for unit, sum_ in zip(units, carried, strict=True) if 2 * sum_ >= stops[-1])
    return knobs.but(cuts=None, unit_bytes=bounded(size * itemsize_bytes), threads=threads or knobs.threads)


def scaled_streams(knobs: Knobs, there: LinkModel, here: LinkModel, *, unit_bytes: int) -> int:
    """Scale `knobs.streams` by the ratio of the streams that saturate the link `here` to those that saturate `there`.

    Returns `knobs.streams` unchanged if the throughput of several streams was not measured on both links.
    """
    wanted_there, wanted_here = _streams_wanted(there, knobs.unit_bytes), _streams_wanted(here, unit_bytes)
    if wanted_there is None or wanted_here is None or alike(wanted_here / wanted_there):
        return knobs.streams
    most = max(len(here.throughput), knobs.streams)
    return max(1, min(most, round(knobs.streams * wanted_here / wanted_there)))


def bounded(unit_bytes: float) -> int:
    """Return the unit (bucket) size, limited to the permitted range."""
    return max(SMALLEST_UNIT_BYTES, min(LARGEST_UNIT_BYTES, round(unit_bytes)))


def _startup_s(link: LinkModel) -> float:
    return max(link.startup_s, _LEAST_STARTUP_S)


def _streams_wanted(link: LinkModel, unit_bytes: int) -> float | None:
    rates = link.throughput
    if len(rates) < 2:
        return None
    knee = next((n for n in range(1, len(rates)) if rates[n] < rates[n - 1] * (1 + _LEAST_GAIN)), len(rates))
    return knee + _startup_s(link) * rates[knee - 1] / unit_bytes


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDescription:
    """Description of a job, by which it finds records before its first trial.

    Attributes:
        key: key of the job.
        model: graph of the model.
        topology: cluster of the job.
        layout: `layout_fingerprint` of the gradients, to check whether the planned unit (bucket) boundaries of a record
            fit; "" = never use such boundaries.
        itemsize_bytes: bytes per element on the wire.
        links: speed of the links that the job has measured, by route (transport and algorithm).
        space: settings that the job may use; None = any.
        name: name of the model, for messages.
    """

    key: EntryKey
    model: ModelGraph
    topology: Topology
    layout: str = ""
    itemsize_bytes: int = 4
    links: Mapping[Route, LinkModel] = field(default_factory=dict)
    space: KnobSpace | None = None
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A record of another job, and its distance from this job."""

    record: JobRecord
    distance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """A record's setting, adapted to a job, which the tuner tries first.

    Attributes:
        knobs: adapted setting.
        distance: distance of the record; 0.0 for the job's own record.
        source: origin of the setting in one sentence, for the log.
        changes: adaptations, in words.
        lost_cuts: True if the record's planned unit (bucket) boundaries were dropped, because they did not fit this
            job. The planner of the boundaries may plan new ones.
        record: the stored record.
    """

    knobs: Knobs
    distance: float
    source: str
    changes: tuple[str, ...]
    lost_cuts: bool
    record: JobRecord

    @property
    def explanation(self) -> str:
        """Return the origin and the adaptations, in words."""
        return "; ".join([self.source, *self.changes])


def neighbours(store: Store, job: JobDescription, *, k: int = 3, max_distance: float = 0.6) -> list[Neighbour]:
    """Return the `k` nearest records of other jobs, by ascending distance. Unreadable records are skipped.

    The store does not compare measured links. They are compared here, for twice as many records as requested.

    Raises:
        RegistryError: the store cannot be read.
    """
    key = job.key
    found = nearest(
        store, job.model, job.topology, dtype=key.dtype, device=key.device, k=2 * k + 1, max_distance=max_distance
    )
    readable = []
    for match in found:
        if match.id == key.digest():
            continue
        try:
            record = store.find(JobRecord, match.id)
            readable.append(Neighbour(record=record, distance=match.distance + _farther_by_link(record, job)))
        except CorruptStoreError:
            raise
        except RegistryError as err:
            logger.info("Sirtaki ignores the damaged result %s of a similar job: %s", match.id, err)
    return sorted(readable, key=lambda neighbour: neighbour.distance)[:k]


def _farther_by_link(record: JobRecord, job: JobDescription) -> float:
    """Return by how much different links (measured latency and bandwidth) increase the distance of a record from a job.

    Returns 0 if a link was not measured.

    The record's link is rescaled to the job's number of ranks before the comparison.
    """
    there, here = _resized_link(record, job), job.links.get(record.knobs.route)
    if there is None or here is None:
        return 0.0
    octaves = link_class(there).octaves_from(link_class(here))
    shapes = record.topology.shape(), job.topology.shape()
    return TOPOLOGY_WEIGHT * (topology_distance(*shapes, link_octaves=octaves) - topology_distance(*shapes))


def adapted_all(found: Sequence[Neighbour], job: JobDescription) -> list[WarmStart]:
    """Adapt the setting of each record to the job, in order. Of equal adapted settings, keep only the first."""
    starts: list[WarmStart] = []
    for neighbour in found:
        start = adapted(neighbour, job)
        if all(start.knobs != other.knobs for other in starts):
            starts.append(start)
    return starts


def adapted(neighbour: Neighbour, job: JobDescription) -> WarmStart:
    """Adapt the knobs of a record to the job's allowed settings, link and gradient layout. Describe each adaptation."""
    record, space = neighbour.record, job.space
    knobs = record.knobs
    changes: list[str] = []
    if space is not None and knobs.route not in space.routes:
        transport, algorithm = space.routes[0]
        there = " ".join(part.value for part in knobs.route)
        changes.append(f"over {transport.value} {algorithm.value}, because this job does not allow {there}")
        knobs = knobs.but(transport=transport, algorithm=algorithm)
    if space is not None and knobs.lossy:
        names = set(knobs.lossy.names)
        if not names <= set(space.lossy) or knobs.route != record.knobs.route:
            changes.append(f"without {', '.join(sorted(names))}, which this job does not allow")
            knobs = knobs.but(lossy=UNSET)
    if space is not None and knobs.nccl and not space.allows_nccl(knobs.nccl):
        changes.append("with NCCL's own choice of algorithm, because this job does not allow another one")
        knobs = knobs.but(nccl=UNSET)
    here = job.links.get(knobs.route) or _resized_link(record, job)
    latency_ratio, bandwidth_ratio = _link_ratios(record, job, here)
    if knobs.route in job.links and record.link is not None and not (alike(latency_ratio) and alike(bandwidth_ratio)):
        latency, bandwidth = _about(latency_ratio), _about(bandwidth_ratio)
        changes.append(f"this link has its latency × {latency} and its bandwidth × {bandwidth}")
    factor = unit_factor(latency_ratio, bandwidth_ratio, _size_ratio(record.model, job.model))
    fits = bool(job.layout) and job.layout == record.layout
    lost_cuts = knobs.cuts is not None and not (fits and alike(factor))
    if lost_cuts:
        changes.append(f"uniform units, because its planned units do not fit this {'link' if fits else 'layout'}")
        knobs = with_uniform_units(knobs, job.itemsize_bytes)
    if knobs.cuts is None:
        final = _scaled(knobs, record, here, factor)
        final = final if space is None else space.nearest(final)
        changes += _differences(knobs, final)
        knobs = final
    return WarmStart(
        knobs=knobs,
        distance=neighbour.distance,
        source=_source(neighbour, job),
        changes=tuple(changes),
        lost_cuts=lost_cuts,
        record=record,
    )


def _resized_link(record: JobRecord, job: JobDescription) -> LinkModel | None:
    """Return the latency and bandwidth measured by the record's job, rescaled to this job's number of ranks.

    Returns None if they were not measured.
    """
    there, here = record.key.world_size, job.key.world_size
    if record.link is None or min(there, here) == 1:
        return record.link
    return record.link.rescaled(from_ranks=there, to_ranks=here)


def _link_ratios(record: JobRecord, job: JobDescription, here: LinkModel | None) -> tuple[float, float]:
    """Return the latency and the bandwidth of the job's link, each divided by that of the record's link.

    If a link was not measured, equal links and a ring all-reduce are assumed, so that the latency is proportional to
    the number of ranks.
    """
    if record.link is not None and here is not None:
        return link_ratios(record.link, here)
    return job.key.world_size / record.key.world_size, 1.0


def _size_ratio(there: ModelGraph, here: ModelGraph) -> float:
    sizes = [sum(node.size for node in model.labels) for model in (there, here)]
    return sizes[1] / sizes[0] if all(sizes) else 1.0


def _scaled(knobs: Knobs, record: JobRecord, here: LinkModel | None, factor: float) -> Knobs:
    unit_bytes = knobs.unit_bytes if alike(factor) else bounded(knobs.unit_bytes * factor)
    streams = knobs.streams
    if record.link is not None and here is not None:
        streams = scaled_streams(knobs, record.link, here, unit_bytes=unit_bytes)
    return knobs.but(unit_bytes=unit_bytes, streams=streams)


def _about(ratio: float) -> str:
    """Return a ratio with two significant digits: `260`, not `2.6e+02`."""
    return f"{float(f'{ratio:.2g}'):g}"


def _differences(before: Knobs, after: Knobs) -> list[str]:
    changes = []
    if after.unit_bytes != before.unit_bytes:
        changes.append(f"units {_about(after.unit_bytes / before.unit_bytes)} times as large")
    if after.streams != before.streams:
        changes.append(f"streams {after.streams} instead of {before.streams}")
    if after.threads != before.threads:
        changes.append(f"threads {after.threads} instead of {before.threads}")
    return changes


def _source(neighbour: Neighbour, job: JobDescription) -> str:
    record = neighbour.record
    if record.key == job.key:
        state = "an earlier job's setting" if record.complete else "the best setting of a job that ended early"
        source = f"{state} ({record.reference}), {record.describe_gain()} than the default"
    else:
        distance = f"distance {neighbour.distance:.2f} of 1"
        source = f"a similar job's setting ({record.describe()}, {distance}; {record.reference})"
    return f"{job.name or 'this model'} on {job.topology.describe()}: starting from {source}"
