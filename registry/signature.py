"""Label histograms of fixed width: a lower bound on edit distance for thousands of graphs in one sweep.

Signatures are made when a graph is stored and compared long after, without the graph. Labels are hashed into bins. Two
labels in one bin can only make two graphs look more alike, so the bound still holds.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .digest import digest
from .graph import Graph

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
