"""Entries in SQLite or another database of SQLAlchemy's."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import (
    URL,
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    NullPool,
    String,
    Table,
    Text,
    create_engine,
    delete,
    event,
    func,
    insert,
    inspect,
    make_url,
    select,
    update,
)
from sqlalchemy.exc import DatabaseError, IntegrityError, OperationalError, SQLAlchemyError

from sirtaki.errors import RegistryError

from .entry import Entry, EntryKey, RowsKey, RowWay, body_from_json, supersedes, way_from_json
from .graph import SIGNATURE_VERSION, Graph, Signatures, canonical_json, from_bytes, is_signature, signature, to_bytes
from .store import Candidate, CorruptStoreError, EntrySummary
from .topology import ClusterShape, Topology

metadata = MetaData()

versions = Table("sirtaki_schema", metadata, Column("version", Integer, nullable=False))

# Graphs are kept once for all entries that share them, compressed.
models = Table(
    "models",
    metadata,
    Column("fingerprint", String(64), primary_key=True),
    Column("body", LargeBinary, nullable=False),
)

# Apart from the graphs, since all of them are read at every lookup of similar entries.
signatures = Table(
    "signatures",
    metadata,
    Column("fingerprint", ForeignKey(models.c.fingerprint, ondelete="CASCADE"), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("body", LargeBinary, nullable=False),
)

topologies = Table(
    "topologies",
    metadata,
    Column("fingerprint", String(64), primary_key=True),
    Column("shape", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
)

entries = Table(
    "entries",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("model", ForeignKey(models.c.fingerprint), nullable=False),
    Column("topology", ForeignKey(topologies.c.fingerprint), nullable=False),
    Column("world_size", Integer, nullable=False),
    Column("dtype", Text, nullable=False),
    Column("device", Text, nullable=False),
    Column("complete", Boolean, nullable=False),
    Column("created_s", Float(53), nullable=False),
    Column("best_span_s", Float(53), nullable=False),
    Column("default_span_s", Float(53), nullable=False),
    Column("n_trials", Integer, nullable=False),
    Column("arm", Text, nullable=False),
    Column("model_name", Text, nullable=False),
    Column("body", Text, nullable=False),
    Index("entries_by_time", "created_s"),
    Index("entries_by_model", "model"),
    Index("entries_by_topology", "topology"),
)

distances = Table(
    "distances",
    metadata,
    Column("low", String(64), primary_key=True),  # the lesser of the two fingerprints
    Column("high", String(64), primary_key=True),
    Column("distance", Float(53), nullable=False),
)

row_ways = Table(
    "row_ways",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("kind", String(64), nullable=False),  # digest of the key
    Column("created_s", Float(53), nullable=False),
    Column("body", Text, nullable=False),
    Index("row_ways_by_kind", "kind"),
)


def _create_entries(connection: Connection) -> None:
    metadata.create_all(connection, tables=[versions, models, signatures, topologies, entries])
    connection.execute(insert(versions).values(version=0))


def _add_distances(connection: Connection) -> None:
    metadata.create_all(connection, tables=[distances])


def _add_row_ways(connection: Connection) -> None:
    metadata.create_all(connection, tables=[row_ways])


MIGRATIONS: Sequence[Callable[[Connection], None]] = (_create_entries, _add_distances, _add_row_ways)
WITH_ROW_WAYS = 3
"""The first schema that has the table; older ones that may not be written stay as they are."""

_LOCK = 0x51A7A1  # any number, the same in every process


def version_of(connection: Connection) -> int:
    """The schema's version; 0 where there is none yet."""
    if not inspect(connection).has_table(versions.name):
        return 0
    return int(connection.execute(select(versions.c.version)).scalar_one())


def migrate(connection: Connection) -> None:
    """Brings the schema up to date inside the caller's transaction.

    Raises:
        RegistryError: it was written by a newer release.
    """
    if connection.dialect.name == "postgresql":  # SQLite's write transactions exclude each other anyway
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))
    version = version_of(connection)
    check_version(version)
    if version < len(MIGRATIONS):
        for migration in MIGRATIONS[version:]:
            migration(connection)
        connection.execute(update(versions).values(version=len(MIGRATIONS)))


def check_version(version: int) -> None:
    """Refuses schemas of the future.

    Raises:
        RegistryError: it was written by a newer release.
    """
    if version > len(MIGRATIONS):
        raise RegistryError(
            f"the registry has schema {version}, this release knows up to {len(MIGRATIONS)}: "
            "upgrade Sirtaki, or name another registry in SIRTAKI_REGISTRY"
        )


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


logger = logging.getLogger(__name__)

# A graph of stated maximum size has less than this many bytes as JSON; more is an attempt to fill our memory.
_MAX_GRAPH_BYTES = 1 << 27


def save_row(connection: Connection, entry: Entry, disproved: Entry | None) -> bool:
    """Keeps an entry unless the one there is better; False if so. See `Store.save`."""
    mine = entries.c.id == entry.id
    is_there = connection.execute(select(entries.c.id).where(mine).with_for_update()).first() is not None
    damaged = False
    if is_there:
        try:
            old = next(load(connection, [entry.id]), None)
        except RegistryError as err:
            logger.warning("entry %s cannot be read and is replaced: %s", entry.id, err)
            old, damaged = None, True
        if old is not None and old != disproved and not supersedes(entry, old):
            return False
    _put(connection, models, entry.key.model, damaged, body=compressed(entry.model.to_json()))
    _put(
        connection,
        signatures,
        entry.key.model,
        damaged,
        version=SIGNATURE_VERSION,
        body=to_bytes(signature(entry.model)),
    )
    cluster = {"shape": canonical_json(entry.topology.shape().to_json()), "body": compressed(entry.topology.to_json())}
    _put(connection, topologies, entry.key.topology, damaged, **cluster)
    row = {
        **{name: getattr(entry.key, name) for name in ("model", "topology", "world_size", "dtype", "device")},
        **{
            name: getattr(entry, name)
            for name in ("id", "complete", "best_span_s", "default_span_s", "n_trials", "arm")
        },
        "created_s": entry.provenance.created_s,
        "model_name": entry.provenance.model_name,
        "body": canonical_json(entry.body_to_json()),
    }
    connection.execute(update(entries).where(mine).values(row) if is_there else insert(entries).values(row))
    return True


def _put(connection: Connection, table: Table, fingerprint: str, overwrites: bool, **values: object) -> None:
    """What is kept of a graph, if it is not there already or may be damaged."""
    mine = table.c.fingerprint == fingerprint
    if connection.execute(select(table.c.fingerprint).where(mine)).first() is None:
        connection.execute(insert(table).values(fingerprint=fingerprint, **values))
    elif overwrites:
        connection.execute(update(table).where(mine).values(**values))


def load(connection: Connection, ids: Sequence[str]) -> Iterator[Entry]:
    """The entries of these ids with their graphs."""
    rows = connection.execute(
        select(entries.c.id, entries.c.body, models.c.body, topologies.c.body)
        .join(models, models.c.fingerprint == entries.c.model)
        .join(topologies, topologies.c.fingerprint == entries.c.topology)
        .where(entries.c.id.in_(ids))
    )
    for name, body, model, topology in rows:
        entry = body_from_json(
            parsed(body),
            model=Graph.from_json(expanded(model)),
            topology=Topology.from_json(expanded(topology)),
        )
        if entry.id != name:
            raise RegistryError("a stored entry is damaged: it is of another job")
        yield entry


def load_one(connection: Connection, name: str) -> Entry:
    """The entry of this id.

    Raises:
        RegistryError: it is damaged.
    """
    entry = next(load(connection, [name]), None)
    if entry is None:
        raise RegistryError(f"entry {name} has lost its model or its cluster: forget it")
    return entry


def find(connection: Connection, id_prefix: str, *, tables: Sequence[Table] = (entries,)) -> tuple[Table, str]:
    """The one id that begins like this, and in which of the tables it is."""
    found = [
        (table, str(name))
        for table in tables
        for name in connection.execute(
            select(table.c.id).where(table.c.id.startswith(id_prefix, autoescape=True)).limit(3)
        ).scalars()
    ]
    if len(found) != 1 or not id_prefix:
        kind, lists = ("entry", "`sirtaki registry list`")
        if len(tables) > 1:
            kind, lists = "entry or way of rows", f"{lists} and `sirtaki registry rows`"
        what = "several ids begin" if found else f"no {kind} has an id that begins"
        raise RegistryError(f"{what} with {id_prefix!r}: see {lists}")
    return found[0]


def delete_old(connection: Connection, table: Table, *, older_than_s: float | None, keep: int | None) -> int:
    """Rows of more than this age, and all but the `keep` newest; how many went."""
    gone = 0
    if older_than_s is not None:
        gone += connection.execute(delete(table).where(table.c.created_s < time.time() - older_than_s)).rowcount
    if keep is not None:
        newest = select(table.c.id).order_by(table.c.created_s.desc(), table.c.id)
        surplus = list(connection.execute(newest.offset(keep).limit(2**31)).scalars())
        for start in range(0, len(surplus), 500):
            gone += connection.execute(delete(table).where(table.c.id.in_(surplus[start : start + 500]))).rowcount
    return gone


def delete_orphans(connection: Connection) -> None:
    """Graphs that no entry uses, and distances of graphs that are gone."""
    used = select(entries.c.model).where(entries.c.model == models.c.fingerprint)
    connection.execute(delete(models).where(~used.exists()))
    used = select(entries.c.topology).where(entries.c.topology == topologies.c.fingerprint)
    connection.execute(delete(topologies).where(~used.exists()))
    for column in (distances.c.low, distances.c.high):
        connection.execute(delete(distances).where(column.not_in(select(models.c.fingerprint))))


def compressed(data: object) -> bytes:
    """A graph as it is kept."""
    return zlib.compress(canonical_json(data).encode())


def expanded(body: bytes) -> Any:  # Any: JSON
    """What `compressed` made smaller.

    Raises:
        RegistryError: it is damaged, or far too large.
    """
    try:
        inflate = zlib.decompressobj()
        text = inflate.decompress(body, _MAX_GRAPH_BYTES)
        if inflate.unconsumed_tail:
            raise RegistryError(f"a stored graph has more than {_MAX_GRAPH_BYTES} bytes")
    except (zlib.error, TypeError) as err:
        raise RegistryError(f"a stored graph is damaged: {err}") from err
    return parsed(text)


def parsed(text: str | bytes) -> Any:  # Any: JSON
    """What is in a stored text.

    Raises:
        RegistryError: it is damaged.
    """
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as err:
        raise RegistryError(f"a stored entry is damaged: {err!r:.200}") from err


MOST_WAYS = 1000
"""So many of one key are looked at, the newest of them."""


def load_ways(connection: Connection, key: RowsKey | None) -> list[RowWay]:
    """Those of a key, or all, the newest first; what is damaged is left out."""
    newest = select(row_ways.c.id, row_ways.c.body).order_by(row_ways.c.created_s.desc(), row_ways.c.id)
    if key is not None:
        newest = newest.where(row_ways.c.kind == key.digest()).limit(MOST_WAYS)
    found = []
    for name, body in connection.execute(newest):
        try:
            found.append(_read(name, body))
        except RegistryError as err:
            level = logging.WARNING if key is None else logging.INFO
            logger.log(level, "way of rows %s in the registry is left out: %s", name, err)
    return found


def load_way(connection: Connection, name: str) -> RowWay:
    """The one of this id, which is there.

    Raises:
        RegistryError: it is damaged.
    """
    try:
        return _read(name, connection.execute(select(row_ways.c.body).where(row_ways.c.id == name)).scalar_one())
    except RegistryError as err:
        raise RegistryError(f"way of rows {name} is damaged ({err}): forget it") from err


def save_way(connection: Connection, way: RowWay) -> bool:
    """Keeps a way of rows unless the one of the same id is as new; False if so.

    Raises:
        RegistryError: it could not be read again.
    """
    body = canonical_json(way.to_json())
    _read(way.id, body)
    mine = row_ways.c.id == way.id
    there = connection.execute(select(row_ways.c.body).where(mine).with_for_update()).scalar_one_or_none()
    if there is not None and _is_as_new(there, way):
        return False
    connection.execute(delete(row_ways).where(mine))
    row = {"id": way.id, "kind": way.key.digest(), "created_s": way.created_s, "body": body}
    connection.execute(insert(row_ways).values(row))
    return True


def _is_as_new(body: str, way: RowWay) -> bool:
    try:
        return _read(way.id, body).created_s >= way.created_s
    except RegistryError as err:
        logger.info("way of rows %s in the registry is replaced: %s", way.id, err)
        return False


def _read(name: str, body: str) -> RowWay:
    way = way_from_json(parsed(body))
    if way.id != name:
        raise RegistryError("it is of other rows")
    return way


# Two jobs may insert the same key or graph at the same moment; the one that loses tries again and then updates.
_ATTEMPTS = 5

_POSTGRESQL = {"connect_timeout": 10, "client_encoding": "utf8"}  # s; a database of SQL_ASCII would answer in bytes

_SUMMARY = [entries.c[name] for name in EntrySummary.__dataclass_fields__ if name in entries.c]
_SUMMARY_NAMES = [column.name for column in _SUMMARY]


class SqlStore:
    """`store.Store` on any database that SQLAlchemy knows."""

    def __init__(self, url_or_path: str, *, read_only: bool = False) -> None:
        self.read_only = read_only
        self._kinds: tuple[Table, ...] = (entries, row_ways)
        url = _url(url_or_path)
        self._path = file_of(url_or_path)
        self.name = str(self._path) if url is None else url.render_as_string(hide_password=True)
        if self._path is not None:
            self._engine = self._open_file(self._path)
        else:
            assert url is not None
            with self._translated():
                connect_args = _POSTGRESQL if url.get_backend_name() == "postgresql" else {}
                self._engine = create_engine(url, poolclass=NullPool, connect_args=connect_args)
                self._prepare(self._engine)

    def _open_file(self, path: Path) -> Engine:
        if not self.read_only:
            try:
                with self._translated():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    engine = sqlite_engine(path, read_only=False)
                    self._prepare(engine)
                    return engine
            except CorruptStoreError:
                raise
            except RegistryError as err:
                if not (isinstance(err.__cause__, OperationalError) and path.is_file()) or "locked" in str(err):
                    raise
                logger.info("%s; it is opened for reading only", err)
                self.read_only = True
        with self._translated():
            engine = sqlite_engine(path, read_only=True)
            self._prepare(engine)
            return engine

    def _prepare(self, engine: Engine) -> None:
        """Brings tables up to date, or checks that they can be read as they are."""
        with engine.connect().execution_options(writes=not self.read_only) as connection, connection.begin():
            if self.read_only:
                version = version_of(connection)
                check_version(version)
                if version == 0:
                    raise RegistryError(f"there is no registry in {self.name}")
                if version < WITH_ROW_WAYS:
                    self._kinds = (entries,)
            else:
                migrate(connection)

    def lookup(self, key: EntryKey) -> Entry | None:
        """See `Store.lookup`."""
        with self._reading() as connection, self._skipping(f"entry {key.digest()}"):
            return next(load(connection, [key.digest()]), None)
        return None

    def save(self, entry: Entry, *, disproved: Entry | None = None) -> bool:
        """See `Store.save`."""
        return self._save_all([entry], disproved=disproved) == 1

    def save_all(self, new: Sequence[Entry], ways: Sequence[RowWay] = ()) -> int:
        """See `Store.save_all`."""
        return self._save_all(new, ways)

    def _save_all(self, new: Sequence[Entry], ways: Sequence[RowWay] = (), *, disproved: Entry | None = None) -> int:
        for entry in new:  # what cannot be read must not be written
            body_from_json(entry.body_to_json(), model=entry.model, topology=entry.topology)
        for _ in range(_ATTEMPTS):
            try:
                with self._writing() as connection:
                    kept = sum(save_row(connection, entry, disproved) for entry in new)
                    return kept + sum(save_way(connection, way) for way in ways)
            except RegistryError as err:
                if not isinstance(err.__cause__, IntegrityError):
                    raise
        raise RegistryError(f"{self.name} is written by so many others at once that nothing could be kept")

    def summaries(self) -> list[EntrySummary]:
        """See `Store.summaries`."""
        with self._reading() as connection:
            rows = connection.execute(
                select(*_SUMMARY, topologies.c.shape, entries.c.body)
                .join(topologies, topologies.c.fingerprint == entries.c.topology, isouter=True)
                .order_by(entries.c.created_s.desc(), entries.c.id)
            )
            return [
                EntrySummary(
                    **dict(zip(_SUMMARY_NAMES, row, strict=False)),
                    hosts=_hosts(row[-2]),
                    fixed=_fixed(row[-1]),
                    condition=_condition(row[-1]),
                )
                for row in rows
            ]

    def get(self, id_prefix: str) -> Entry:
        """See `Store.get`."""
        with self._reading() as connection:
            _, found = find(connection, id_prefix)
            return load_one(connection, found)

    def find(self, id_prefix: str) -> Entry | RowWay:
        """See `Store.find`."""
        with self._reading() as connection:
            table, found = find(connection, id_prefix, tables=self._kinds)
            return load_one(connection, found) if table is entries else load_way(connection, found)

    def entries(self) -> Iterator[Entry]:
        """See `Store.entries`. One that cannot be read is left out with a warning."""
        for summary in self.summaries():
            try:
                with self._reading() as connection:
                    yield from load(connection, [summary.id])
            except RegistryError as err:
                logger.warning("entry %s is left out: %s", summary.id, err)

    def forget(self, id_prefix: str) -> str:
        """See `Store.forget`."""
        with self._writing() as connection:
            table, found = find(connection, id_prefix, tables=self._kinds)
            connection.execute(delete(table).where(table.c.id == found))
            delete_orphans(connection)
            return found

    def prune(self, *, older_than_s: float | None = None, keep: int | None = None) -> int:
        """See `Store.prune`."""
        with self._writing() as connection:
            gone = sum(delete_old(connection, table, older_than_s=older_than_s, keep=keep) for table in self._kinds)
            delete_orphans(connection)
            return gone

    def candidates(self, device: str, models: Sequence[str]) -> Sequence[Candidate]:
        """See `Store.candidates`."""
        columns = [entries.c[name] for name in Candidate._fields]
        wanted = (entries.c.device == device, entries.c.model.in_(models))
        with self._reading() as connection:
            return [Candidate(*row) for row in connection.execute(select(*columns).where(*wanted))]

    def signatures(self) -> tuple[Sequence[str], Signatures]:
        """See `Store.signatures`."""
        sound = signatures.c.version == SIGNATURE_VERSION
        with self._reading() as connection:
            rows = connection.execute(select(signatures.c.fingerprint, signatures.c.body).where(sound)).all()
            found = {name: body for name, body in rows if is_signature(body)}
            damaged = [name for name, _ in rows if name not in found]
            outdated = list(connection.execute(select(signatures.c.fingerprint).where(~sound)).scalars())
            for name, graph in self._graphs(connection, [*damaged, *outdated]):
                found[name] = to_bytes(signature(graph))
            return list(found), from_bytes(list(found.values()))

    def models(self, fingerprints: Sequence[str]) -> Mapping[str, Graph]:
        """See `Store.models`."""
        with self._reading() as connection:
            return dict(self._graphs(connection, fingerprints))

    def _graphs(self, connection: Connection, fingerprints: Sequence[str]) -> Iterator[tuple[str, Graph]]:
        """Those of these model graphs that can be read."""
        for start in range(0, len(fingerprints), 500):  # databases limit the number of parameters
            wanted = models.c.fingerprint.in_(fingerprints[start : start + 500])
            for name, body in connection.execute(select(models.c.fingerprint, models.c.body).where(wanted)):
                with self._skipping(f"model {name}"):
                    yield name, Graph.from_json(expanded(body))

    def shapes(self) -> Mapping[str, ClusterShape]:
        """See `Store.shapes`."""
        with self._reading() as connection:
            rows = connection.execute(select(topologies.c.fingerprint, topologies.c.shape)).all()
        found = {}
        for name, shape in rows:
            with self._skipping(f"cluster {name}"):
                found[name] = ClusterShape.from_json(parsed(shape))
        return found

    def distances(self, fingerprint: str) -> Mapping[str, float]:
        """See `Store.distances`."""
        with self._reading() as connection:
            pairs = select(distances.c.low, distances.c.high, distances.c.distance)
            found = {}
            for mine, other in ((distances.c.low, 1), (distances.c.high, 0)):
                for row in connection.execute(pairs.where(mine == fingerprint)):
                    if isinstance(row[2], float) and 0.0 <= row[2] <= 1.0:
                        found[row[other]] = row[2]
            return found

    def save_distances(self, fingerprint: str, by_other: Mapping[str, float]) -> None:
        """See `Store.save_distances`."""
        if self.read_only or not by_other:
            return
        rows = [
            {"low": min(fingerprint, other), "high": max(fingerprint, other), "distance": distance}
            for other, distance in sorted(by_other.items())
        ]
        try:
            with self._writing() as connection:
                for row in rows:
                    same_pair = (distances.c.low == row["low"], distances.c.high == row["high"])
                    connection.execute(delete(distances).where(*same_pair))
                connection.execute(insert(distances), rows)
        except RegistryError as err:
            if not isinstance(err.__cause__, IntegrityError):  # another process has just kept the same
                raise

    def row_ways(self, key: RowsKey | None = None) -> list[RowWay]:
        """See `Store.row_ways`."""
        if row_ways not in self._kinds:
            return []
        with self._reading() as connection:
            return load_ways(connection, key)

    def save_row_way(self, way: RowWay) -> bool:
        """See `Store.save_row_way`."""
        return self._save_all([], [way]) == 1

    def close(self) -> None:
        """See `Store.close`."""
        self._engine.dispose()

    @staticmethod
    @contextmanager
    def _skipping(what: str) -> Iterator[None]:
        """One damaged row must not hide all others."""
        try:
            yield
        except RegistryError as err:
            logger.info("%s in the registry is passed over: %s", what, err)

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._translated(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        if self.read_only:
            raise RegistryError(f"{self.name} cannot be written: name another registry in SIRTAKI_REGISTRY")
        with (
            self._translated(),
            self._engine.connect().execution_options(writes=True) as connection,
            connection.begin(),
        ):
            yield connection

    def _translated(self) -> AbstractContextManager[None]:
        return translated(self.name, self._path)


def file_of(url_or_path: str) -> Path | None:
    """The file in which a registry lies, None if it is on a server.

    Raises:
        RegistryError: it is no URL, or one of a database in memory.
    """
    url = _url(url_or_path)
    if url is None:
        return Path(url_or_path)
    if url.get_backend_name() != "sqlite":
        return None
    if url.database in (None, "", ":memory:"):
        raise RegistryError("a registry in memory would forget everything: name a file")
    return Path(url.database)


def _url(url_or_path: str) -> URL | None:
    try:
        return make_url(url_or_path) if "://" in url_or_path else None
    except SQLAlchemyError as err:
        raise RegistryError(f"{url_or_path!r} is not a URL that SQLAlchemy understands: {err}") from err


def _hosts(shape: str | None) -> str:
    """For a list, which shows a damaged entry rather than none."""
    try:
        return ClusterShape.from_json(parsed(shape or "")).describe()
    except RegistryError:
        return "?"


def _fixed(body: str) -> tuple[tuple[str, str], ...]:
    """For a list, too."""
    try:
        return tuple((str(name), str(value)) for name, value in parsed(body)["key"].get("fixed", {}).items())
    except (RegistryError, LookupError, TypeError, AttributeError):
        return ()


def _condition(body: str) -> str:
    """For a list, too."""
    try:
        return str(parsed(body)["key"].get("condition", ""))
    except (RegistryError, LookupError, TypeError, AttributeError):
        return ""
