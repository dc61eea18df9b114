"""Model graphs: their digest, JSON, edit distance, lower bounds of the distance, and picture.

Nodes are numbered 0, 1, … in the order of computation. Edges lead from an operation to the operations that read its
output, so the graph is acyclic. networkx only draws pictures, because its import takes 0.1 s, for which all ranks of a
job would wait at the look-up of a stored setting.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from sirtaki.errors import RegistryError, require
from sirtaki.fields import Label


def digest(*parts: str) -> str:
    """Return the SHA-256 of the parts, in hexadecimal. The same text in other parts has another digest."""
    sha = hashlib.sha256()
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        sha.update(b"%d:" % len(raw))
        sha.update(raw)
    return sha.hexdigest()


def canonical_json(data: object) -> str:
    """Return the unique JSON text of a value: sorted keys, no spaces. Raises ValueError for NaN and infinity."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def gradients_fingerprint(buffers: Iterable[tuple[str, Iterable[int]]]) -> str:
    """Return a digest of a job's gradients that does not depend on their order.

    Args:
        buffers: dtype and sizes of the gradients, for each flat buffer.
    """
    return digest("gradients", *sorted(canonical_json([dtype, sorted(sizes)]) for dtype, sizes in buffers))[:32]


def layout_fingerprint(sizes: Iterable[int], itemsize_bytes: int) -> str:
    """Return a digest of the sizes and order of gradients in the flat buffers.

    Explicit unit (bucket) boundaries of an earlier job fit only a layout with the same digest.
    """
    return digest("layout", str(itemsize_bytes), *map(str, sizes))[:32]


MAX_NODES = 20_000
MAX_EDGES = 60_000


class OperationLabel(NamedTuple):
    """Label of an operation in a model's graph.

    The class is a tuple, because graph matching hashes thousands of labels.

    Attributes:
        kind: type of operation, such as "Convolution".
        detail: properties that distinguish nodes of one kind, such as parameter shapes.
        size: number of elements, for a graded comparison of nodes of one kind; 0 = no size.
    """

    kind: str
    detail: str = ""
    size: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.detail}".strip()


@dataclass(frozen=True, slots=True, eq=False)
class ModelGraph:
    """An immutable directed graph of a model's operations.

    Attributes:
        labels: label of each node, `(n_nodes,)`.
        edges: (source, target) of each edge, `(n_edges,)`, sorted.
    """

    labels: tuple[OperationLabel, ...]
    edges: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self.labels)

    def neighbours(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return each node's predecessors, `(n_nodes,)`, and each node's successors, `(n_nodes,)`."""
        sources: list[list[int]] = [[] for _ in self.labels]
        targets: list[list[int]] = [[] for _ in self.labels]
        for source, target in self.edges:
            sources[target].append(source)
            targets[source].append(target)
        return sources, targets


def model_graph(nodes: Iterable[OperationLabel], edges: Iterable[tuple[int, int]] = ()) -> ModelGraph:
    """Return an immutable graph with these nodes, numbered from 0.

    Raises:
        RegistryError: an edge is a loop, a duplicate, or has an end that is not a node; or the graph is too large.
    """
    nodes, edges = tuple(nodes), list(edges)
    if len(nodes) > MAX_NODES or len(edges) > MAX_EDGES:
        raise RegistryError(
            f"the model's graph is too large to store tuning results in the registry: it has {len(nodes)} nodes "
            f"(limit {MAX_NODES}) and {len(edges)} edges (limit {MAX_EDGES})"
        )
    for (source, target), times in Counter(edges).items():
        if times > 1 or source == target or not 0 <= min(source, target) <= max(source, target) < len(nodes):
            raise RegistryError(
                f"a stored model graph of {len(nodes)} nodes is damaged: it has the invalid edge {source} -> "
                f"{target} ({times} times)"
            )
    return ModelGraph(labels=nodes, edges=tuple(sorted(edges)))


def fingerprint(graph: ModelGraph) -> str:
    """Return a digest that does not depend on node numbers, process, hash seed or machine.

    Each node is hashed with all its ancestors and, separately, with all its descendants. The digest of the graph
    combines the sorted hashes. Isomorphic graphs have equal digests. In theory, graphs that are not isomorphic can have
    equal digests, too.

    Raises:
        RegistryError: the graph has a cycle.
    """
    sources, targets = graph.neighbours()
    order = topological_order(dict(enumerate(targets)))
    own = [digest("node", node.kind, node.detail, str(node.size)) for node in graph.labels]
    down, up = list(own), list(own)
    for colours, neighbours, way in ((down, sources, order), (up, targets, reversed(order))):
        for index in way:
            colours[index] = digest(own[index], *sorted(colours[other] for other in neighbours[index]))
    return digest("directed", *sorted(map(digest, down, up)))[:32]


def generations(targets: Mapping[int, Iterable[int]]) -> Iterator[list[int]]:
    """Yield the nodes of a graph in layers. All predecessors of a node are in layers before its own.

    Args:
        targets: successors of each node, by node.

    Raises:
        RegistryError: the graph has a cycle.
    """
    missing = Counter(target for each in targets.values() for target in each)
    layer = [node for node in targets if not missing[node]]
    n_left = len(targets)
    while layer:
        yield layer
        n_left -= len(layer)
        following = []
        for node in layer:
            for target in targets[node]:
                missing[target] -= 1
                if not missing[target]:
                    following.append(target)
        layer = following
    if n_left:
        raise RegistryError("the model graph of a stored tuning result is damaged: it has a cycle")


def topological_order(targets: Mapping[int, Iterable[int]]) -> list[int]:
    """Return the nodes of a graph, each after its predecessors. Arguments and errors are those of `generations`."""
    return [node for layer in generations(targets) for node in layer]


class GraphJson(Struct, forbid_unknown_fields=True):
    """JSON form of a graph. The label of an edge is empty. It exists because early versions allowed labels on edges."""

    directed: bool
    nodes: Annotated[list[tuple[Label, Label, Annotated[int, Meta(ge=0, le=2**63 - 1)]]], Meta(max_length=MAX_NODES)]
    edges: Annotated[list[tuple[int, int, Literal[""]]], Meta(max_length=MAX_EDGES)]

    def graph(self) -> ModelGraph:
        """Build the graph.

        Raises:
            RegistryError: the graph is undirected or invalid.
        """
        require(self.directed, "directed", "true", "false", RegistryError)
        return model_graph((OperationLabel(*node) for node in self.nodes), ((a, b) for a, b, _ in self.edges))


def graph_to_json(graph: ModelGraph) -> dict[str, Any]:
    """Return a JSON-ready dict, which `GraphJson` can parse."""
    return {
        "directed": True,
        "nodes": [list(node) for node in graph.labels],
        "edges": [[a, b, ""] for a, b in graph.edges],
    }


Signatures = npt.NDArray[np.uint16]  # 16 bits, because counts are at most MAX_NODES or MAX_EDGES

KIND_BINS = 32
LABEL_BINS = 128
WIDTH = 2 + KIND_BINS + LABEL_BINS

# Version of the signatures' format. A signature counts a graph's nodes by hashed kind and label. Increase the version
# when the counts change, so that stored signatures of earlier versions are computed again.
SIGNATURE_VERSION = 1


@lru_cache(maxsize=65_536)
def _bin(label: str, bins: int) -> int:
    return int(digest(label)[:12], 16) % bins


def signature(graph: ModelGraph) -> Signatures:
    """Return a graph's signature: counts of nodes, edges, nodes by hashed kind and nodes by hashed label, `(WIDTH,)`.

    Signatures give a cheap lower bound of the edit distance of two graphs.
    """
    counts = np.zeros(WIDTH, dtype=np.uint16)
    counts[:2] = len(graph), len(graph.edges)
    for node, count in Counter(graph.labels).items():
        counts[2 + _bin(node.kind, KIND_BINS)] += count
        counts[2 + KIND_BINS + _bin(f"{node.kind}\0{node.detail}\0{node.size}", LABEL_BINS)] += count
    return counts


def to_bytes(counts: Signatures) -> bytes:
    """Return a signature as little-endian bytes, to store it in a database."""
    return counts.astype("<u2").tobytes()


def is_signature(blob: object) -> bool:
    """Return whether a value is a signature. A value from a damaged database may not be one."""
    return isinstance(blob, bytes) and len(blob) == 2 * WIDTH


def from_bytes(blobs: Sequence[bytes]) -> Signatures:
    """Convert the outputs of `to_bytes` to an array of signatures, `(len(blobs), WIDTH)`."""
    return np.frombuffer(b"".join(blobs), dtype="<u2").reshape(len(blobs), WIDTH)


Floats = npt.NDArray[np.float64]

NODE_COST = 1.0
EDGE_COST = 0.5

# Cost of changing a node's label to another one of the same kind: a fixed part, and a part for each doubling in size,
# up to a limit. A label of another kind costs more, but less than a deletion and an insertion.
DETAIL_COST = 0.25
DOUBLING_COST = 0.125
SAME_KIND_LIMIT = 1.0
OTHER_KIND_COST = 1.5

# Largest number of nodes that an optimal assignment pairs with the nodes of another graph. It takes cubic time. In
# larger graphs, the k-th nodes of equal kind are paired.
MAX_ASSIGNED = 160

# Largest number of nodes for which `least_distance` computes `assignment_bound`, which takes cubic time. It may be
# large, because this bound is computed for display only.
MAX_BOUNDED = 600


def node_cost(first: OperationLabel, second: OperationLabel) -> float:
    """Return the cost of changing a node's label. It is a metric, so a detour over a third label is never cheaper."""
    if first == second:
        return 0.0
    if first.kind != second.kind:
        return OTHER_KIND_COST
    doublings = abs(math.log2(1 + first.size) - math.log2(1 + second.size))
    return min(SAME_KIND_LIMIT, DETAIL_COST + DOUBLING_COST * doublings)


def mass(graph: ModelGraph) -> float:
    """Return the mass of a graph: the edit cost of building it from an empty graph."""
    return NODE_COST * len(graph) + EDGE_COST * len(graph.edges)


def normalised(cost: float, total_mass: float) -> float:
    """Return an edit cost scaled to 0 (equal graphs) … 1 (nothing in common).

    Uses the Steinhaus transform, because it preserves the triangle inequality, unlike the quotient cost / mass.

    Args:
        cost: edit cost.
        total_mass: `mass` of both graphs together.
    """
    return 0.0 if cost == 0.0 else 2.0 * cost / (total_mass + cost)


def distance(first: ModelGraph, second: ModelGraph) -> float:
    """Return the normalised upper bound of the edit distance of two graphs.

    Symmetric, at most 1, and 0 for equal graphs.
    """
    return normalised(upper_bound(first, second), mass(first) + mass(second))


def least_distance(first: ModelGraph, second: ModelGraph) -> float:
    """Return a normalised lower bound of the edit distance of two graphs.

    It is the tightest bound that takes at most about a second.
    """
    cost = label_bound(first, second)
    if max(len(first), len(second)) <= MAX_BOUNDED:
        cost = max(cost, assignment_bound(first, second))
    return normalised(cost, mass(first) + mass(second))


def histogram_bounds(query: Signatures, others: Signatures) -> Floats:
    """Return, for each of many graphs, a lower bound of the edit cost between it and one graph.

    At most as many nodes stay unchanged as the graphs have common labels, and at most as many keep their kind as the
    graphs have common kinds. All other nodes must be relabelled, deleted or inserted.

    Args:
        query: signature, `(WIDTH,)`.
        others: signatures, `(n, WIDTH)`.

    Returns:
        Costs, `(n,)`.
    """
    common = np.minimum(others[:, 2:], query[2:])
    same_kind = common[:, :KIND_BINS].sum(axis=1, dtype=np.int64)
    same_label = np.minimum(common[:, KIND_BINS:].sum(axis=1, dtype=np.int64), same_kind)
    n_nodes, n_edges = others[:, 0].astype(np.int64), others[:, 1].astype(np.int64)
    nodes = np.minimum(n_nodes, int(query[0])), np.maximum(n_nodes, int(query[0]))
    bounds: Floats = _least_cost(same_label, same_kind, *nodes, np.abs(n_edges - int(query[1])))
    return bounds


# Any, because the argument may be a number or an array.
def _least_cost(same_label: Any, same_kind: Any, fewer: Any, more: Any, edges: Any) -> Any:
    relabelled = DETAIL_COST * (same_kind - same_label) + OTHER_KIND_COST * (fewer - same_kind)
    return relabelled + NODE_COST * (more - fewer) + EDGE_COST * edges


def label_bound(first: ModelGraph, second: ModelGraph) -> float:
    """Return a lower bound of the edit cost of two graphs, from the numbers of common labels and kinds of nodes."""
    nodes = first.labels, second.labels
    same_label = (Counter(nodes[0]) & Counter(nodes[1])).total()
    same_kind = (Counter(node.kind for node in nodes[0]) & Counter(node.kind for node in nodes[1])).total()
    n_edges = abs(len(first.edges) - len(second.edges))
    fewer, more = sorted(map(len, nodes))
    return float(_least_cost(same_label, same_kind, fewer, more, n_edges))


@dataclass(frozen=True, slots=True, kw_only=True)
class _LocalCosts:
    """Edit costs of the nodes of two graphs. Each node's cost includes half of the cost of its edges.

    Attributes:
        pair_NM: cost of turning node n of the first graph into node m of the second.
        delete_N: cost of deleting node n of the first graph.
        insert_M: cost of inserting node m of the second graph.
    """

    pair_NM: Floats
    delete_N: Floats
    insert_M: Floats


def assignment_bound(first: ModelGraph, second: ModelGraph) -> float:
    """Return a lower bound of the edit cost of two graphs. Takes cubic time.

    It is the cost of the optimal assignment of nodes, if each node's cost includes half of the cost of its edges.
    """
    costs = _local_costs(first, range(len(first)), second, range(len(second)))
    rows, columns = _assign(costs)
    gain = costs.pair_NM[rows, columns] - costs.delete_N[rows] - costs.insert_M[columns]
    return float(costs.delete_N.sum() + costs.insert_M.sum() + np.minimum(gain, 0.0).sum())


def upper_bound(first: ModelGraph, second: ModelGraph) -> float:
    """Return an upper bound of the edit cost of two graphs: the cost of a good assignment of nodes.

    Symmetric, 0 for equal graphs.
    """
    first, second = sorted((first, second), key=lambda graph: (len(graph), len(graph.edges), graph.labels, graph.edges))
    return assignment_cost(first, second, match_nodes(first, second))


def assignment_cost(first: ModelGraph, second: ModelGraph, partners: Sequence[int]) -> float:
    """Return the cost of turning `first` into `second` if node i becomes `partners[i]`; -1 = node i is deleted."""
    others = second.labels
    pairs = [(node, others[partner]) for node, partner in zip(first.labels, partners, strict=True) if partner >= 0]
    there = set(second.edges)
    kept = sum((partners[a], partners[b]) in there for a, b in first.edges)
    return (
        sum(node_cost(a, b) for a, b in pairs)
        + NODE_COST * (len(first) + len(second) - 2 * len(pairs))
        + EDGE_COST * (len(first.edges) + len(second.edges) - 2 * kept)
    )


def match_nodes(first: ModelGraph, second: ModelGraph) -> list[int]:
    """Return for each node of `first` its partner in `second`; -1 = none.

    Models consist of repeated blocks, so nodes with equal labels and equal neighbours are paired first, in order, and
    then nodes with equal labels. The optimal assignment pairs the remaining nodes. If more than `MAX_ASSIGNED` remain,
    they are paired by kind, in order.
    """
    partners = [-1] * len(first)
    free = set(range(len(second)))
    nodes = first.labels, second.labels
    number = {node: number for number, node in enumerate({*nodes[0], *nodes[1]})}
    label_N, label_M = ([number[node] for node in side] for side in nodes)
    _pair_in_order(_contexts(first, label_N), _contexts(second, label_M), partners, free)
    _pair_in_order(label_N, label_M, partners, free)
    left = [index for index, partner in enumerate(partners) if partner < 0]
    right = sorted(free)
    if left and right and max(len(left), len(right)) <= MAX_ASSIGNED:
        costs = _local_costs(first, left, second, right)
        for row, column in zip(*_assign(costs), strict=True):
            if costs.pair_NM[row, column] < costs.delete_N[row] + costs.insert_M[column]:
                partners[left[row]] = right[column]
    elif left and right:
        kind_N, kind_M = ([node.kind for node in side] for side in nodes)
        _pair_in_order(kind_N, kind_M, partners, free)
    return partners


def _contexts(graph: ModelGraph, numbers: Sequence[int]) -> list[Hashable]:
    """Return each node's context: its label, and the labels of its predecessors and successors."""
    incoming: list[list[int]] = [[] for _ in numbers]
    outgoing: list[list[int]] = [[] for _ in numbers]
    for source, target in graph.edges:
        incoming[target].append(numbers[source])
        outgoing[source].append(numbers[target])
    return [
        (label, tuple(sorted(before)), tuple(sorted(after)))
        for label, before, after in zip(numbers, incoming, outgoing, strict=True)
    ]


def _pair_in_order(first: Sequence[Hashable], second: Sequence[Hashable], partners: list[int], free: set[int]) -> None:
    """Pair the k-th unpaired node of a class in one graph with the k-th unpaired node of this class in the other.

    A class contains, for example, all nodes with the same label. Updates `partners` and `free`.
    """
    waiting: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index in sorted(free, reverse=True):
        waiting[second[index]].append(index)
    for index, name in enumerate(first):
        if partners[index] < 0 and waiting[name]:
            partners[index] = waiting[name].pop()
            free.remove(partners[index])


def _local_costs(first: ModelGraph, left: Sequence[int], second: ModelGraph, right: Sequence[int]) -> _LocalCosts:
    """Return the edit costs of pairing nodes `left` of one graph with nodes `right` of another."""
    sides = [[nodes[index] for index in picked] for nodes, picked in ((first.labels, left), (second.labels, right))]
    kind = {name: number for number, name in enumerate({node.kind for side in sides for node in side})}
    label = {node: number for number, node in enumerate({node for side in sides for node in side})}
    kind_N, kind_M = (np.array([kind[node.kind] for node in side], dtype=np.int64) for side in sides)
    label_N, label_M = (np.array([label[node] for node in side], dtype=np.int64) for side in sides)
    size_N, size_M = (np.log2([1.0 + node.size for node in side]) for side in sides)
    pair_NM = np.minimum(SAME_KIND_LIMIT, DETAIL_COST + DOUBLING_COST * np.abs(size_N[:, None] - size_M))
    pair_NM = np.where(kind_N[:, None] == kind_M, pair_NM, OTHER_KIND_COST)
    pair_NM = np.where(label_N[:, None] == label_M, 0.0, pair_NM)
    delete_N, insert_M = np.full(len(left), NODE_COST), np.full(len(right), NODE_COST)
    for end in (0, 1):  # First count the edges that begin at a node, then the edges that end at it.
        degree_N, degree_M = (
            np.bincount(np.array([edge[end] for edge in graph.edges], dtype=np.int64), minlength=len(graph))[[*picked]]
            for graph, picked in ((first, left), (second, right))
        )
        pair_NM += EDGE_COST / 2 * np.abs(degree_N[:, None] - degree_M)
        delete_N += EDGE_COST / 2 * degree_N
        insert_M += EDGE_COST / 2 * degree_M
    return _LocalCosts(pair_NM=pair_NM, delete_N=delete_N, insert_M=insert_M)


def _assign(costs: _LocalCosts) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the pairs of nodes in the cheapest assignment.

    A pair that costs as much as deleting one node and inserting the other counts as a deletion and an insertion.
    """
    from scipy.optimize import linear_sum_assignment

    gain_NM = np.minimum(costs.pair_NM - costs.delete_N[:, None] - costs.insert_M, 0.0)
    rows, columns = linear_sum_assignment(gain_NM)
    return rows, columns


_SAME, _CHANGED, _ALONE = "#2a9d8f", "#e9a23b", "#c0392b"

# Graphs with more nodes are drawn without labels, because the labels would overlap.
_MAX_LABELLED = 60


def draw_match(first: ModelGraph, second: ModelGraph, path: Path, *, titles: tuple[str, str], caption: str) -> None:
    """Write a picture of two graphs side by side, coloured by same, changed and unmatched nodes.

    Inputs are at the top. Each node is one level below the lowest of its predecessors. The suffix of the file selects
    the format (.png, .svg, .pdf).

    Raises:
        RegistryError: matplotlib is missing, or the file cannot be written.
    """
    import networkx as nx

    try:
        from matplotlib.figure import Figure
    except ImportError as err:
        raise RegistryError(
            "drawing a picture of graphs needs matplotlib, which is not installed: run pip install 'sirtaki[plot]'"
        ) from err
    partners = match_nodes(first, second)
    back = {partner: index for index, partner in enumerate(partners) if partner >= 0}
    figure = Figure(figsize=(12, 14), layout="constrained")
    sides = ((first, second, dict(enumerate(partners))), (second, first, back))
    for axes, title, (graph, other, partner) in zip(figure.subplots(1, 2), titles, sides, strict=True):
        others, colours = other.labels, []
        for index, node in enumerate(graph.labels):
            match = partner.get(index, -1)
            colours.append(_ALONE if match < 0 else _SAME if others[match] == node else _CHANGED)
        _, targets = graph.neighbours()
        drawn = nx.DiGraph(graph.edges)
        drawn.add_nodes_from(range(len(graph)))
        places = {
            node: (column, -depth)
            for depth, level in enumerate(generations(dict(enumerate(targets))))
            for column, node in enumerate(sorted(level))
        }
        nx.draw_networkx_edges(drawn, places, ax=axes, arrows=False, edge_color="0.7", width=0.8)
        size = max(4, 3000 / (len(graph) + 30))
        nx.draw_networkx_nodes(drawn, places, nodelist=range(len(graph)), ax=axes, node_color=colours, node_size=size)
        if len(graph) <= _MAX_LABELLED:
            texts = {index: f"{node!s:.40}" for index, node in enumerate(graph.labels)}
            nx.draw_networkx_labels(drawn, places, texts, ax=axes, font_size=7, horizontalalignment="left")
        axes.set_title(title)
        axes.axis("off")
    figure.suptitle(caption)
    for colour, meaning in ((_SAME, "the same in both"), (_CHANGED, "changed"), (_ALONE, "only here")):
        figure.axes[0].scatter([], [], c=colour, label=meaning)
    figure.legend(loc="outside lower center", ncols=3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as err:
        raise RegistryError(f"the picture file {path} cannot be written: {err}") from err
