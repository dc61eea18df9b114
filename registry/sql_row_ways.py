"""Ways of rows in an SQL store: how they are written there and read."""

import logging

from sqlalchemy import Connection, delete, insert, select

from sirtaki.errors import RegistryError

from .digest import canonical_json
from .row_ways import RowsKey, RowWay, way_from_json
from .schema import row_ways
from .sql_rows import parsed

logger = logging.getLogger(__name__)

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
