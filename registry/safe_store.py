"""A store for jobs, which nothing that goes wrong with it may stop."""

import logging
from collections.abc import Callable
from typing import TypeVar

from sirtaki.errors import RegistryError

from .entry import Entry, EntryKey
from .opening import default_path, open_store
from .store import CorruptStoreError, Store

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


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
        from .broken_file import set_aside  # with SQLAlchemy

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
