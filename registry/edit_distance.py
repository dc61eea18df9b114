"""Graph edit distance from both sides: bounds that cost milliseconds where the exact distance costs hours.

The distance is the least cost of turning one graph into the other by deleting, inserting and relabelling nodes and
edges. Below it lie, from cheap to tight, the label histograms, the Hausdorff edit distance (Fischer and others, 2015)
and the optimal assignment of nodes with half of their edges each (Blumenthal and others, "BRANCH"). Above it lies what
any assignment of nodes really costs (Riesen and Bunke, 2009): one is built from nodes that look alike with all of
their neighbours, and the optimal assignment settles what is left.

Pure arithmetic on graphs, tested against networkx's exact routine.

Suffixes: N nodes of the first graph, M of the second.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .graph import Graph, Node
from .signature import KIND_BINS, Signatures

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
