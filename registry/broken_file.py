"""Puts a damaged registry file out of the way without losing it, also when many jobs find it damaged at once."""

import fcntl
import os
from itertools import count
from pathlib import Path

from sirtaki.errors import RegistryError

from .sqlite_file import is_damaged


def set_aside(path: Path) -> Path:
    """Renames the file, and what SQLite keeps beside it, to `<name>.broken-<n>`; the new path.

    Under a lock, and only if it is still damaged: the first job to come replaces the file, and the others must not
    put the new one aside.

    Raises:
        RegistryError: it cannot be renamed.
    """
    try:
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            aside = next(new for n in count(1) if not (new := Path(f"{path}.broken-{n}")).exists())
            if is_damaged(path):
                for suffix in ("", "-wal", "-shm"):
                    if os.path.exists(f"{path}{suffix}"):
                        os.rename(f"{path}{suffix}", f"{aside}{suffix}")
            return aside
    except OSError as err:
        raise RegistryError(f"the damaged registry {path} cannot be put aside: {err}; move it away by hand") from err
