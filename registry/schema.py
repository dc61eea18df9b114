"""The registry's tables and how older ones are brought up to date.

A schema outlives the code that wrote it. Migrations are only ever added: number n turns schema n into n + 1, and all
that are missing run in one transaction, so a job that dies half-way leaves the old schema.
"""

from collections.abc import Callable, Sequence

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    func,
    insert,
    inspect,
    select,
    update,
)

from sirtaki.errors import RegistryError

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
