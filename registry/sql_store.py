"""The store on SQLAlchemy: a SQLite file of one user, or a database server that deployments share.

A module of its own because it is the only one that needs SQLAlchemy's presence; `opening.open_store` imports it.
"""

import json
import logging
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, NullPool, Table, create_engine, delete, insert, make_url, select, update
from sqlalchemy.exc import DatabaseError, IntegrityError, OperationalError, SQLAlchemyError

from sirtaki.errors import RegistryError

from .digest import canonical_json
from .entry import Entry, EntryKey, supersedes
from .entry_schema import body_from_json
from .graph import Graph
from .schema import check_version, distances, entries, migrate, models, signatures, topologies, version_of
from .signature import SIGNATURE_VERSION, Signatures, from_bytes, is_signature, signature, to_bytes
from .sqlite_file import sqlite_engine
from .store import Candidate, CorruptStoreError, EntrySummary
from .topology import ClusterShape, Topology

logger = logging.getLogger(__name__)

# Two jobs may insert the same key or graph at the same moment; the one that loses tries again and then updates.
_ATTEMPTS = 5

_CONNECT_TIMEOUT_S = 10

# A graph of stated maximum size has less than this many bytes as JSON; more is an attempt to fill our memory.
_MAX_GRAPH_BYTES = 1 << 27

_SUMMARY = [entries.c[name] for name in EntrySummary.__dataclass_fields__ if name in entries.c]
_SUMMARY_NAMES = [column.name for column in _SUMMARY]


class SqlStore:
    """`store.Store` on any database that SQLAlchemy knows."""

    def __init__(self, url_or_path: str, *, read_only: bool = False) -> None:
        self.read_only = read_only
        url = _url(url_or_path)
        self._path = file_of(url_or_path)
        self.name = str(self._path) if url is None else url.render_as_string(hide_password=True)
        if self._path is not None:
            self._engine = self._open_file(self._path)
        else:
            assert url is not None
            with self._translated():
                connect_args = {"connect_timeout": _CONNECT_TIMEOUT_S} if url.get_backend_name() == "postgresql" else {}
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
            else:
                migrate(connection)

    def lookup(self, key: EntryKey) -> Entry | None:
        """See `Store.lookup`."""
        with self._reading() as connection, self._skipping(f"entry {key.digest()}"):
            return next(_load(connection, [key.digest()]), None)
        return None

    def save(self, entry: Entry, *, disproved: Entry | None = None) -> bool:
        """See `Store.save`."""
        return self._save_all([entry], disproved) == 1

    def save_all(self, new: Sequence[Entry]) -> int:
        """See `Store.save_all`."""
        return self._save_all(new, None)

    def _save_all(self, new: Sequence[Entry], disproved: Entry | None) -> int:
        for entry in new:  # what cannot be read must not be written
            body_from_json(entry.body_to_json(), model=entry.model, topology=entry.topology)
        for _ in range(_ATTEMPTS):
            try:
                with self._writing() as connection:
                    return sum(_save(connection, entry, disproved) for entry in new)
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
                    **dict(zip(_SUMMARY_NAMES, row, strict=False)), hosts=_hosts(row[-2]), fixed=_fixed(row[-1])
                )
                for row in rows
            ]

    def get(self, id_prefix: str) -> Entry:
        """See `Store.get`."""
        with self._reading() as connection:
            found = _find(connection, id_prefix)
            entry = next(_load(connection, [found]), None)
        if entry is None:
            raise RegistryError(f"entry {found} has lost its model or its cluster: forget it")
        return entry

    def entries(self) -> Iterator[Entry]:
        """See `Store.entries`. One that cannot be read is left out with a warning."""
        for summary in self.summaries():
            try:
                with self._reading() as connection:
                    yield from _load(connection, [summary.id])
            except RegistryError as err:
                logger.warning("entry %s is left out: %s", summary.id, err)

    def forget(self, id_prefix: str) -> str:
        """See `Store.forget`."""
        with self._writing() as connection:
            found = _find(connection, id_prefix)
            connection.execute(delete(entries).where(entries.c.id == found))
            _delete_orphans(connection)
            return found

    def prune(self, *, older_than_s: float | None = None, keep: int | None = None) -> int:
        """See `Store.prune`."""
        with self._writing() as connection:
            gone = 0
            if older_than_s is not None:
                gone += connection.execute(
                    delete(entries).where(entries.c.created_s < time.time() - older_than_s)
                ).rowcount
            if keep is not None:
                newest = select(entries.c.id).order_by(entries.c.created_s.desc(), entries.c.id)
                surplus = list(connection.execute(newest.offset(keep).limit(2**31)).scalars())
                for start in range(0, len(surplus), 500):
                    gone += connection.execute(
                        delete(entries).where(entries.c.id.in_(surplus[start : start + 500]))
                    ).rowcount
            _delete_orphans(connection)
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
                    yield name, Graph.from_json(_expanded(body))

    def shapes(self) -> Mapping[str, ClusterShape]:
        """See `Store.shapes`."""
        with self._reading() as connection:
            rows = connection.execute(select(topologies.c.fingerprint, topologies.c.shape)).all()
        found = {}
        for name, shape in rows:
            with self._skipping(f"cluster {name}"):
                found[name] = ClusterShape.from_json(_parsed(shape))
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

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turns every error of the database and below into a RegistryError that says what to do."""
        try:
            yield
        except ImportError as err:
            raise RegistryError(f"{self.name} needs a driver that is not installed: {err}") from err
        except OperationalError as err:
            if "locked" in str(err.orig):
                advice = "another process holds it; if none is running, look for one that hangs"
            else:
                advice = "check that it exists and may be read and written, or name another one in SIRTAKI_REGISTRY"
            raise RegistryError(f"the registry {self.name} cannot be used ({_one_line(err.orig)}): {advice}") from err
        except DatabaseError as err:
            if self._path is not None and type(err.orig) is sqlite3.DatabaseError:  # its subclasses are other things
                raise CorruptStoreError(
                    f"{self.name} is not a registry or is damaged ({err.orig})", self._path
                ) from err
            raise RegistryError(f"the registry {self.name} refused a statement ({_one_line(err.orig)})") from err
        except (SQLAlchemyError, OSError) as err:
            raise RegistryError(
                f"the registry {self.name} cannot be used ({err}): name another one in SIRTAKI_REGISTRY"
            ) from err


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
        return ClusterShape.from_json(_parsed(shape or "")).describe()
    except RegistryError:
        return "?"


def _fixed(body: str) -> tuple[tuple[str, str], ...]:
    """For a list, too."""
    try:
        return tuple((str(name), str(value)) for name, value in _parsed(body)["key"].get("fixed", {}).items())
    except (RegistryError, LookupError, TypeError, AttributeError):
        return ()


def _one_line(err: object) -> str:
    return " ".join(str(err).split())


def _save(connection: Connection, entry: Entry, disproved: Entry | None) -> bool:
    mine = entries.c.id == entry.id
    is_there = connection.execute(select(entries.c.id).where(mine).with_for_update()).first() is not None
    damaged = False
    if is_there:
        try:
            old = next(_load(connection, [entry.id]), None)
        except RegistryError as err:
            logger.warning("entry %s cannot be read and is replaced: %s", entry.id, err)
            old, damaged = None, True
        if old is not None and old != disproved and not supersedes(entry, old):
            return False
    _put(connection, models, entry.key.model, damaged, body=_compressed(entry.model.to_json()))
    _put(
        connection,
        signatures,
        entry.key.model,
        damaged,
        version=SIGNATURE_VERSION,
        body=to_bytes(signature(entry.model)),
    )
    cluster = {"shape": canonical_json(entry.topology.shape().to_json()), "body": _compressed(entry.topology.to_json())}
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


def _load(connection: Connection, ids: Sequence[str]) -> Iterator[Entry]:
    """The entries of these ids with their graphs."""
    rows = connection.execute(
        select(entries.c.id, entries.c.body, models.c.body, topologies.c.body)
        .join(models, models.c.fingerprint == entries.c.model)
        .join(topologies, topologies.c.fingerprint == entries.c.topology)
        .where(entries.c.id.in_(ids))
    )
    for name, body, model, topology in rows:
        entry = body_from_json(
            _parsed(body),
            model=Graph.from_json(_expanded(model)),
            topology=Topology.from_json(_expanded(topology)),
        )
        if entry.id != name:
            raise RegistryError("a stored entry is damaged: it is of another job")
        yield entry


def _find(connection: Connection, id_prefix: str) -> str:
    """The one id that begins like this."""
    found = list(
        connection.execute(
            select(entries.c.id).where(entries.c.id.startswith(id_prefix, autoescape=True)).limit(3)
        ).scalars()
    )
    if len(found) != 1 or not id_prefix:
        what = "several entries have ids that begin" if found else "no entry has an id that begins"
        raise RegistryError(f"{what} with {id_prefix!r}: see `sirtaki registry list`")
    return str(found[0])


def _delete_orphans(connection: Connection) -> None:
    """Graphs that no entry uses, and distances of graphs that are gone."""
    used = select(entries.c.model).where(entries.c.model == models.c.fingerprint)
    connection.execute(delete(models).where(~used.exists()))
    used = select(entries.c.topology).where(entries.c.topology == topologies.c.fingerprint)
    connection.execute(delete(topologies).where(~used.exists()))
    for column in (distances.c.low, distances.c.high):
        connection.execute(delete(distances).where(column.not_in(select(models.c.fingerprint))))


def _compressed(data: object) -> bytes:
    return zlib.compress(canonical_json(data).encode())


def _expanded(body: bytes) -> Any:
    try:
        inflate = zlib.decompressobj()
        text = inflate.decompress(body, _MAX_GRAPH_BYTES)
        if inflate.unconsumed_tail:
            raise RegistryError(f"a stored graph has more than {_MAX_GRAPH_BYTES} bytes")
    except (zlib.error, TypeError) as err:
        raise RegistryError(f"a stored graph is damaged: {err}") from err
    return _parsed(text)


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as err:
        raise RegistryError(f"a stored entry is damaged: {err!r:.200}") from err
