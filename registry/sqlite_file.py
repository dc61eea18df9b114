"""Opens a SQLite file so that many jobs can write it at once and none can leave it half-written.

How to lock, journal and fall back to reading is decided here; the store above knows only SQL.
"""

import os
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, NullPool, create_engine, event

# Write transactions take milliseconds; with dozens of jobs starting together the last may wait for seconds.
_BUSY_TIMEOUT_S = 15.0

_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "fuse", "9p", "glusterfs")


def sqlite_engine(path: Path, *, read_only: bool) -> Engine:
    """An engine without a pool (safe across fork, nothing stays open) on a file, created unless `read_only`."""
    journal = "DELETE" if _is_on_network(path) else "WAL"

    def connect() -> sqlite3.Connection:
        connection = _open(path, read_only=read_only)
        connection.isolation_level = None  # transactions begin where we say, below
        connection.execute("PRAGMA foreign_keys = ON")
        if not read_only:
            if connection.execute("PRAGMA journal_mode").fetchone()[0].upper() != journal:
                connection.execute(f"PRAGMA journal_mode = {journal}")
            # A killed process loses nothing; WAL needs no more, the rollback journal does.
            connection.execute(f"PRAGMA synchronous = {'NORMAL' if journal == 'WAL' else 'FULL'}")
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A transaction that reads first and writes later could fail on the way up: take the write lock at once.
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def is_damaged(path: Path) -> bool:
    """Whether the file is no SQLite database, or one with damage anywhere; reads all of it."""
    if not path.exists():
        return False
    try:
        connection = _connect(path, "mode=rw")
        try:
            return bool(connection.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok")
        finally:
            connection.close()
    except sqlite3.DatabaseError as err:
        return type(err) is sqlite3.DatabaseError  # its subclasses are other things: locks, permissions


def _open(path: Path, *, read_only: bool) -> sqlite3.Connection:
    if not read_only:
        return _connect(path, "mode=rwc")
    try:
        connection = _connect(path, "mode=ro")
        connection.execute("SELECT count(*) FROM sqlite_schema")
        return connection
    except sqlite3.OperationalError:
        # WAL wants to write an index file beside the database even for reading; `immutable` does without.
        return _connect(path, "mode=ro&immutable=1")


def _connect(path: Path, options: str) -> sqlite3.Connection:
    uri = f"file:{quote(str(path.absolute()))}?{options}"
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S, check_same_thread=False)


def _is_on_network(path: Path) -> bool:
    """Whether hosts may share the file: WAL needs memory shared by all who use it, so it works on one host only."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False  # no Linux: take it for a local disk, as most home directories are
    folder = os.path.realpath(path.parent)
    best: Any = max(
        (mount for mount in mounts if folder == mount[0] or folder.startswith(mount[0].rstrip("/") + "/")),
        key=lambda mount: len(mount[0]),
        default=("/", ""),
    )
    return str(best[1]).startswith(_NETWORK_FILE_SYSTEMS)
