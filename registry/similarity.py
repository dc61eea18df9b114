"""The entries nearest to a job: model and cluster apart, then together, among thousands in a fraction of a second.

Histograms of all models are compared in one sweep, and graphs are read and matched only as long as they could still be
nearer than those found.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .edit_distance import (
    DOUBLING_COST,
    EDGE_COST,
    NODE_COST,
    Floats,
    distance,
    histogram_bounds,
    mass,
    node_cost,
    normalised,
)
from .graph import Graph, Node
from .signature import signature
from .store import Candidate, Store
from .topology import ClusterShape, Topology

# The model decides more than the cluster does what cuts and streams are good.
MODEL_WEIGHT = 0.7
TOPOLOGY_WEIGHT = 0.3
OTHER_DTYPE = 0.05

# The models that could be nearest are looked at in stretches: all entries of one are listed, then read and matched a
# few at a time.
_STRETCH = 32
_BATCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """An entry and how far it is from the job asked for.

    Attributes:
        id: the entry's.
        distance: 0 = the same model on the same cluster; about 1 = nothing in common.
        model_distance: normalised edit distance of the models.
        topology_distance: of the clusters.
    """

    id: str
    distance: float
    model_distance: float
    topology_distance: float


def topology_distance(first: ClusterShape, second: ClusterShape, *, link_octaves: int = 0) -> float:
    """Normalised cost of turning one cluster into the other, host by host; 0 to 1, symmetric.

    The edit distance of the two `Topology.host_graph`s, with like hosts paired first and the others by size. Edges
    carry the bandwidth of the network (AIACC § VI): relabelling one costs a part for each doubling, up to the whole.

    Args:
        first: a cluster.
        second: another one.
        link_octaves: between the measured links of the two (`LinkClass.octaves_from`), as far as they are known.
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
    while left and right:  # the largest hosts of either that are still without a partner
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


def _host(detail_and_ranks: tuple[str, int]) -> Node:
    return Node(kind="host", detail=detail_and_ranks[0], size=detail_and_ranks[1])


def nearest(
    store: Store,
    model: Graph,
    topology: Topology,
    *,
    dtype: str,
    device: str,
    k: int = 5,
    max_distance: float = 0.6,
    budget_s: float = 0.08,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Match]:
    """The `k` nearest entries of this kind of device, nearest first; complete ones before others at equal distance.

    Distances are upper bounds, and are kept in the store. When `budget_s` is up, the best so far is returned.

    Raises:
        RegistryError: the store cannot be read.
    """
    end_s = clock() + budget_s
    if k < 1:
        return []
    names, bounds = _model_bounds(store, model)
    shape = topology.shape()
    clusters = {name: topology_distance(shape, other) for name, other in store.shapes().items()}
    models = _ModelDistances(store, model)
    found: list[tuple[float, bool, str, Match]] = []
    limit = max_distance  # what an entry must not exceed to be among the nearest
    order = np.argsort(bounds, kind="stable")
    for first in range(0, len(order), _STRETCH):
        floors = {names[index]: MODEL_WEIGHT * bounds[index] for index in order[first : first + _STRETCH]}
        if min(floors.values()) > limit or (first and clock() > end_s):
            break
        extras = [
            (candidate, _extra_distance(candidate, clusters, dtype))
            for candidate in store.candidates(device, list(floors))
        ]
        extras.sort(key=lambda item: floors[item[0].model] + item[1])
        for start in range(0, len(extras), _BATCH):
            batch = [item for item in extras[start : start + _BATCH] if floors[item[0].model] + item[1] <= limit]
            wanted = [candidate.model for candidate, _ in batch]
            # What is known costs no time: a busy machine must not make a job overlook its own model's entries.
            if not batch or ((first or start) and not models.know(wanted) and clock() > end_s):
                break
            models.fetch(wanted)
            found += [_judged(candidate, extra, models.known[candidate.model], clusters) for candidate, extra in batch]
            found = sorted(item for item in found if item[0] <= max_distance)[:k]
            if len(found) == k:
                limit = found[-1][0]
    models.keep()
    return [match for *_, match in found]


def _judged(
    candidate: Candidate, extra: float, model_distance: float, clusters: Mapping[str, float]
) -> tuple[float, bool, str, Match]:
    """A match behind what matches are sorted by."""
    match = Match(
        id=candidate.id,
        distance=MODEL_WEIGHT * model_distance + extra,
        model_distance=model_distance,
        topology_distance=clusters.get(candidate.topology, 1.0),
    )
    return match.distance, not candidate.complete, candidate.id, match


def _model_bounds(store: Store, model: Graph) -> tuple[Sequence[str], Floats]:
    """Fingerprints of all models in the store, and a normalised lower bound of each one's distance, `(n_models,)`."""
    names, signatures = store.signatures()
    costs = histogram_bounds(signature(model), signatures)
    masses = signatures[:, :2] @ np.array([NODE_COST, EDGE_COST]) + mass(model)
    return names, 2 * costs / np.maximum(masses + costs, 1e-9)


def _extra_distance(candidate: Candidate, clusters: Mapping[str, float], dtype: str) -> float:
    """What cluster and dtype add; a cluster that another process has just added counts as far away."""
    other_dtype = 0.0 if candidate.dtype == dtype else OTHER_DTYPE
    return TOPOLOGY_WEIGHT * clusters.get(candidate.topology, 1.0) + other_dtype


class _ModelDistances:
    """Distances of one model to those in the store: kept ones, and others as they are needed."""

    def __init__(self, store: Store, model: Graph) -> None:
        self._store, self._model, self._name = store, model, model.fingerprint()
        self._new: dict[str, float] = {}
        self.known = {**store.distances(self._name), self._name: 0.0}

    def know(self, names: Sequence[str]) -> bool:
        """Whether all of these are known."""
        return self.known.keys() >= set(names)

    def fetch(self, names: Sequence[str]) -> None:
        """Makes these known."""
        unknown = sorted({name for name in names if name not in self.known})
        graphs = self._store.models(unknown)
        for name in unknown:
            # One that has just been removed by another process is as far away as can be.
            self._new[name] = distance(self._model, graphs[name]) if name in graphs else 1.0
        self.known.update(self._new)

    def keep(self) -> None:
        """Saves what was computed, for the next job of this model."""
        self._store.save_distances(self._name, self._new)
