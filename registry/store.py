"""The store as everyone else sees it, how it is opened, and a wrapper that never stops a job.

A module of its own because it loads nothing heavy: SQLAlchemy is imported when a store is opened, not before.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from sirtaki.errors import RegistryError

from .entry import Entry, EntryKey
from .graph import Graph
from .signature import Signatures
from .topology import ClusterShape

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


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

    def save_all(self, new: Sequence[Entry]) -> int:
        """Saves all or, if anything goes wrong, none; how many were kept."""
        ...

    def summaries(self) -> list[EntrySummary]:
        """All entries, newest first."""
        ...

    def get(self, id_prefix: str) -> Entry:
        """The one entry whose id begins like this."""
        ...

    def entries(self) -> Iterator[Entry]:
        """All entries in full, newest first."""
        ...

    def forget(self, id_prefix: str) -> str:
        """Removes the one entry whose id begins like this; its id."""
        ...

    def prune(self, *, older_than_s: float | None = None, keep: int | None = None) -> int:
        """Removes entries of more than this age, and all but the `keep` newest; how many went."""
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

    def close(self) -> None:
        """Lets go of all connections. Idempotent."""
        ...


def default_path() -> Path:
    """`registry.db` in the user's cache directory (`XDG_CACHE_HOME`, else `~/.cache`)."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"  # the XDG specification wants it absolute
    return base / "sirtaki" / "registry.db"


def open_store(url_or_path: str | None = None, *, read_only: bool = False) -> Store:
    """Opens the registry, and creates it where it does not exist.

    Args:
        url_or_path: a file, or any SQLAlchemy URL such as `postgresql+psycopg://user@host/db`; None = `default_path()`.
        read_only: never write; otherwise a file that cannot be written is opened for reading.

    Raises:
        RegistryError: it cannot be opened; the message says what to do.
    """
    from .sql_store import SqlStore

    return SqlStore(url_or_path or str(default_path()), read_only=read_only)


class SafeStore:
    """A store that never stops a job: whatever goes wrong is one warning, after which it behaves as if empty.

    A damaged file is put aside (`registry.db.broken-1`), never deleted, also if the damage is met later; a shared
    registry that cannot be reached is replaced by the local one.

    Attributes:
        warned: it has given that warning, or was told on opening that another one has.
    """

    def __init__(self, url_or_path: str | None = None, *, warned: bool = False) -> None:
        self.warned = warned
        self._store: Store | None = None
        self._url_or_path = url_or_path
        try:
            self._store = self._open()
        except Exception as err:
            self._warn(err)

    @property
    def is_open(self) -> bool:
        """Whether there is a store behind it."""
        return self._store is not None

    def lookup(self, key: EntryKey) -> Entry | None:
        """The entry of exactly this key; None also when something is wrong."""
        return self.attempt(lambda store: store.lookup(key), None)

    def save(self, entry: Entry, *, disproved: Entry | None = None) -> bool:
        """Keeps the entry; False if it was not kept. See `Store.save`."""
        return self.attempt(lambda store: store.save(entry, disproved=disproved), False)

    def attempt(self, action: Callable[[Store], _T], otherwise: _T) -> _T:
        """What `action` gives, or `otherwise` if it cannot be had."""
        if self._store is None:
            return otherwise
        try:
            try:
                return action(self._store)
            except CorruptStoreError as err:
                self._store.close()
                self._store = None
                self._store = self._replaced(err)
                return action(self._store)
        except Exception as err:
            self._warn(err)
            return otherwise

    def close(self) -> None:
        """Lets go of all connections. Idempotent."""
        self.attempt(lambda store: store.close(), None)
        self._store = None

    def _warn(self, err: Exception) -> None:
        level = logging.DEBUG if self.warned else logging.WARNING
        self.warned = True
        logger.log(level, "training goes on without the registry: %s", err)

    def _replaced(self, err: CorruptStoreError) -> Store:
        from .broken_file import set_aside

        self.warned = True
        logger.warning("%s; it is kept as %s and a new registry begins", err, set_aside(err.path))
        return open_store(str(err.path))

    def _open(self) -> Store:
        try:
            return open_store(self._url_or_path)
        except CorruptStoreError as err:
            return self._replaced(err)
        except RegistryError as err:
            if self._url_or_path is None or "://" not in self._url_or_path:
                raise
            level = logging.DEBUG if self.warned else logging.WARNING
            self.warned = True
            logger.log(
                level,
                "%s; the local registry %s is used for this job (`sirtaki registry export` and `import` carry its "
                "entries over)",
                err,
                default_path(),
            )
            return open_store(None)
