"""What a job should try first, given what others have found: the exact entry's knobs, or the nearest entries' scaled.

A module of its own because it is the only place that changes remembered knobs; it reads nothing but entries.

The scaling follows the cost model of the planners: an all-reduce of b bytes takes α + β·b, and n streams together move
G(n) times the bytes of one. A unit is large enough when its start-up cost is a small part of its time, so its best size
goes with α/β, the bytes that one latency is worth; the best number of streams is about where G(n) stops growing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from .entry import Entry, EntryKey, LinkModel
from .graph import Graph
from .similarity import nearest
from .store import Store
from .topology import Topology

MIN_UNIT_BYTES = 64 * 1024
MAX_UNIT_BYTES = 256 * 1024 * 1024

# Two links are taken for alike where they differ by less than this factor: α and β are noisy.
_ALIKE = 1.5

# Another stream that adds less than this part to the throughput is not worth its cost.
_LEAST_GAIN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """A first proposal.

    Attributes:
        knobs: as `Knobs.to_json` gives them.
        distance: 0.0 for the exact entry.
        explanation: one sentence for the log.
        is_exact: they were found under the job's own key by a job that finished its warm-up.
        entry: where the knobs come from, unscaled; its trials can feed a surrogate's prior.
    """

    knobs: Mapping[str, Any]
    distance: float
    explanation: str
    is_exact: bool
    entry: Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is known of a job before its first trial.

    Attributes:
        key: its key, of this model and topology.
        model: the model's graph.
        topology: the cluster.
        layout: `layout_fingerprint` of the gradients, for explicit cuts; empty = they never carry over.
        itemsize_bytes: bytes of one element as it travels.
        link: what the job has measured of its link, if it has.
        name: the model's name, for explanations.
    """

    key: EntryKey
    model: Graph
    topology: Topology
    layout: str = ""
    itemsize_bytes: int = 4
    link: LinkModel | None = None
    name: str = ""


def warm_starts(store: Store, job: Job, *, k: int = 3, max_distance: float = 0.6) -> list[WarmStart]:
    """What to try first, best first: the exact entry if there is one, then the nearest; no two with equal knobs.

    Args:
        store: where to look.
        job: what it is for.
        k: at most so many.
        max_distance: entries farther away are no help.

    Raises:
        RegistryError: the store cannot be read.
    """
    starts: list[WarmStart] = []
    exact = store.lookup(job.key)
    if exact is not None:
        starts.append(replace(adapted(exact, job, distance=0.0), is_exact=exact.complete))
        if exact.complete:
            return starts
    found = nearest(
        store, job.model, job.topology, dtype=job.key.dtype, device=job.key.device, k=k, max_distance=max_distance
    )
    for match in found:
        if exact is None or match.id != exact.id:
            start = adapted(store.get(match.id), job, distance=match.distance)
            if all(start.knobs != other.knobs for other in starts):
                starts.append(start)
    return starts[:k]


def adapted(entry: Entry, job: Job, *, distance: float) -> WarmStart:
    """The entry's knobs as they suit the job's cluster, link and layout, with a sentence that says what was changed."""
    knobs = dict(entry.knobs)
    changes: list[str] = []
    if knobs["cuts"] is not None and (not job.layout or job.layout != entry.layout):
        knobs["unit_bytes"] = _typical_unit_bytes(knobs["cuts"], job.itemsize_bytes)
        knobs["cuts"] = None
        changes.append("its planned units do not fit this layout, their usual size does")
    if knobs["cuts"] is None and entry.link is not None:
        there = entry.link
        here = job.link or _rescaled(there, entry.key.world_size, job.key.world_size)
        unit_bytes = _unit_bytes(knobs["unit_bytes"], there, here)
        if unit_bytes != knobs["unit_bytes"]:
            changes.append(f"units {unit_bytes / knobs['unit_bytes']:.2g} times as large for this link")
            knobs["unit_bytes"] = unit_bytes
        streams = _streams(knobs["streams"], there, here)
        if streams != knobs["streams"]:
            changes.append(f"{streams} streams instead of {knobs['streams']}")
            knobs["streams"] = streams
    explanation = _explain(entry, job, distance, changes)
    return WarmStart(knobs=knobs, distance=distance, explanation=explanation, is_exact=False, entry=entry)


def _explain(entry: Entry, job: Job, distance: float, changes: Sequence[str]) -> str:
    if entry.key == job.key:
        state = "what an earlier job found" if entry.complete else "the best so far of a job that was cut short"
        source = f"{state}, {entry.speedup:.2f} times as fast as the default"
    else:
        source = f"{entry.describe()}, distance {distance:.2f}"
    text = f"{job.name or 'this model'} on {job.topology.describe()}: starting from {source}"
    return "; ".join([text, *changes])


def _typical_unit_bytes(cuts: Sequence[Sequence[Any]], itemsize_bytes: int) -> int:
    """The size of the unit in which the middle byte travels: large units count for what they carry."""
    ends = [0, *(cut[0] for cut in cuts)]
    sizes = sorted(stop - start for start, stop in pairwise(ends))
    carried = 0
    for size in sizes:
        carried += size
        if 2 * carried >= ends[-1]:
            return _bounded(size * itemsize_bytes)
    return MIN_UNIT_BYTES


def _rescaled(link: LinkModel, ranks_there: int, ranks_here: int) -> LinkModel:
    """The link as it would be with P ranks: a ring takes 2(P-1) steps and moves 2(P-1)/P of the bytes."""
    if ranks_there < 2 or ranks_here < 2:
        return link
    steps = (ranks_here - 1) / (ranks_there - 1)
    volume = steps * ranks_there / ranks_here
    return LinkModel(
        latency_s=link.latency_s * steps,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / volume,
        concurrency=link.concurrency,
    )


def _unit_bytes(unit_bytes: int, there: LinkModel, here: LinkModel) -> int:
    factor = (here.latency_s * here.bandwidth_bytes_per_s) / (there.latency_s * there.bandwidth_bytes_per_s)
    if 1 / _ALIKE < factor < _ALIKE:
        return unit_bytes
    return _bounded(unit_bytes * factor)


def _streams(streams: int, there: LinkModel, here: LinkModel) -> int:
    """As far beyond, or below, the knee of G(n) here as it was there."""
    knee_there, knee_here = _knee(there), _knee(here)
    if knee_there is None or knee_here is None or knee_there == knee_here:
        return streams
    return max(1, min(len(here.concurrency), round(streams * knee_here / knee_there)))


def _knee(link: LinkModel) -> int | None:
    """The number of streams from which another one gains nothing; None where G(n) was not measured."""
    gains = link.concurrency
    for n in range(1, len(gains)):
        if gains[n] < gains[n - 1] * (1 + _LEAST_GAIN):
            return n
    return len(gains) or None


def _bounded(unit_bytes: float) -> int:
    return max(MIN_UNIT_BYTES, min(MAX_UNIT_BYTES, round(unit_bytes)))
