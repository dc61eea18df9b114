"""Locate and open the registry. Imports SQLAlchemy only when a store is opened."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .store import Store  # For type checking only: it imports SQLAlchemy, which takes 0.25 s.


def default_path() -> Path:
    """Return `registry.db` in the user's cache directory (`XDG_CACHE_HOME`, or `~/.cache` if it is not set)."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # Ignore a relative path, because XDG requires an absolute one.
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return base / "sirtaki" / "registry.db"


def open_store(url_or_path: str | None = None, *, read_only: bool = False) -> Store:
    """Open the registry, and create it if it does not exist.

    Args:
        url_or_path: path of a file, or SQLAlchemy URL such as `postgresql+psycopg://user@host/db`; None =
            `default_path()`.
        read_only: True to never write to the registry. A file without write permission is opened read-only in any case.

    Raises:
        RegistryError: the registry cannot be opened. The message names a remedy.
    """
    if _loading is not None:
        # Wait for the imports of `load_ahead`: two threads that import modules with circular imports may see incomplete
        # modules.
        _loading.join()
    from .store import Store

    return Store(url_or_path or str(default_path()), read_only=read_only)


def is_yet_to_be_made(url_or_path: str | None) -> bool:
    """Return whether the registry is a file that does not exist yet but can be created."""
    path = str(default_path()) if url_or_path is None else os.path.abspath(url_or_path)
    if (url_or_path is not None and "://" in url_or_path) or os.path.exists(path):
        return False
    around = next(str(folder) for folder in Path(path).parents if os.path.exists(folder))
    return os.path.isdir(around) and os.access(around, os.W_OK | os.X_OK)


def load_ahead(url_or_path: str | None = None) -> None:
    """Import the modules for a search in the registry (SQLAlchemy) in a background thread.

    The imports take 0.2 s of processor time. Does nothing if the registry does not exist yet. `os.fork` waits for the
    thread, because a module whose import is in progress would stay locked forever in the child.
    """
    global _loading
    if _loading is None and not is_yet_to_be_made(url_or_path):
        thread = threading.Thread(target=_load, name="sirtaki-registry")
        thread.start()
        _loading = thread
        os.register_at_fork(before=thread.join)


_loading: threading.Thread | None = None


def _load() -> None:
    # Suppress errors: the import at the look-up raises them again.
    with contextlib.suppress(Exception):
        import sqlalchemy.dialects.sqlite  # noqa: F401

        from . import store  # noqa: F401
