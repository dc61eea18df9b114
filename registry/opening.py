"""Location and opening of the registry. Imports SQLAlchemy only when a store is opened."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .store import Store  # with SQLAlchemy, which takes a quarter of a second


def default_path() -> Path:
    """`registry.db` in the user's cache directory (`XDG_CACHE_HOME`, else `~/.cache`)."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"  # the XDG specification wants it absolute
    return base / "sirtaki" / "registry.db"


def open_store(url_or_path: str | None = None, *, read_only: bool = False) -> Store:
    """Open the registry, and create it if it does not exist.

    Args:
        url_or_path: a file, or any SQLAlchemy URL such as `postgresql+psycopg://user@host/db`; None = `default_path()`.
        read_only: never write; otherwise a file that cannot be written is opened for reading.

    Raises:
        RegistryError: it cannot be opened; the message says what to do.
    """
    from .store import Store

    return Store(url_or_path or str(default_path()), read_only=read_only)


def is_yet_to_be_made(url_or_path: str | None) -> bool:
    """Return whether the registry is a file that does not exist, in a place where it can be made."""
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
