"""The store on SQLAlchemy: a SQLite file of one user, or a database server that deployments share.

`opening.open_store` imports it, and SQLAlchemy with it.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, NullPool, Table, create_engine, delete, insert, make_url, select
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError

from sirtaki.errors import RegistryError

from .entry import Entry, EntryKey
from .entry_schema import body_from_json
from .graph import Graph
from .row_ways import RowsKey, RowWay
from .schema import (
    WITH_ROW_WAYS,
    check_version,
    distances,
    entries,
    migrate,
    models,
    row_ways,
    signatures,
    topologies,
    version_of,
)
from .signature import SIGNATURE_VERSION, Signatures, from_bytes, is_signature, signature, to_bytes
from .sql_errors import translated
from .sql_row_ways import load_way, load_ways, save_way
from .sql_rows import delete_old, delete_orphans, expanded, find, load, load_one, parsed, save_row
from .sqlite_file import sqlite_engine
from .store import Candidate, CorruptStoreError, EntrySummary
from .topology import ClusterShape

logger = logging.getLogger(__name__)

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
