"""How a store is opened, and one that never ends a job."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sirtaki.errors import CorruptStoreError, RegistryError

from .entry import Entry, EntryKey

if TYPE_CHECKING:
    from .store import Store  # with SQLAlchemy, which takes a quarter of a second


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
    from .store import Store

    return Store(url_or_path or str(default_path()), read_only=read_only)


def is_yet_to_be_made(url_or_path: str | None) -> bool:
    """Whether the registry is a file that does not exist, in a place where it can be made."""
    path = str(default_path()) if url_or_path is None else os.path.abspath(url_or_path)
    if (url_or_path is not None and "://" in url_or_path) or os.path.exists(path):
        return False
    around = next(str(folder) for folder in Path(path).parents if os.path.exists(folder))
    return os.path.isdir(around) and os.access(around, os.W_OK | os.X_OK)


def load_ahead(url_or_path: str | None = None) -> None:
    """Has a thread import what a look-up takes, networkx and SQLAlchemy: that is 0.2 s of processor time.

    Nothing is imported where the registry is yet to be made. The process forks only after that: in a child, modules
    that are being imported would stay locked for ever.
    """
    global _loading
    if _loading is None and not is_yet_to_be_made(url_or_path):
        _loading = threading.Thread(target=_load, name="sirtaki-registry")
        _loading.start()
        os.register_at_fork(before=_loading.join)


_loading: threading.Thread | None = None


def _load() -> None:
    with contextlib.suppress(Exception):  # whoever needs it imports it, and says what is wrong
        import networkx  # noqa: F401
        import sqlalchemy.dialects.sqlite  # noqa: F401

        from . import store  # noqa: F401


logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class SafeStore:
    """A store that never stops a job: whatever goes wrong is one warning, after which it behaves as if empty.

    A damaged file is put aside (`registry.db.broken-1`), never deleted, also if the damage is met later; a shared
    registry that cannot be reached is replaced by the local one. It is opened when it is first needed.

    Attributes:
        warned: it has given that warning, or was told that another one has.
    """

    def __init__(self, url_or_path: str | None = None, *, warned: bool = False) -> None:
        self.warned = warned
        self._store: Store | None = None
        self._to_open = True
        self._url_or_path = url_or_path

    def lookup(self, key: EntryKey) -> Entry | None:
        """The entry of exactly this key; None also when something is wrong."""
        return self.read(lambda store: store.lookup(key), None)

    def save(self, entry: Entry, *, disproved: Entry | None = None) -> bool:
        """Keeps the entry; False if it was not kept."""
        return self.attempt(lambda store: store.save(entry, disproved=disproved), False)

    def read(self, action: Callable[[Store], _T], otherwise: _T) -> _T:
        """What `action`, which only reads, gives; `otherwise` if it cannot be had, or if there is no registry yet."""
        if self._to_open and is_yet_to_be_made(self._url_or_path):
            return otherwise
        return self.attempt(action, otherwise)

    def attempt(self, action: Callable[[Store], _T], otherwise: _T) -> _T:
        """What `action` gives, or `otherwise` if it cannot be had."""
        try:
            if self._to_open:
                self._to_open = False
                self._store = self._open()
            if self._store is None:
                return otherwise
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
        if self._store is not None:
            self.attempt(lambda store: store.close(), None)
        self._store, self._to_open = None, False

    def _warn(self, err: Exception) -> None:
        level = logging.DEBUG if self.warned else logging.WARNING
        self.warned = True
        logger.log(level, "training goes on without the registry: %s", err)

    def _replaced(self, err: CorruptStoreError) -> Store:
        from .store import set_aside

        assert err.path is not None
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
