"""Entries as a file: what `sirtaki registry export` writes and `import` believes only after looking at every field.

A file may come from anywhere: it is parsed here, under limits, into checked entries or an error that names the entry
and the field.
"""

import json
from collections.abc import Iterable
from typing import IO, Any

from sirtaki.errors import RegistryError

from .entry import Entry
from .entry_schema import entry_from_json

FORMAT = "sirtaki-registry"
VERSION = 1

MAX_FILE_CHARS = 1 << 29
MAX_ENTRIES = 100_000


def write_entries(entries: Iterable[Entry], file: IO[str]) -> int:
    """Writes a document with one entry a line; how many there were."""
    count = 0
    file.write(f'{{"format": "{FORMAT}", "version": {VERSION}, "entries": [')
    for entry in entries:
        file.write(",\n" if count else "\n")
        file.write(json.dumps(entry.to_json(), allow_nan=False))
        count += 1
    file.write("\n]}\n")
    return count


def read_entries(file: IO[str]) -> list[Entry]:
    """The entries of a document, all of them checked.

    Raises:
        RegistryError: it is no such document, or an entry has a field that is invalid; the message names both.
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
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise RegistryError(f"the document's version is not {VERSION}: it was written by another release")
    if set(data) != {"format", "version", "entries"}:
        raise RegistryError("the document needs exactly the fields format, version and entries")
    if not isinstance(data["entries"], list) or len(data["entries"]) > MAX_ENTRIES:
        raise RegistryError(f"entries must be a list of at most {MAX_ENTRIES}")
    return [_checked(number, item) for number, item in enumerate(data["entries"], start=1)]


def _checked(number: int, data: object) -> Entry:
    try:
        return entry_from_json(data)
    except RegistryError as err:
        raise RegistryError(f"entry {number}: {err}") from err


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number here")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a field is there twice")
    return data
