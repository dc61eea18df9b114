"""What a store of remembered settings offers, whatever it keeps them in."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from sirtaki.errors import RegistryError

from .entry import Entry, EntryKey, RowsKey, RowWay
from .graph import Graph, Signatures
from .topology import ClusterShape


class CorruptStoreError(RegistryError):
    """The file at `path` is no registry, or a damaged one."""

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True, slots=True, kw_only=True)
class EntrySummary:
    """What a list shows of an entry, read without its graphs.

    Attributes:
        hosts: number and kinds of its hosts, as `ClusterShape.describe` gives them.
        fixed: knobs that the user had fixed.
        condition: see `EntryKey`.
    """

    id: str
    model: str
    topology: str
    world_size: int
    dtype: str
    device: str
    complete: bool
    created_s: float
    best_span_s: float
    default_span_s: float
    n_trials: int
    arm: str
    model_name: str
    hosts: str
    fixed: tuple[tuple[str, str], ...]
    condition: str


class Candidate(NamedTuple):
    """The little that is read of an entry while the nearest is looked for."""

    id: str
    model: str
    topology: str
    dtype: str
    complete: bool


class Store(Protocol):
    """Keeps one entry a key. Every method raises RegistryError if the store cannot be read or written."""

    def lookup(self, key: EntryKey) -> Entry | None:
        """The entry of exactly this key; None also where it is damaged."""
        ...

    def save(self, entry: Entry, *, disproved: Entry | None = None) -> bool:
        """Keeps the entry, unless the one there is better (`entry.supersedes`); False if so. Atomic.

        `disproved` is what this job has found there, run, and found wanting: it gives way, whatever it claims.
        """
        ...

    def save_all(self, new: Sequence[Entry], ways: Sequence[RowWay] = ()) -> int:
        """Saves all entries and ways of rows or, if anything goes wrong, none; how many were kept."""
        ...

    def summaries(self) -> list[EntrySummary]:
        """All entries, newest first."""
        ...

    def get(self, id_prefix: str) -> Entry:
        """The one entry whose id begins like this."""
        ...

    def find(self, id_prefix: str) -> Entry | RowWay:
        """The one entry or way of rows whose id begins like this."""
        ...

    def entries(self) -> Iterator[Entry]:
        """All entries in full, newest first."""
        ...

    def forget(self, id_prefix: str) -> str:
        """Removes the one entry or way of rows whose id begins like this; its id."""
        ...

    def prune(self, *, older_than_s: float | None = None, keep: int | None = None) -> int:
        """Removes what is older, and all but the `keep` newest entries and as many ways of rows; how many went."""
        ...

    def candidates(self, device: str, models: Sequence[str]) -> Sequence[Candidate]:
        """All entries of these models on this kind of device, in any order."""
        ...

    def signatures(self) -> tuple[Sequence[str], Signatures]:
        """Fingerprints and signatures, `(n_models, WIDTH)`, of all model graphs that entries use."""
        ...

    def models(self, fingerprints: Sequence[str]) -> Mapping[str, Graph]:
        """These model graphs; those that are not there or damaged are left out."""
        ...

    def shapes(self) -> Mapping[str, ClusterShape]:
        """Shapes of all clusters that entries use, by the topology's fingerprint."""
        ...

    def distances(self, fingerprint: str) -> Mapping[str, float]:
        """Distances from this graph that were computed before, by the other graph's fingerprint."""
        ...

    def save_distances(self, fingerprint: str, by_other: Mapping[str, float]) -> None:
        """Keeps computed distances; does nothing where the store is read-only."""
        ...

    def row_ways(self, key: RowsKey | None = None) -> list[RowWay]:
        """All ways of rows, or some of this key, the newest first; those that are damaged are left out."""
        ...

    def save_row_way(self, way: RowWay) -> bool:
        """Keeps a way of rows, unless the one of the same id is as new; False if so. Atomic."""
        ...

    def close(self) -> None:
        """Lets go of all connections. Idempotent."""
        ...
