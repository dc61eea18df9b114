"""The store of the registry, which keeps records in SQLite or another database that SQLAlchemy supports."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct
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
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError

from sirtaki.errors import CorruptStoreError, RegistryError
from sirtaki.fields import parsed, plain
from sirtaki.measures import Gain

from .cluster import ClusterShape
from .graph import (
    SIGNATURE_VERSION,
    GraphJson,
    ModelGraph,
    Signatures,
    canonical_json,
    from_bytes,
    graph_to_json,
    is_signature,
    signature,
    to_bytes,
)
from .rows import VERSION, compressed, connect_file, expanded, record_of
from .schema import RECORDS, JobRecord, Key, StoredSetting

logger = logging.getLogger(__name__)

metadata = MetaData()

versions = Table("sirtaki_schema", metadata, Column("version", Integer, nullable=False))

# Several entries may have the same model graph, so each graph is stored once, compressed.
models = Table(
    "models",
    metadata,
    Column("fingerprint", String(64), primary_key=True),
    Column("body", LargeBinary, nullable=False),
)

# Signatures (counts of a graph's nodes by kind and label) are in a table of their own: a search for similar entries
# reads all signatures, but few graphs.
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
    Column("low", String(64), primary_key=True),  # The lesser of the two fingerprints.
    Column("high", String(64), primary_key=True),
    Column("distance", Float(53), nullable=False),
)


def _table_of(kind: type[StoredSetting]) -> Table:
    if kind is JobRecord:
        return entries
    return Table(
        kind.table,
        metadata,
        Column("id", String(64), primary_key=True),
        Column("kind", String(64), nullable=False),  # Digest of the record's key.
        Column("created_s", Float(53), nullable=False),
        Column("body", Text, nullable=False),
        Index(f"{kind.table}_by_kind", "kind"),
    )


_TABLES = {kind: _table_of(kind) for kind in RECORDS}

R = TypeVar("R", bound=StoredSetting)

SCHEMAS: Sequence[Sequence[Table]] = (
    (versions, models, signatures, topologies, entries),
    (distances,),
    *((table,) for table in _TABLES.values() if table is not entries),
)
"""Tables that each version of the schema added, in order. A read-only registry may have an older version."""
assert len(SCHEMAS) == VERSION

# Id of an advisory lock of PostgreSQL: an arbitrary number that is equal in all processes.
_LOCK = 0x51A7A1

# Number of attempts to write. If two jobs insert the same key or graph at the same time, the second insert fails, and
# the next attempt updates the row.
_ATTEMPTS = 5

MAX_PER_KEY = 1000
"""Largest number of records with one key that are read from the database, newest first."""

# Largest number of values in one SQL statement, because databases limit a statement's parameters.
_PARAMETERS = 500

# Options of the PostgreSQL driver. Without utf8, the driver could return bytes. The timeout is in seconds.
_POSTGRESQL = {"connect_timeout": 10, "client_encoding": "utf8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EntrySummary:
    """Columns of an entry for lists, read without its graphs.

    Attributes:
        id: id of the entry.
        model, topology, world_size, dtype, device: fields of the entry's `EntryKey`.
        complete, best_span_s, default_span_s, n_trials, arm: fields of the entry's `JobRecord`, such as communication
            times of one iteration.
        created_s: seconds since the epoch.
        model_name: class name of the model.
        hosts: number and kinds of hosts (`ClusterShape.describe`).
        fixed: (name, value) of the knobs that the user fixed.
        condition: ratio of communication time to its usual value, such as "4×"; "" = usual.
        gain: gain over the default, proved by a paired comparison. None = not proved.
    """

    id: str
    model: str
    topology: str
    world_size: int
    dtype: str
    device: str
    complete: bool
    created_s: float
    best_span_s: float
    default_span_s: float
    n_trials: int
    arm: str
    model_name: str
    hosts: str
    fixed: tuple[tuple[str, str], ...]
    condition: str
    gain: Gain | None


class Candidate(NamedTuple):
    """Columns of a stored entry that are read to search for entries of similar jobs."""

    id: str
    model: str
    topology: str
    dtype: str
    complete: bool


_SUMMARY = [entries.c[name] for name in EntrySummary.__dataclass_fields__ if name in entries.c]


class Store:
    """A registry: a database with one record per id.

    All methods raise RegistryError if the database cannot be read or written.

    Attributes:
        read_only: True if the registry is never written, because the caller or the file's permissions forbid it.
        name: path of the file, or URL of the database without its password.
    """

    def __init__(self, url_or_path: str, *, read_only: bool = False) -> None:
        self.read_only = read_only
        self._kinds: Sequence[type[StoredSetting]] = RECORDS
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

    def get(self, kind: type[R], key: Key) -> R | None:
        """Return the newest readable record with this key; None if there is no such record."""
        return next(self.all(kind, key), None)

    def all(self, kind: type[R], key: Key | None = None) -> Iterator[R]:
        """Yield all records of a type, or those with a key, newest first. Damaged records are logged and skipped."""
        if kind not in self._kinds:
            return
        table, level = _TABLES[kind], logging.WARNING if key is None else logging.INFO
        newest = select(table.c.id).order_by(table.c.created_s.desc(), table.c.id)
        if key is not None:
            by_key = table.c.id if table is entries else table.c.kind
            newest = newest.where(by_key == key.digest()).limit(MAX_PER_KEY)
        with self._reading() as connection:
            names = list(connection.execute(newest).scalars())
        for some in _in_parts(names):
            with self._reading() as connection:
                rows = {row[0]: row for row in _rows(connection, kind, some)}
            for name in some:
                with _skipping(f"{kind.called} {name}", level):
                    if name in rows:
                        yield record_of(kind, *rows[name])

    def nearest(self, kind: type[R], key: Key, wanted: object) -> list[R]:
        """Return the usable records with this key, by ascending `kind.distance` to `wanted`."""
        found = [(record.distance(wanted), record) for record in self.all(kind, key)]
        return [record for apart, record in sorted(found, key=lambda one: one[0]) if apart < float("inf")]

    def find(self, kind: type[R], id_prefix: str) -> R:
        """Return the only record of this type whose id has this prefix. `StoredSetting` as `kind` means any type."""
        with self._reading() as connection:
            found, name = self._find(connection, kind, id_prefix)
            row = next(_rows(connection, found, [name]), None)
        try:
            if row is None:
                raise RegistryError(
                    "this tuning result cannot be read: its model graph or cluster topology is missing in the registry"
                )
            return record_of(found, *row)
        except RegistryError as err:
            raise RegistryError(
                f"the stored tuning result {name} (type: {found.called}) is damaged ({err}); remove it with "
                f"`sirtaki registry forget {name}`"
            ) from err

    def summaries(self) -> list[EntrySummary]:
        """Return all entries, newest first. Damaged entries are included with their readable columns."""
        with self._reading() as connection:
            rows = connection.execute(
                select(*_SUMMARY, topologies.c.shape, entries.c.body)
                .join(topologies, topologies.c.fingerprint == entries.c.topology, isouter=True)
                .order_by(entries.c.created_s.desc(), entries.c.id)
            )
            found = []
            for *columns, shape, body in rows:
                hosts, shown = "?", _ListedBody()
                with _skipping(f"entry {columns[0]}", logging.DEBUG):
                    shown = parsed(_ListedBody, body)
                with _skipping(f"entry {columns[0]}", logging.DEBUG):
                    hosts = parsed(ClusterShape, shape).describe()
                named = dict(zip((column.name for column in _SUMMARY), columns, strict=True))
                found.append(
                    EntrySummary(
                        **named,
                        hosts=hosts,
                        fixed=tuple(shown.key.fixed.items()),
                        condition=shown.key.condition,
                        gain=shown.gain,
                    )
                )
            return found

    def put(self, record: StoredSetting, *, disproved: StoredSetting | None = None) -> bool:
        """Store a record unless the stored one with the same id is better (`StoredSetting.supersedes`). Atomic.

        Args:
            record: record to store.
            disproved: stored record whose setting this job has run and found slow. It is replaced in any case.

        Returns:
            False if the stored record was better.
        """
        return self.put_all([record], disproved=disproved) == 1

    def put_all(self, records: Sequence[StoredSetting], *, disproved: StoredSetting | None = None) -> int:
        """Store each record that is better than the stored one. Return their number. On an error, store none."""
        # Parse all records before writing any, because jobs could not read an invalid record.
        for record in records:
            type(record).from_json(record.body(), record.graphs)
        for _ in range(_ATTEMPTS):
            try:
                with self._writing() as connection:
                    return sum(_put(connection, record, disproved) for record in records)
            except RegistryError as err:
                if not isinstance(err.__cause__, IntegrityError):
                    raise
        raise RegistryError(
            f"Sirtaki could not write to the registry of tuning results {self.name}, because parallel processes "
            f"wrote to it during all {_ATTEMPTS} attempts; try again later"
        )

    def forget(self, id_prefix: str) -> str:
        """Delete the only record whose id has this prefix. Return its id."""
        with self._writing() as connection:
            kind, name = self._find(connection, StoredSetting, id_prefix)
            table = _TABLES[kind]
            connection.execute(delete(table).where(table.c.id == name))
            _delete_orphans(connection)
            return name

    def prune(self, *, older_than_s: float | None = None, keep: int | None = None) -> int:
        """Delete old and surplus records.

        Args:
            older_than_s: delete records of greater age.
            keep: number of newest records of each type to keep.

        Returns:
            Number of deleted records.
        """
        deleted = 0
        with self._writing() as connection:
            for table in map(_TABLES.__getitem__, self._kinds):
                if older_than_s is not None:
                    old = table.c.created_s < time.time() - older_than_s
                    deleted += connection.execute(delete(table).where(old)).rowcount
                if keep is not None:
                    newest = select(table.c.id).order_by(table.c.created_s.desc(), table.c.id)
                    surplus = list(connection.execute(newest.offset(keep).limit(2**31)).scalars())
                    for some in _in_parts(surplus):
                        deleted += connection.execute(delete(table).where(table.c.id.in_(some))).rowcount
            _delete_orphans(connection)
        return deleted

    def candidates(self, device: str, models: Sequence[str]) -> Sequence[Candidate]:
        """Return all entries of these models on this kind of device, in any order."""
        columns = [entries.c[name] for name in Candidate._fields]
        wanted = (entries.c.device == device, entries.c.model.in_(models))
        with self._reading() as connection:
            return [Candidate(*row) for row in connection.execute(select(*columns).where(*wanted))]

    def signatures(self) -> tuple[Sequence[str], Signatures]:
        """Return the fingerprints and signatures, `(n_models, WIDTH)`, of all stored model graphs."""
        with self._reading() as connection:
            rows = connection.execute(select(signatures)).all()
            found = {row.fingerprint: row.body for row in rows if row.version == SIGNATURE_VERSION}
            found = {name: body for name, body in found.items() if is_signature(body)}
            outdated = [row.fingerprint for row in rows if row.fingerprint not in found]
            found |= {name: to_bytes(signature(graph)) for name, graph in _graphs(connection, outdated)}
            return list(found), from_bytes(list(found.values()))

    def models(self, fingerprints: Sequence[str]) -> Mapping[str, ModelGraph]:
        """Return the model graphs with these fingerprints. Missing and damaged graphs are omitted."""
        with self._reading() as connection:
            return dict(_graphs(connection, fingerprints))

    def shapes(self) -> Mapping[str, ClusterShape]:
        """Return the shapes of all stored clusters, by fingerprint of the topology."""
        with self._reading() as connection:
            rows = connection.execute(select(topologies.c.fingerprint, topologies.c.shape)).all()
        found = {}
        for name, shape in rows:
            with _skipping(f"cluster {name}"):
                found[name] = parsed(ClusterShape, shape)
        return found

    def distances(self, fingerprint: str) -> Mapping[str, float]:
        """Return the stored distances between this graph and others, by the other graph's fingerprint."""
        matches = or_(distances.c.low == fingerprint, distances.c.high == fingerprint)
        with self._reading() as connection:
            rows = connection.execute(select(distances).where(matches)).all()
        sound = (row for row in rows if isinstance(row.distance, float) and 0.0 <= row.distance <= 1.0)
        return {row.high if row.low == fingerprint else row.low: row.distance for row in sound}

    def save_distances(self, fingerprint: str, by_other: Mapping[str, float]) -> None:
        """Store computed distances. Does nothing if the store is read-only."""
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
            # Ignore the error: another process has just stored the same distances.
            if not isinstance(err.__cause__, IntegrityError):
                raise

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._engine.dispose()

    def _find(self, connection: Connection, kind: type[R], id_prefix: str) -> tuple[type[R], str]:
        """Return the type and the id of the only record of a type whose id has this prefix."""
        kinds = [one for one in self._kinds if issubclass(one, kind)]
        found = []
        for one in kinds:
            table = _TABLES[one]
            like = table.c.id.startswith(id_prefix, autoescape=True)
            found += [
                (one, str(name)) for name in connection.execute(select(table.c.id).where(like).limit(3)).scalars()
            ]
        if len(found) == 1 and id_prefix:
            return found[0]
        called, lists = (" or ".join(getattr(one, name) for one in kinds) for name in ("called", "shown_by"))
        raise RegistryError(
            f"the id {id_prefix!r} must match one stored tuning result ({called}), but matches "
            f"{'several' if found else 'none'}; the command {lists} shows all ids"
        )

    # ── opening ──────────────────────────────────────────────────────────────────────────────────────────────────

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
                logger.info(
                    "Sirtaki cannot write to the registry of tuning results %s, and therefore only reads it: %s",
                    path,
                    err,
                )
                self.read_only = True
        with self._translated():
            engine = sqlite_engine(path, read_only=True)
            self._prepare(engine)
            return engine

    def _prepare(self, engine: Engine) -> None:
        """Create missing tables, or check that the schema of a read-only registry can be read."""
        with engine.connect().execution_options(writes=not self.read_only) as connection, connection.begin():
            # Take a lock on PostgreSQL, which permits several writers. SQLite permits only one.
            if connection.dialect.name == "postgresql" and not self.read_only:
                connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))
            there = inspect(connection).has_table(versions.name)
            version = int(connection.execute(select(versions.c.version)).scalar_one()) if there else 0
            if version > len(SCHEMAS):
                raise RegistryError(
                    f"the registry of tuning results {self.name} has version {version}, but this release of Sirtaki "
                    f"supports versions up to {len(SCHEMAS)}: upgrade Sirtaki, or set SIRTAKI_REGISTRY to another "
                    "registry"
                )
            if self.read_only and version == 0:
                raise RegistryError(
                    f"there is no registry of tuning results in {self.name}; pass another file or URL with "
                    "--registry or SIRTAKI_REGISTRY"
                )
            if self.read_only:
                existing = [table for added in SCHEMAS[:version] for table in added]
                self._kinds = [kind for kind in RECORDS if _TABLES[kind] in existing]
            elif version < len(SCHEMAS):
                metadata.create_all(connection, tables=[table for added in SCHEMAS[version:] for table in added])
                connection.execute(delete(versions))
                connection.execute(insert(versions).values(version=len(SCHEMAS)))

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._translated(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        if self.read_only:
            raise RegistryError(
                f"the registry of tuning results {self.name} cannot be written; set SIRTAKI_REGISTRY to a file or "
                "database that you can write"
            )
        with (
            self._translated(),
            self._engine.connect().execution_options(writes=True) as connection,
            connection.begin(),
        ):
            yield connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Convert errors of the database and its driver to RegistryError."""
        try:
            yield
        except ImportError as err:
            postgresql = self.name.startswith("postgresql")
            install = "run: pip install 'sirtaki[postgresql]'" if postgresql else "install the driver with pip"
            raise RegistryError(
                f"the registry of tuning results {self.name} needs a database driver that is not installed ({err}); "
                f"{install}"
            ) from err
        except (SQLAlchemyError, OSError) as err:
            why = " ".join(str(getattr(err, "orig", None) or err).split())
            # Compare the exact type: subclasses of the error report other problems than a damaged file.
            if self._path is not None and type(getattr(err, "orig", None)) is sqlite3.DatabaseError:
                raise CorruptStoreError(
                    f"the file {self.name} is not a registry of tuning results, or it is damaged ({why})", self._path
                ) from err
            remedy = (
                "wait until no other process locks it" if "locked" in why else "check that it may be read and written"
            )
            raise RegistryError(
                f"Sirtaki cannot use the registry of tuning results {self.name} ({why}); {remedy}, or set "
                "SIRTAKI_REGISTRY to another registry"
            ) from err


class _ListedKey(Struct, frozen=True):
    fixed: dict[str, str] = {}
    condition: str = ""


class _ListedBody(Struct):
    """The fields of a record's `body` that a list of entries shows."""

    key: _ListedKey = _ListedKey()
    gain: Gain | None = None


@contextmanager
def _skipping(what: str, level: int = logging.INFO) -> Iterator[None]:
    """Log and suppress a RegistryError of one database row, so that a damaged row does not hide the intact ones."""
    try:
        yield
    except RegistryError as err:
        logger.log(level, "Sirtaki skips a damaged record of the registry (%s): %s", what, err)


def _in_parts(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), _PARAMETERS):
        yield names[start : start + _PARAMETERS]


def _rows(connection: Connection, kind: type[StoredSetting], ids: Sequence[str]) -> Iterator[Sequence[Any]]:
    """Yield a database row for each record with one of these ids.

    A row has the record's id, its JSON (body) and, for records of jobs, the bodies of model graph and topology.
    """
    table = _TABLES[kind]
    wanted = select(table.c.id, table.c.body)
    if table is entries:
        wanted = (
            wanted.add_columns(models.c.body, topologies.c.body)
            .join(models, models.c.fingerprint == entries.c.model)
            .join(topologies, topologies.c.fingerprint == entries.c.topology)
        )
    yield from connection.execute(wanted.where(table.c.id.in_(ids)))


def _graphs(connection: Connection, fingerprints: Sequence[str]) -> Iterator[tuple[str, ModelGraph]]:
    """Yield the readable model graphs with these fingerprints."""
    for some in _in_parts(fingerprints):
        for name, body in connection.execute(select(models).where(models.c.fingerprint.in_(some))):
            with _skipping(f"model {name}"):
                yield name, parsed(GraphJson, expanded(body)).graph()


def _put(connection: Connection, record: StoredSetting, disproved: StoredSetting | None) -> bool:
    """Store a record. Return False, and store nothing, if the stored record with this id is better."""
    kind, table = type(record), _TABLES[type(record)]
    matches = table.c.id == record.id
    is_there = connection.execute(select(table.c.id).where(matches).with_for_update()).first() is not None
    row = next(_rows(connection, kind, [record.id]), None)
    damaged = False
    if row is not None:
        try:
            old = record_of(kind, *row)
            if old != disproved and not record.supersedes(old):
                return False
        except RegistryError as err:
            logger.warning(
                "Sirtaki replaces a damaged result in the registry of tuning results (%s %s) with a new result: %s",
                kind.called,
                record.id,
                err,
            )
            damaged = True
    values = {"id": record.id, "created_s": record.created_s, "body": canonical_json(record.body())}
    if isinstance(record, JobRecord):
        values |= _put_graphs(connection, record, damaged)
    else:
        values["kind"] = record.key.digest()
    connection.execute(update(table).where(matches).values(values) if is_there else insert(table).values(values))
    return True


def _put_graphs(connection: Connection, record: JobRecord, damaged: bool) -> dict[str, Any]:
    """Store the graphs of a record. Return the columns of the record's row that lists and searches read."""
    key = record.key
    graph = {"body": compressed(graph_to_json(record.model))}
    summary = {"version": SIGNATURE_VERSION, "body": to_bytes(signature(record.model))}
    cluster = {"shape": canonical_json(plain(record.topology.shape())), "body": compressed(plain(record.topology))}
    for table, fingerprint, values in (
        (models, key.model, graph),
        (signatures, key.model, summary),
        (topologies, key.topology, cluster),
    ):  # Overwrite existing rows only if they may be damaged.
        same = table.c.fingerprint == fingerprint
        if connection.execute(select(table.c.fingerprint).where(same)).first() is None:
            connection.execute(insert(table).values(fingerprint=fingerprint, **values))
        elif damaged:
            connection.execute(update(table).where(same).values(**values))
    names = ("complete", "best_span_s", "default_span_s", "n_trials", "arm")
    return {
        **{name: getattr(key, name) for name in ("model", "topology", "world_size", "dtype", "device")},
        **{name: getattr(record, name) for name in names},
        "model_name": record.provenance.model_name,
    }


def _delete_orphans(connection: Connection) -> None:
    """Delete graphs that no entry uses, and distances of deleted graphs."""
    for table, column in ((models, entries.c.model), (topologies, entries.c.topology)):
        used = select(column).where(column == table.c.fingerprint)
        connection.execute(delete(table).where(~used.exists()))
    for column in (distances.c.low, distances.c.high):
        connection.execute(delete(distances).where(column.not_in(select(models.c.fingerprint))))


def file_of(url_or_path: str) -> Path | None:
    """Return the file of a registry; None if the registry is on a database server.

    Raises:
        RegistryError: the URL is invalid, or its database is in memory.
    """
    url = _url(url_or_path)
    if url is None:
        return Path(url_or_path)
    if url.get_backend_name() != "sqlite":
        return None
    if url.database in (None, "", ":memory:"):
        raise RegistryError(
            "the registry of tuning results must be a file or on a database server, not in memory; set "
            "SIRTAKI_REGISTRY to a file or a URL"
        )
    return Path(url.database)


def _url(url_or_path: str) -> URL | None:
    try:
        return make_url(url_or_path) if "://" in url_or_path else None
    except SQLAlchemyError as err:
        raise RegistryError(
            f"the URL {url_or_path!r} of the registry of tuning results is invalid ({err}); set SIRTAKI_REGISTRY to "
            "a file, or to a URL such as postgresql+psycopg://user@host/db"
        ) from err


_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "fuse", "9p", "glusterfs")


def sqlite_engine(path: Path, *, read_only: bool) -> Engine:
    """Return a SQLAlchemy engine for a SQLite file. The engine creates the file unless `read_only`.

    The engine has no connection pool, so it is safe across fork and leaves no connection open.
    """
    journal = "DELETE" if _is_on_network(path) else "WAL"

    def connect() -> sqlite3.Connection:
        connection = connect_file(path, "mode=ro" if read_only else "mode=rwc")
        try:
            if read_only:
                try:
                    connection.execute("SELECT count(*) FROM sqlite_schema")
                except sqlite3.OperationalError:
                    # Open the database as `immutable`: otherwise even readers in WAL mode write an index file beside
                    # it.
                    connection.close()
                    connection = connect_file(path, "mode=ro&immutable=1")
            # Disable implicit transactions: `_begin` below starts them.
            connection.isolation_level = None
            connection.execute("PRAGMA foreign_keys = ON")
            if not read_only:
                if connection.execute("PRAGMA journal_mode").fetchone()[0].upper() != journal:
                    connection.execute(f"PRAGMA journal_mode = {journal}")
                # Choose this level of durability: nothing is lost if the process is killed.
                connection.execute(f"PRAGMA synchronous = {'NORMAL' if journal == 'WAL' else 'FULL'}")
        except sqlite3.Error:
            # Close the connection on an error, such as a damaged file.
            connection.close()
            raise
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # Take the write lock at once: upgrading a read lock later could fail.
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def is_damaged(path: Path) -> bool:
    """Return whether the file is not a SQLite database or is damaged. Reads the whole file."""
    if not path.exists():
        return False
    try:
        connection = connect_file(path, "mode=rw")
        try:
            return bool(connection.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok")
        finally:
            connection.close()
    except sqlite3.DatabaseError as err:
        # Compare the exact type: its subclasses report locks and missing permissions, not damage.
        return type(err) is sqlite3.DatabaseError


def _is_on_network(path: Path) -> bool:
    """Return whether other hosts may access the file.

    In that case, WAL cannot be used, because it needs shared memory.
    """
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        # Without /proc, assume that the file is on a local disk.
        return False
    folder, around = os.path.realpath(path.parent), [(0, 0, "")]
    # Prefer the later of two mounts on one folder, because it hides the earlier one.
    for number, line in enumerate(lines):
        _, place, kind, *_ = line.split()
        # In this file, a space is written as \040.
        place = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), place).rstrip("/")
        if f"{folder}/".startswith(f"{place}/"):
            around.append((len(place), number, kind))
    return max(around)[2].startswith(_NETWORK_FILE_SYSTEMS)


def set_aside(path: Path) -> Path:
    """Rename a damaged file and SQLite's files beside it to `<name>.broken-<n>`. Return the new path.

    Takes a lock and checks the damage again, because several jobs may find the damage at the same time. Only the first
    job must rename the file. The other jobs must not rename the new file.

    Raises:
        RegistryError: the file cannot be renamed.
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
        raise RegistryError(
            f"the file {path} of the registry of tuning results is damaged and cannot be renamed ({err}); move it to "
            "another folder by hand"
        ) from err
