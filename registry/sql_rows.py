"""The rows of an SQL store: how an entry and its graphs are written there, found and read."""

import json
import logging
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, Table, delete, insert, select, update

from sirtaki.errors import RegistryError

from .digest import canonical_json
from .entry import Entry, supersedes
from .entry_schema import body_from_json
from .graph import Graph
from .schema import distances, entries, models, signatures, topologies
from .signature import SIGNATURE_VERSION, signature, to_bytes
from .topology import Topology

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
