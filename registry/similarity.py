"""The entries nearest to a job: model and cluster apart, then together, among thousands in a fraction of a second.

A module of its own because it decides what "similar" means and how little of the store has to be read to find it:
histograms of all models are compared in one sweep, and graphs are read and matched only as long as they could still
be nearer than those found.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .edit_distance import (
    EDGE_COST,
    NODE_COST,
    Floats,
    histogram_bounds,
    mass,
    node_cost,
    normalised,
    upper_bound,
)
from .graph import Graph, Node
from .signature import signature
from .store import Candidate, Store
from .topology import ClusterShape, Topology

# The model decides more than the cluster does what cuts and streams are good.
MODEL_WEIGHT = 0.7
TOPOLOGY_WEIGHT = 0.3
OTHER_DTYPE = 0.05

# Graphs are read and matched so many at a time.
_BATCH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """An entry and how far it is from the job asked for.

    Attributes:
        id: the entry's.
        distance: 0 = the same model on the same cluster, 1 = nothing in common.
        model_distance: normalised edit distance of the models.
        topology_distance: of the clusters.
    """

    id: str
    distance: float
    model_distance: float
    topology_distance: float


def topology_distance(first: ClusterShape, second: ClusterShape) -> float:
    """Normalised cost of turning one cluster into the other, host by host; 0 to 1, symmetric.

    The edit distance of the two `Topology.host_graph`s, with like hosts paired first and the others by size.
    """
    if first == second:
        return 0.0
    counts = [Counter({(detail, ranks): count for detail, ranks, count in shape.hosts}) for shape in (first, second)]
    alike = counts[0] & counts[1]
    n_hosts = [count.total() for count in counts]
    cost = (NODE_COST + EDGE_COST) * abs(n_hosts[0] - n_hosts[1])
    if first.network != second.network:
        cost += EDGE_COST * min(n_hosts)
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
    budget_s: float = 0.15,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Match]:
    """The `k` nearest entries of this kind of device, nearest first; complete ones before others at equal distance.

    Distances are upper bounds, and are kept in the store. When `budget_s` is up, the best so far is returned.

    Raises:
        RegistryError: the store cannot be read.
    """
    end_s = clock() + budget_s
    bounds, place = _model_bounds(store, model)
    # Another process may have saved entries of new models since.
    candidates = [candidate for candidate in store.candidates(device) if candidate.model in place]
    if not candidates or k < 1:
        return []
    place_of = np.array([place[candidate.model] for candidate in candidates])
    extra = _extra_distance(store, topology, candidates, dtype)
    floors = MODEL_WEIGHT * bounds[place_of] + extra
    models = _ModelDistances(store, model)
    found: list[tuple[float, int]] = []  # distance and number of the candidate
    order = [int(index) for index in np.argsort(floors, kind="stable") if floors[index] <= max_distance]
    for start in range(0, len(order), _BATCH):
        batch = order[start : start + _BATCH]
        limit = found[k - 1][0] if len(found) >= k else max_distance
        if floors[batch[0]] > limit or (start and clock() > end_s):
            break
        models.fetch([candidates[index].model for index in batch if floors[index] <= limit])
        for index in batch:
            if floors[index] <= limit:
                total = MODEL_WEIGHT * models.known[candidates[index].model] + extra[index]
                if total <= max_distance:
                    found.append((float(total), index))
        found.sort(key=lambda item: (item[0], not candidates[item[1]].complete, candidates[item[1]].id))
    models.keep()
    return [_match(candidates[index], total, models, extra[index], dtype) for total, index in found[:k]]


def _match(candidate: Candidate, total: float, models: "_ModelDistances", extra: float, dtype: str) -> Match:
    other_dtype = OTHER_DTYPE if candidate.dtype != dtype else 0.0
    return Match(
        id=candidate.id,
        distance=min(total, 1.0),
        model_distance=models.known[candidate.model],
        topology_distance=float(extra - other_dtype) / TOPOLOGY_WEIGHT,
    )


def _model_bounds(store: Store, model: Graph) -> tuple[Floats, dict[str, int]]:
    """Normalised lower bounds for all models in the store, and where each fingerprint's is."""
    names, signatures = store.signatures()
    costs = histogram_bounds(signature(model), signatures)
    masses = signatures[:, :2] @ np.array([NODE_COST, EDGE_COST]) + mass(model)
    return 2 * costs / np.maximum(masses + costs, 1e-9), {name: place for place, name in enumerate(names)}


def _extra_distance(store: Store, topology: Topology, candidates: Sequence[Candidate], dtype: str) -> Floats:
    """What cluster and dtype add to each candidate's distance, `(n_candidates,)`."""
    shape = topology.shape()
    distances = {name: TOPOLOGY_WEIGHT * topology_distance(shape, other) for name, other in store.shapes().items()}
    # A topology that another process removes at this moment counts as far away.
    return np.array(
        [
            distances.get(candidate.topology, TOPOLOGY_WEIGHT) + (OTHER_DTYPE if candidate.dtype != dtype else 0.0)
            for candidate in candidates
        ]
    )


class _ModelDistances:
    """Distances of one model to those in the store: kept ones, and others as they are needed."""

    def __init__(self, store: Store, model: Graph) -> None:
        self._store, self._model, self._name = store, model, model.fingerprint()
        self._new: dict[str, float] = {}
        self.known = {**store.distances(self._name), self._name: 0.0}

    def fetch(self, names: Sequence[str]) -> None:
        """Makes these known."""
        unknown = sorted({name for name in names if name not in self.known})
        graphs = self._store.models(unknown)
        for name in unknown:
            # One that has just been removed by another process is as far away as can be.
            self._new[name] = self._distance(graphs[name]) if name in graphs else 1.0
        self.known.update(self._new)

    def _distance(self, other: Graph) -> float:
        total_mass = mass(self._model) + mass(other)
        return normalised(upper_bound(self._model, other), total_mass)

    def keep(self) -> None:
        """Saves what was computed, for the next job of this model."""
        self._store.save_distances(self._name, self._new)
