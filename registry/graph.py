"""A labelled graph as plain data: what models and clusters have in common when they are compared.

It needs neither torch nor networkx.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sirtaki.errors import RegistryError

from .digest import digest

if TYPE_CHECKING:
    import networkx

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
    def from_json(cls, data: object) -> "Graph":
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

    def to_networkx(self) -> "networkx.Graph[int]":
        """A networkx `DiGraph` or `Graph`; nodes bear kind, detail and size, edges their label."""
        import networkx

        graph = networkx.DiGraph() if self.directed else networkx.Graph()
        for index, node in enumerate(self.nodes):
            graph.add_node(index, kind=node.kind, detail=node.detail, size=node.size)
        for source, target, label in self.edges:
            graph.add_edge(source, target, label=label)
        return graph

    @classmethod
    def from_networkx(cls, graph: "networkx.Graph[Any]") -> "Graph":
        """The graph that `to_networkx` made; nodes are numbered in its order."""
        number = {name: index for index, name in enumerate(graph.nodes)}
        return cls(
            nodes=tuple(
                Node(kind=data["kind"], detail=data.get("detail", ""), size=data.get("size", 0))
                for _, data in graph.nodes(data=True)
            ),
            edges=tuple((number[a], number[b], data.get("label", "")) for a, b, data in graph.edges(data=True)),
            directed=graph.is_directed(),
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
