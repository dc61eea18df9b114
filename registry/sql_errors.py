"""Errors of databases, in words that say what to do."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.exc import DatabaseError, OperationalError, SQLAlchemyError

from sirtaki.errors import RegistryError

from .store import CorruptStoreError


@contextmanager
def translated(name: str, path: Path | None) -> Iterator[None]:
    """Turns every error of the database `name` and below into a RegistryError; `path` is its file, if it has one."""
    try:
        yield
    except ImportError as err:
        raise RegistryError(f"{name} needs a driver that is not installed: {err}") from err
    except OperationalError as err:
        if "locked" in str(err.orig):
            advice = "another process holds it; if none is running, look for one that hangs"
        else:
            advice = "check that it exists and may be read and written, or name another one in SIRTAKI_REGISTRY"
        raise RegistryError(f"the registry {name} cannot be used ({_one_line(err.orig)}): {advice}") from err
    except DatabaseError as err:
        if path is not None and type(err.orig) is sqlite3.DatabaseError:  # its subclasses are other things
            raise CorruptStoreError(f"{name} is not a registry or is damaged ({err.orig})", path) from err
        raise RegistryError(f"the registry {name} refused a statement ({_one_line(err.orig)})") from err
    except (SQLAlchemyError, OSError) as err:
        raise RegistryError(
            f"the registry {name} cannot be used ({err}): name another one in SIRTAKI_REGISTRY"
        ) from err


def _one_line(err: object) -> str:
    return " ".join(str(err).split())
