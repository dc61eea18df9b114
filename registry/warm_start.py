"""What a job should try first, given what similar jobs have found: the nearest entries' knobs, scaled.

Nothing else changes remembered knobs; it reads nothing but entries. What is similar can be looked up before the job
has measured anything; what it means for the job (`adapted`) is better asked when it has measured its link.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sirtaki.errors import RegistryError
from sirtaki.gain import faster
from sirtaki.link_model import LinkModel

from .entry import Entry, EntryKey
from .graph import Graph
from .knob_transfer import (
    Permitted,
    RouteNames,
    alike,
    bounded,
    link_class,
    link_ratios,
    route_of,
    scaled_streams,
    unit_factor,
    with_uniform_units,
)
from .similarity import TOPOLOGY_WEIGHT, nearest, topology_distance
from .store import CorruptStoreError, Store
from .topology import Topology

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is known of a job before its first trial.

    Attributes:
        key: its key, of this model and topology.
        model: the model's graph.
        topology: the cluster.
        layout: `layout_fingerprint` of the gradients, for explicit cuts; empty = they never carry over.
        itemsize_bytes: bytes of one element as it travels.
        links: what the job has measured, of as many routes as it has.
        permitted: what it may choose; None = anything.
        name: the model's name, for explanations.
    """

    key: EntryKey
    model: Graph
    topology: Topology
    layout: str = ""
    itemsize_bytes: int = 4
    links: Mapping[RouteNames, LinkModel] = field(default_factory=dict)
    permitted: Permitted | None = None
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Another job's entry and how far it is."""

    entry: Entry
    distance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """A first proposal.

    Attributes:
        knobs: as `Knobs.to_json` gives them.
        distance: of the entry; 0.0 for the job's own.
        source: one sentence for the log, of where they come from.
        changes: what had to be changed, in words.
        lost_cuts: the entry has planned units, which do not fit this job; who planned them could plan anew.
        entry: where the knobs come from, unscaled.
    """

    knobs: Mapping[str, Any]
    distance: float
    source: str
    changes: tuple[str, ...]
    lost_cuts: bool
    entry: Entry

    @property
    def explanation(self) -> str:
        """Where they come from, and what had to be changed."""
        return "; ".join([self.source, *self.changes])


def neighbours(store: Store, job: Job, *, k: int = 3, max_distance: float = 0.6) -> list[Neighbour]:
    """The `k` entries of other jobs that are nearest, nearest first; those that cannot be read are left out.

    What was measured of their links is not in the key, so it is looked at here: of twice as many as are wanted.

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
            entry = store.get(match.id)
            readable.append(Neighbour(entry=entry, distance=match.distance + _farther_by_link(entry, job)))
        except CorruptStoreError:
            raise
        except RegistryError as err:
            logger.info("entry %s of the registry is passed over: %s", match.id, err)
    return sorted(readable, key=lambda neighbour: neighbour.distance)[:k]


def _farther_by_link(entry: Entry, job: Job) -> float:
    """What the measured links add to the distance, at one number of ranks: nothing where one of them is not known."""
    there, here = _resized_link(entry, job), job.links.get(route_of(entry.knobs))
    if there is None or here is None:
        return 0.0
    octaves = link_class(there).octaves_from(link_class(here))
    shapes = entry.topology.shape(), job.topology.shape()
    return TOPOLOGY_WEIGHT * (topology_distance(*shapes, link_octaves=octaves) - topology_distance(*shapes))


def adapted_all(found: Sequence[Neighbour], job: Job) -> list[WarmStart]:
    """Each as `adapted` gives it, in their order; of those with equal knobs the first only."""
    starts: list[WarmStart] = []
    for neighbour in found:
        start = adapted(neighbour, job)
        if all(start.knobs != other.knobs for other in starts):
            starts.append(start)
    return starts


def adapted(neighbour: Neighbour, job: Job) -> WarmStart:
    """The entry's knobs as they suit the job's cluster, link and layout, with a sentence that says what was changed."""
    entry = neighbour.entry
    knobs = dict(entry.knobs)
    changes: list[str] = []
    if job.permitted is not None and route_of(knobs) not in job.permitted.routes:
        transport, algorithm = job.permitted.routes[0]
        changes.append(f"over {transport} {algorithm}, as {' '.join(route_of(knobs))} is left out here")
        knobs |= {"transport": transport, "algorithm": algorithm}
    here = _link_here(entry, job, route_of(knobs))
    latency_ratio, bandwidth_ratio = _link_ratios(entry, job, here)
    if (
        route_of(knobs) in job.links
        and entry.link is not None
        and not (alike(latency_ratio) and alike(bandwidth_ratio))
    ):
        changes.append(f"this link has its latency × {latency_ratio:.2g} and its bandwidth × {bandwidth_ratio:.2g}")
    factor = unit_factor(latency_ratio, bandwidth_ratio, _size_ratio(entry.model, job.model))
    fits = bool(job.layout) and job.layout == entry.layout
    lost_cuts = knobs["cuts"] is not None and not (fits and alike(factor))
    if lost_cuts:
        changes.append(f"its planned units do not fit this {'link' if fits else 'layout'}, their usual size does")
        knobs = with_uniform_units(knobs, job.itemsize_bytes)
    if knobs["cuts"] is None:
        final = _scaled(knobs, entry, here, factor)
        final = final if job.permitted is None else job.permitted.nearest(final)
        changes += _differences(knobs, final)
        knobs = final
    return WarmStart(
        knobs=knobs,
        distance=neighbour.distance,
        source=_source(neighbour, job),
        changes=tuple(changes),
        lost_cuts=lost_cuts,
        entry=entry,
    )


def _link_here(entry: Entry, job: Job, route: RouteNames) -> LinkModel | None:
    """The job's link as measured, else the entry's with the job's number of ranks; None where neither is known."""
    return job.links[route] if route in job.links else _resized_link(entry, job)


def _resized_link(entry: Entry, job: Job) -> LinkModel | None:
    """The entry's link with the job's number of ranks; None where it is not known."""
    there, here = entry.key.world_size, job.key.world_size
    if entry.link is None or min(there, here) == 1:
        return entry.link
    return entry.link.rescaled(from_ranks=there, to_ranks=here)


def _link_ratios(entry: Entry, job: Job, here: LinkModel | None) -> tuple[float, float]:
    """Of latency and bandwidth; where they are not known, of a ring, whose latency grows with its ranks."""
    if entry.link is not None and here is not None:
        return link_ratios(entry.link, here)
    return job.key.world_size / entry.key.world_size, 1.0


def _size_ratio(there: Graph, here: Graph) -> float:
    sizes = [sum(node.size for node in model.nodes) for model in (there, here)]
    return sizes[1] / sizes[0] if all(sizes) else 1.0


def _scaled(knobs: Mapping[str, Any], entry: Entry, here: LinkModel | None, factor: float) -> dict[str, Any]:
    unit_bytes = knobs["unit_bytes"] if alike(factor) else bounded(knobs["unit_bytes"] * factor)
    streams = knobs["streams"]
    if entry.link is not None and here is not None:
        streams = scaled_streams(knobs, entry.link, here, unit_bytes=unit_bytes)
    return {**knobs, "unit_bytes": unit_bytes, "streams": streams}


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    changes = []
    if after["unit_bytes"] != before["unit_bytes"]:
        changes.append(f"units {after['unit_bytes'] / before['unit_bytes']:.2g} times as large")
    counts = [name for name in ("streams", "threads") if after[name] != before[name]]
    return changes + [f"{name} {after[name]} instead of {before[name]}" for name in counts]


def _source(neighbour: Neighbour, job: Job) -> str:
    entry = neighbour.entry
    if entry.key == job.key:
        state = "what an earlier job found" if entry.complete else "the best so far of a job that was cut short"
        source = f"{state}, {faster(entry.default_span_s, entry.best_span_s)} than the default"
    else:
        source = f"what a similar job found, {entry.describe()}, distance {neighbour.distance:.2f} of 1"
    return f"{job.name or 'this model'} on {job.topology.describe()}: starting from {source}"
