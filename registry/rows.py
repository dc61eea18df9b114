"""Rows of the registry's database, and reading one entry without SQLAlchemy, whose import takes a quarter of a second.

All ranks of a job wait while rank 0 looks up the entry of the job, so this look-up uses the module sqlite3 alone. All
other access is in `store`.
"""

from __future__ import annotations

import sqlite3
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from sirtaki.errors import RegistryError, require
from sirtaki.fields import parsed

from .graph import canonical_json
from .schema import EntryKey, JobRecord, StoredSetting

R = TypeVar("R", bound=StoredSetting)

VERSION = 4
"""Version of the database's schema. `store.SCHEMAS` has the tables that each version added."""

# Upper bound of the JSON size of the largest permitted graph. A larger body is an attempt to exhaust memory.
_MAX_GRAPH_BYTES = 1 << 27

# Seconds to wait for SQLite's write lock. A write takes milliseconds, but if dozens of jobs start together, the last
# one may wait for seconds.
_BUSY_TIMEOUT_S = 15.0

# The same for `read_entry`, whose caller opens the store if the file is locked.
_BUSY_READER_TIMEOUT_S = 1.0

_ENTRY = (
    "SELECT entries.id, entries.body, models.body, topologies.body FROM entries "
    "JOIN models ON models.fingerprint = entries.model JOIN topologies ON topologies.fingerprint = entries.topology "
    "WHERE entries.id = ?"
)


def read_entry(path: Path, key: EntryKey) -> JobRecord | None:
    """Return the entry with this key from the registry in a file. None if there is no such entry.

    Raises:
        sqlite3.Error: the file cannot be read, is locked or damaged, or is not a registry.
        RegistryError: the entry is damaged, or another release of Sirtaki has written the registry.
    """
    with closing(connect_file(path, "mode=rw", _BUSY_READER_TIMEOUT_S)) as connection:
        (version,) = connection.execute("SELECT version FROM sirtaki_schema").fetchone() or (0,)
        require(version in range(1, VERSION + 1), "version", f"1 to {VERSION}", version, RegistryError)
        row = connection.execute(_ENTRY, (key.digest(),)).fetchone()
    return None if row is None else record_of(JobRecord, *row)


def record_of(kind: type[R], name: str, body: str, *graphs: bytes) -> R:
    """Build the record of a row.

    Args:
        kind: type of the record.
        name: id of the record.
        body: JSON of the record.
        graphs: for a record of a job, the compressed model graph and topology.

    Raises:
        RegistryError: the record is damaged.
    """
    data = parsed(dict[str, Any], body)
    data |= {
        field: parsed(dict, expanded(graph), at=field)
        for field, graph in zip(("model", "topology"), graphs, strict=False)
    }
    record = kind.from_json(data)
    require(record.id == name, "id", f"{record.id}, the hash of the field key", name, RegistryError)
    return record


def compressed(data: object) -> bytes:
    """Return the JSON of a value, compressed."""
    return zlib.compress(canonical_json(data).encode())


def expanded(body: bytes) -> bytes:
    """Decompress the output of `compressed`. Raises RegistryError if it is damaged or exceeds the size limit."""
    try:
        inflate = zlib.decompressobj()
        text = inflate.decompress(body, _MAX_GRAPH_BYTES)
    except (zlib.error, TypeError) as err:
        raise RegistryError(
            f"a stored tuning result is damaged: its model graph or cluster topology cannot be decompressed ({err})"
        ) from err
    rule = f"at most {_MAX_GRAPH_BYTES} bytes"
    require(not inflate.unconsumed_tail, "model graph or topology", rule, "more", RegistryError)
    return text


def connect_file(path: Path, options: str, timeout_s: float | None = None) -> sqlite3.Connection:
    """Open a SQLite file with the options of SQLite's URIs. If it is locked, wait `timeout_s` (default 15 s)."""
    uri = f"file:{quote(str(path.absolute()))}?{options}"
    wait_s = _BUSY_TIMEOUT_S if timeout_s is None else timeout_s
    return sqlite3.connect(uri, uri=True, timeout=wait_s, check_same_thread=False)
