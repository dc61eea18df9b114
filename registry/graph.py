"""Labelled graphs of models and clusters: canonical form, signature, edit distance, picture."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sirtaki.errors import RegistryError


def digest(*parts: str) -> str:
    """SHA-256 of the parts, in hexadecimal; where one ends and the next begins counts."""
    sha = hashlib.sha256()
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        sha.update(b"%d:" % len(raw))
        sha.update(raw)
    return sha.hexdigest()


def canonical_json(data: object) -> str:
    """The one text of a JSON value: sorted keys, no spaces. NaN and infinity are refused (ValueError)."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def gradients_fingerprint(buffers: Iterable[tuple[str, Iterable[int]]]) -> str:
    """A digest of which gradients a job reduces, in whatever order they come: dtype and sizes of each flat buffer."""
    return digest("gradients", *sorted(canonical_json([dtype, sorted(sizes)]) for dtype, sizes in buffers))[:32]


def layout_fingerprint(sizes: Iterable[int], itemsize_bytes: int) -> str:
    """A digest of a gradient layout: explicit cuts fit a layout of equal fingerprint and no other."""
    return digest("layout", str(itemsize_bytes), *map(str, sizes))[:32]


MAX_NODES = 20_000
MAX_EDGES = 60_000
MAX_LABEL_CHARS = 2_000

# Edges of models have no labels at all and those of clusters one kind; the distance of two graphs takes memory and time
# with the number of different ones.
MAX_EDGE_LABELS = 64

# Rounds of colour refinement: nodes that differ only farther away than this look alike. Models have no cycles and are
# not refined.
_MAX_ROUNDS = 16


class Node(NamedTuple):
    """What a node is, from coarse to fine; a tuple, since graphs are matched by hashing thousands of them.

    Attributes:
        kind: decides whether two nodes are the same sort of thing, such as "Convolution" or "host".
        detail: what sets nodes of one kind apart, such as parameter shapes.
        size: elements or ranks in it, for a graded comparison of nodes of one kind; 0 = it has no size.
    """

    kind: str
    detail: str = ""
    size: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.detail}".strip()


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes and the edges between them.

    Attributes:
        nodes: `(n_nodes,)`.
        edges: source, target and label of each edge, sorted, no pair twice; undirected ones have source < target.
        directed: whether an edge's direction means anything.

    Raises:
        RegistryError: an edge names a node that is not there, is a loop or is there twice; or it is too large.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int, str], ...] = ()
    directed: bool = True

    def __post_init__(self) -> None:
        if len(self.nodes) > MAX_NODES or len(self.edges) > MAX_EDGES:
            raise RegistryError(
                f"a graph of {len(self.nodes)} nodes and {len(self.edges)} edges is too large to be kept: "
                f"at most {MAX_NODES} and {MAX_EDGES}"
            )
        if len({label for *_, label in self.edges}) > MAX_EDGE_LABELS:
            raise RegistryError(f"a graph must not have more than {MAX_EDGE_LABELS} different labels of edges")
        edges = tuple(
            sorted(
                (source, target, label) if self.directed or source < target else (target, source, label)
                for source, target, label in self.edges
            )
        )
        count = len(self.nodes)
        for source, target, _ in edges:
            if not (0 <= source < count and 0 <= target < count) or source == target:
                raise RegistryError(f"edge {source} → {target} does not fit a graph of {count} nodes")
        if len({(source, target) for source, target, _ in edges}) != len(edges):
            raise RegistryError("a graph holds the same edge twice")
        object.__setattr__(self, "edges", edges)

    def fingerprint(self) -> str:
        """A digest that does not depend on how nodes are numbered, nor on process, hash seed or machine.

        Every node is digested with all that leads to it and, separately, all that it leads to; the sorted
        digests make the graph's. Graphs with cycles or without direction are refined neighbour by neighbour
        instead. Isomorphic graphs agree; others that agree would have to look alike from each of their nodes.
        """
        before, after = self._neighbours()
        own = [digest("node", node.kind, node.detail, str(node.size)) for node in self.nodes]
        order = topological_order(before, after) if self.directed else None
        if order is None:
            colours = _refined(own, before, after)
        else:
            down = _accumulated(own, before, order)
            up = _accumulated(own, after, order[::-1])
            colours = [digest(d, u) for d, u in zip(down, up, strict=True)]
        return digest("directed" if self.directed else "undirected", *sorted(colours))[:32]

    @property
    def is_acyclic(self) -> bool:
        """Directed, and without a cycle; all graphs of models are."""
        return self.directed and topological_order(*self._neighbours()) is not None

    def _neighbours(self) -> tuple[list[list[tuple[int, str]]], list[list[tuple[int, str]]]]:
        """Predecessors and successors of each node with the edge's label; the same lists twice if undirected."""
        before: list[list[tuple[int, str]]] = [[] for _ in self.nodes]
        after: list[list[tuple[int, str]]] = [[] for _ in self.nodes] if self.directed else before
        for source, target, label in self.edges:
            before[target].append((source, label))
            after[source].append((target, label))
        return before, after

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; `from_json` is its inverse."""
        return {
            "directed": self.directed,
            "nodes": [[node.kind, node.detail, node.size] for node in self.nodes],
            "edges": [list(edge) for edge in self.edges],
        }

    @classmethod
    def from_json(cls, data: object) -> Graph:
        """The graph that `to_json` described.

        Raises:
            RegistryError: a field is missing, has the wrong type or is too large; the message names it.
        """
        if not isinstance(data, Mapping) or set(data) != {"directed", "nodes", "edges"}:
            raise RegistryError("a graph needs exactly the fields directed, nodes and edges")
        if not isinstance(data["directed"], bool):
            raise RegistryError(f"directed must be true or false, not {data['directed']!r:.80}")
        nodes, edges = data["nodes"], data["edges"]
        if not isinstance(nodes, list) or not isinstance(edges, list):
            raise RegistryError("nodes and edges must be lists")
        return cls(
            nodes=tuple(_node_from_json(index, item) for index, item in enumerate(nodes[: MAX_NODES + 1])),
            edges=tuple(_edge_from_json(index, item) for index, item in enumerate(edges[: MAX_EDGES + 1])),
            directed=data["directed"],
        )


def topological_order(
    before: Sequence[Sequence[tuple[int, str]]], after: Sequence[Sequence[tuple[int, str]]]
) -> list[int] | None:
    """Node numbers, each behind all of its predecessors (Kahn); None where there is a cycle."""
    waiting = [len(sources) for sources in before]
    order = [index for index, count in enumerate(waiting) if count == 0]
    for index in order:  # grows while it is read
        for target, _ in after[index]:
            waiting[target] -= 1
            if waiting[target] == 0:
                order.append(target)
    return order if len(order) == len(waiting) else None


def _accumulated(own: list[str], before: list[list[tuple[int, str]]], order: list[int]) -> list[str]:
    """For each node a digest of itself and of everything that leads to it."""
    colours = list(own)
    for index in order:
        colours[index] = digest(own[index], *sorted(label + colours[source] for source, label in before[index]))
    return colours


def _refined(own: list[str], before: list[list[tuple[int, str]]], after: list[list[tuple[int, str]]]) -> list[str]:
    """Colour refinement (Weisfeiler and Leman) until the number of colours no longer grows, or for `_MAX_ROUNDS`."""
    colours = list(own)
    classes = len(set(colours))
    for _ in range(_MAX_ROUNDS):
        colours = [
            digest(
                colours[index],
                *sorted("<" + label + colours[other] for other, label in before[index]),
                *sorted(">" + label + colours[other] for other, label in after[index]),
            )
            for index in range(len(own))
        ]
        refined = len(set(colours))
        if refined <= classes:
            break
        classes = refined
    return colours


def _node_from_json(index: int, item: object) -> Node:
    if not isinstance(item, list) or len(item) != 3:
        raise RegistryError(f"node {index} must be a list of kind, detail and size")
    kind, detail, size = item
    if not (is_label(kind) and is_label(detail)):
        raise RegistryError(
            f"kind and detail of node {index} must be printable texts of at most {MAX_LABEL_CHARS} characters"
        )
    if type(size) is not int or not 0 <= size < 2**63:
        raise RegistryError(f"size of node {index} must be a whole number from 0, not {size!r:.80}")
    return Node(kind=kind, detail=detail, size=size)


def _edge_from_json(index: int, item: object) -> tuple[int, int, str]:
    if not isinstance(item, list) or len(item) != 3:
        raise RegistryError(f"edge {index} must be a list of source, target and label")
    source, target, label = item
    if type(source) is not int or type(target) is not int or not is_label(label):
        raise RegistryError(f"edge {index} must be two node numbers and a text, not {item!r:.80}")
    return source, target, label


def is_label(value: object) -> bool:
    """Whether a value can be a node's or edge's label: printable text of a limited length."""
    return isinstance(value, str) and len(value) <= MAX_LABEL_CHARS and value.isprintable()


Signatures = npt.NDArray[np.uint16]  # no graph has more nodes or edges than that holds

KIND_BINS = 32
LABEL_BINS = 128
WIDTH = 2 + KIND_BINS + LABEL_BINS

# Raise it when the bins change: stored signatures of another version are made anew.
SIGNATURE_VERSION = 1


@lru_cache(maxsize=65_536)
def _bin(label: str, bins: int) -> int:
    return int(digest(label)[:12], 16) % bins


def signature(graph: Graph) -> Signatures:
    """`(WIDTH,)`: number of nodes, number of edges, nodes by kind, nodes by kind and detail."""
    counts = np.zeros(WIDTH, dtype=np.uint16)
    counts[0], counts[1] = len(graph.nodes), len(graph.edges)
    for node, count in Counter(graph.nodes).items():
        counts[2 + _bin(node.kind, KIND_BINS)] += count
        counts[2 + KIND_BINS + _bin(f"{node.kind}\0{node.detail}\0{node.size}", LABEL_BINS)] += count
    return counts


def to_bytes(counts: Signatures) -> bytes:
    """For a database; little-endian on every machine."""
    return counts.astype("<u2").tobytes()


def is_signature(blob: object) -> bool:
    """Whether it can be read: what lies in a database may be damaged."""
    return isinstance(blob, bytes) and len(blob) == 2 * WIDTH


def from_bytes(blobs: Sequence[bytes]) -> Signatures:
    """`(len(blobs), WIDTH)` from what `to_bytes` made."""
    return np.frombuffer(b"".join(blobs), dtype="<u2").reshape(len(blobs), WIDTH)


Floats = npt.NDArray[np.float64]

NODE_COST = 1.0
EDGE_COST = 0.5

# Relabelling within a kind: a fixed part and a part for each doubling in size, up to a limit. To another kind: more,
# but less than a deletion and an insertion.
DETAIL_COST = 0.25
DOUBLING_COST = 0.125
SAME_KIND_LIMIT = 1.0
OTHER_KIND_COST = 1.5

# The optimal assignment takes time with the cube of this; beyond it alike nodes are paired in their order.
MAX_ASSIGNED = 160

# The same for the lower bound, which is computed for people only.
MAX_BOUNDED = 600


def node_cost(first: Node, second: Node) -> float:
    """Price of relabelling a node; a metric, so it never pays to go through a third label."""
    if first == second:
        return 0.0
    if first.kind != second.kind:
        return OTHER_KIND_COST
    doublings = abs(math.log2(1 + first.size) - math.log2(1 + second.size))
    return min(SAME_KIND_LIMIT, DETAIL_COST + DOUBLING_COST * doublings)


def mass(graph: Graph) -> float:
    """Cost of building the graph from nothing."""
    return NODE_COST * len(graph.nodes) + EDGE_COST * len(graph.edges)


def normalised(cost: float, total_mass: float) -> float:
    """An edit cost as a number from 0 (the same) to 1 (nothing in common); `total_mass` is of both graphs together.

    The Steinhaus transform: unlike the plain quotient it leaves a metric a metric.
    """
    return 0.0 if cost == 0.0 else 2.0 * cost / (total_mass + cost)


def distance(first: Graph, second: Graph) -> float:
    """Normalised upper bound: symmetric, at most 1, 0 for a graph and itself."""
    return normalised(upper_bound(first, second), mass(first) + mass(second))


def least_distance(first: Graph, second: Graph) -> float:
    """Normalised lower bound, the best that a second or so can buy."""
    cost = max(label_bound(first, second), hausdorff_bound(first, second))
    if max(len(first.nodes), len(second.nodes)) <= MAX_BOUNDED:
        cost = max(cost, assignment_bound(first, second))
    return normalised(cost, mass(first) + mass(second))


def histogram_bounds(query: Signatures, others: Signatures) -> Floats:
    """Lower bounds for one graph against many.

    Args:
        query: signature, `(WIDTH,)`.
        others: signatures, `(n, WIDTH)`.

    Returns:
        `(n,)`, costs. No more nodes can stay as they are than there are labels in common, no more can keep their kind
        than there are kinds in common, and all others change their kind, are deleted or are inserted.
    """
    common = np.minimum(others[:, 2:], query[2:])
    same_kind = common[:, :KIND_BINS].sum(axis=1, dtype=np.int64)
    same_label = np.minimum(common[:, KIND_BINS:].sum(axis=1, dtype=np.int64), same_kind)
    n_nodes, n_edges = others[:, 0].astype(np.int64), others[:, 1].astype(np.int64)
    other_kind = np.minimum(n_nodes, int(query[0])) - same_kind
    bounds: Floats = (
        DETAIL_COST * (same_kind - same_label)
        + OTHER_KIND_COST * other_kind
        + NODE_COST * np.abs(n_nodes - int(query[0]))
        + EDGE_COST * np.abs(n_edges - int(query[1]))
    )
    return bounds


def label_bound(first: Graph, second: Graph) -> float:
    """The same for two graphs at hand, with edge labels and without bins: tighter."""
    same_label = _in_common(first.nodes, second.nodes)
    same_kind = _in_common([node.kind for node in first.nodes], [node.kind for node in second.nodes])
    same_edge = _in_common([edge[2] for edge in first.edges], [edge[2] for edge in second.edges])
    n_nodes = sorted((len(first.nodes), len(second.nodes)))
    return (
        DETAIL_COST * (same_kind - same_label)
        + OTHER_KIND_COST * (n_nodes[0] - same_kind)
        + NODE_COST * (n_nodes[1] - n_nodes[0])
        + EDGE_COST * (max(len(first.edges), len(second.edges)) - same_edge)
    )


def _in_common(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    return (Counter(first) & Counter(second)).total()


@dataclass(frozen=True, slots=True, kw_only=True)
class _LocalCosts:
    """What each node costs with half of each of its edges: paired with any other, deleted, inserted."""

    pair_NM: Floats
    delete_N: Floats
    insert_M: Floats


def hausdorff_bound(first: Graph, second: Graph) -> float:
    """Lower bound: every node goes to its cheapest partner, whoever else goes there."""
    costs = _local_costs(first, range(len(first.nodes)), second, range(len(second.nodes)))
    if 0 in costs.pair_NM.shape:
        return float(costs.delete_N.sum() + costs.insert_M.sum())
    rows = np.minimum(costs.pair_NM.min(axis=1) / 2, costs.delete_N)
    columns = np.minimum(costs.pair_NM.min(axis=0) / 2, costs.insert_M)
    return float(rows.sum() + columns.sum())


def assignment_bound(first: Graph, second: Graph) -> float:
    """Lower bound: the optimal assignment of nodes, each with half of its edges. Takes cubic time."""
    costs = _local_costs(first, range(len(first.nodes)), second, range(len(second.nodes)))
    rows, columns = _assign(costs)
    gain = costs.pair_NM[rows, columns] - costs.delete_N[rows] - costs.insert_M[columns]
    return float(costs.delete_N.sum() + costs.insert_M.sum() + np.minimum(gain, 0.0).sum())


def upper_bound(first: Graph, second: Graph) -> float:
    """What a good assignment of nodes costs; symmetric, and 0 for a graph and itself."""
    first, second = sorted((first, second), key=_sort_key)
    return assignment_cost(first, second, match_nodes(first, second))


def _sort_key(graph: Graph) -> tuple[object, ...]:
    return (
        len(graph.nodes),
        len(graph.edges),
        graph.nodes,
        graph.edges,
    )


def assignment_cost(first: Graph, second: Graph, partners: Sequence[int]) -> float:
    """What it costs to turn `first` into `second` if node i becomes `partners[i]`, -1 = is deleted."""
    pairs = [(first.nodes[i], second.nodes[j]) for i, j in enumerate(partners) if j >= 0]
    cost = sum(node_cost(a, b) for a, b in pairs)
    cost += NODE_COST * (len(first.nodes) + len(second.nodes) - 2 * len(pairs))
    wanted = {(a, b): label for a, b, label in second.edges}
    kept = 0
    for a, b, label in first.edges:
        image = partners[a], partners[b]
        if not first.directed:
            image = min(image), max(image)
        if image in wanted:
            kept += 1
            cost += 0.0 if wanted[image] == label else EDGE_COST
    return cost + EDGE_COST * (len(first.edges) + len(second.edges) - 2 * kept)


def match_nodes(first: Graph, second: Graph) -> list[int]:
    """For each node of `first` its partner in `second`, -1 = none.

    Repeated blocks are what models are made of: nodes with equal labels and equal neighbours are paired in their
    order, then nodes with equal labels; of the rest the optimal assignment decides, or, if there is too much of it,
    the order within each kind.
    """
    partners = [-1] * len(first.nodes)
    free = set(range(len(second.nodes)))
    labels = _numbers((first, second))
    label_N, label_M = ([labels[node] for node in graph.nodes] for graph in (first, second))
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
        _pair_in_order([node.kind for node in first.nodes], [node.kind for node in second.nodes], partners, free)
    return partners


def _numbers(graphs: Sequence[Graph]) -> dict[Node, int]:
    return {node: number for number, node in enumerate({node for graph in graphs for node in graph.nodes})}


def _contexts(graph: Graph, labels: Sequence[int]) -> list[Hashable]:
    """For each node its label, and the labels of its neighbours with how they are joined to it."""
    incoming: list[list[tuple[int, str]]] = [[] for _ in labels]
    outgoing: list[list[tuple[int, str]]] = [[] for _ in labels] if graph.directed else incoming
    for source, target, name in graph.edges:
        incoming[target].append((labels[source], name))
        outgoing[source].append((labels[target], name))
    return [
        (label, tuple(sorted(incoming[index])), tuple(sorted(outgoing[index]))) for index, label in enumerate(labels)
    ]


def _pair_in_order(first: Sequence[Hashable], second: Sequence[Hashable], partners: list[int], free: set[int]) -> None:
    """Pairs nodes of one class that have no partner yet, the k-th with the k-th; changes `partners` and `free`."""
    waiting: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index in sorted(free, reverse=True):
        waiting[second[index]].append(index)
    for index, name in enumerate(first):
        if partners[index] < 0 and waiting[name]:
            partners[index] = waiting[name].pop()
            free.remove(partners[index])


def _local_costs(first: Graph, left: Sequence[int], second: Graph, right: Sequence[int]) -> _LocalCosts:
    labels = sorted({edge[2] for graph in (first, second) for edge in graph.edges})
    ends_N, ends_M = _edge_ends(first, left, labels), _edge_ends(second, right, labels)
    some, others = [first.nodes[index] for index in left], [second.nodes[index] for index in right]
    kind = {name: number for number, name in enumerate({node.kind for node in (*some, *others)})}
    label = _numbers((first, second))
    kind_N, kind_M = (np.array([kind[node.kind] for node in side], dtype=np.int64) for side in (some, others))
    label_N, label_M = (np.array([label[node] for node in side], dtype=np.int64) for side in (some, others))
    size_N, size_M = (np.log2([1.0 + node.size for node in side]) for side in (some, others))
    pair_NM = np.minimum(SAME_KIND_LIMIT, DETAIL_COST + DOUBLING_COST * np.abs(size_N[:, None] - size_M))
    pair_NM = np.where(kind_N[:, None] == kind_M, pair_NM, OTHER_KIND_COST)
    pair_NM = np.where(label_N[:, None] == label_M, 0.0, pair_NM)
    for ends_of_N, ends_of_M in zip(ends_N, ends_M, strict=True):  # incoming, outgoing
        most = np.maximum(ends_of_N.sum(axis=1)[:, None], ends_of_M.sum(axis=1))
        alike = np.zeros_like(most)
        for column in range(len(labels)):
            alike += np.minimum(ends_of_N[:, column, None], ends_of_M[:, column])
        pair_NM += EDGE_COST / 2 * (most - alike)
    return _LocalCosts(
        pair_NM=pair_NM,
        delete_N=NODE_COST + EDGE_COST / 2 * sum(ends.sum(axis=1) for ends in ends_N),
        insert_M=NODE_COST + EDGE_COST / 2 * sum(ends.sum(axis=1) for ends in ends_M),
    )


def _edge_ends(graph: Graph, nodes: Sequence[int], labels: Sequence[str]) -> list[Floats]:
    """How many edges of each label begin, and end, at each of these nodes; `(n_nodes, n_labels)` each."""
    number = {label: index for index, label in enumerate(labels)}
    begin, end = (np.zeros((len(graph.nodes), len(labels))) for _ in range(2))
    columns = [number[label] for _, _, label in graph.edges]
    np.add.at(begin, ([source for source, _, _ in graph.edges], columns), 1)
    np.add.at(end, ([target for _, target, _ in graph.edges], columns), 1)
    picked = np.array(nodes, dtype=np.int64)
    return [begin[picked], end[picked]] if graph.directed else [(begin + end)[picked]]


def _assign(costs: _LocalCosts) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The pairs of the cheapest assignment; one that gains nothing stands for a deletion and an insertion."""
    from scipy.optimize import linear_sum_assignment

    gain_NM = np.minimum(costs.pair_NM - costs.delete_N[:, None] - costs.insert_M, 0.0)
    rows, columns = linear_sum_assignment(gain_NM)
    return rows, columns


_SAME, _CHANGED, _ALONE = "#2a9d8f", "#e9a23b", "#c0392b"

# More labels than this cannot be read.
_MAX_LABELLED = 60


def draw_match(first: Graph, second: Graph, path: Path, *, titles: tuple[str, str], caption: str) -> None:
    """Writes a picture; the file's suffix decides on its kind (.png, .svg, .pdf).

    Raises:
        RegistryError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as err:
        raise RegistryError("pictures need matplotlib: pip install 'sirtaki[plot]'") from err
    partners = match_nodes(first, second)
    back = {partner: index for index, partner in enumerate(partners) if partner >= 0}
    figure = Figure(figsize=(12, 14), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw(left, first, [_colour(node, second, partner) for node, partner in zip(first.nodes, partners, strict=True)])
    colours = [_colour(node, first, back.get(index, -1)) for index, node in enumerate(second.nodes)]
    _draw(right, second, colours)
    for axes, title in zip((left, right), titles, strict=True):
        axes.set_title(title)
        axes.axis("off")
    figure.suptitle(caption)
    for colour, meaning in ((_SAME, "the same in both"), (_CHANGED, "changed"), (_ALONE, "only here")):
        left.scatter([], [], c=colour, label=meaning)
    figure.legend(loc="outside lower center", ncols=3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as err:
        raise RegistryError(f"the picture {path} cannot be written: {err}") from err


def _colour(node: object, other: Graph, partner: int) -> str:
    if partner < 0:
        return _ALONE
    return _SAME if other.nodes[partner] == node else _CHANGED


def _draw(axes: Any, graph: Graph, colours: Sequence[str]) -> None:
    from matplotlib.collections import LineCollection

    places = _places(graph)
    axes.add_collection(
        LineCollection([(places[a], places[b]) for a, b, _ in graph.edges], colors="0.7", linewidths=0.8)
    )
    axes.scatter(
        [x for x, _ in places], [y for _, y in places], c=colours, s=max(4, 3000 / (len(places) + 30)), zorder=2
    )
    if len(places) <= _MAX_LABELLED:
        for node, place in zip(graph.nodes, places, strict=True):
            axes.annotate(f"{node!s:.40}", place, xytext=(6, 0), textcoords="offset points", fontsize=7, va="center")


def _places(graph: Graph) -> list[tuple[float, float]]:
    """From inputs above to outputs below, each node one step below the last that it needs; branches side by side."""
    before: list[list[tuple[int, str]]] = [[] for _ in graph.nodes]
    after: list[list[tuple[int, str]]] = [[] for _ in graph.nodes]
    for source, target, label in graph.edges:
        before[target].append((source, label))
        after[source].append((target, label))
    depth = [0] * len(graph.nodes)
    for index in topological_order(before, after) or range(len(graph.nodes)):
        depth[index] = max((depth[source] + 1 for source, _ in before[index]), default=0)
    taken: dict[int, int] = {}
    places = []
    for level in depth:
        places.append((float(taken.get(level, 0)), -float(level)))
        taken[level] = taken.get(level, 0) + 1
    return places
