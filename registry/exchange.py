"""Entries and ways of rows as a file: what `sirtaki registry export` writes and `import` checks field by field.

A file may come from anywhere: it is parsed here, under limits, into what is checked or an error that names the entry
or way and the field.
"""

import json
from collections.abc import Callable, Iterable
from typing import IO, Any, TypeVar

from sirtaki.errors import RegistryError

from .entry import Entry
from .entry_schema import entry_from_json
from .row_ways import RowWay, way_from_json

_T = TypeVar("_T")

FORMAT = "sirtaki-registry"
VERSION = 2
_LISTS = {1: ("entries",), VERSION: ("entries", "row_ways")}  # that a document of each version has

MAX_FILE_CHARS = 1 << 29
MAX_ENTRIES = 100_000


def write_document(entries: Iterable[Entry], ways: Iterable[RowWay], file: IO[str]) -> int:
    """Writes a document with one entry or way of rows a line; how many there were."""
    file.write(f'{{"format": "{FORMAT}", "version": {VERSION}, "entries": [')
    count = _write_lines(entries, file)
    file.write('], "row_ways": [')
    count += _write_lines(ways, file)
    file.write("]}\n")
    return count


def _write_lines(items: Iterable[Entry | RowWay], file: IO[str]) -> int:
    count = 0
    for item in items:
        file.write(",\n" if count else "\n")
        file.write(json.dumps(item.to_json(), allow_nan=False))
        count += 1
    file.write("\n")
    return count


def read_document(file: IO[str]) -> tuple[list[Entry], list[RowWay]]:
    """The entries and ways of rows of a document, all of them checked; documents of version 1 have no ways.

    Raises:
        RegistryError: it is no such document, or an entry or way has a field that is invalid; the message names both.
    """
    try:
        text = file.read(MAX_FILE_CHARS + 1)
    except UnicodeDecodeError as err:
        raise RegistryError(f"this is no text: {err}") from err
    if len(text) > MAX_FILE_CHARS:
        raise RegistryError(f"the document has more than {MAX_FILE_CHARS} characters")
    try:
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as err:
        raise RegistryError(f"this is not the JSON that `sirtaki registry export` writes: {err!s:.200}") from err
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RegistryError("this is not what `sirtaki registry export` writes: its format is not " + FORMAT)
    if type(data.get("version")) is not int or data["version"] not in _LISTS:
        raise RegistryError(f"the document's version is not 1 or {VERSION}: it was written by a newer release")
    lists = _LISTS[data["version"]]
    if set(data) != {"format", "version", *lists}:
        raise RegistryError(f"the document needs exactly the fields format, version and {' and '.join(lists)}")
    for name in lists:
        if not isinstance(data[name], list) or len(data[name]) > MAX_ENTRIES:
            raise RegistryError(f"{name} must be a list of at most {MAX_ENTRIES}")
    entries = _checked("entry", data["entries"], entry_from_json)
    return entries, _checked("way of rows", data.get("row_ways", []), way_from_json)


def _checked(what: str, data: list[object], read: Callable[[object], _T]) -> list[_T]:
    checked = []
    for number, item in enumerate(data, start=1):
        try:
            checked.append(read(item))
        except RegistryError as err:
            raise RegistryError(f"{what} {number}: {err}") from err
    return checked


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number here")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a field is there twice")
    return data
