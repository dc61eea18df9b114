"""Where the registry lies, and how it is opened. SQLAlchemy is imported when that happens, not before."""

import os
from pathlib import Path

from .store import Store


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
