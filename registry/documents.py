"""Read and write registry documents, the format of `sirtaki registry export` and `import`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import IO, Any

from sirtaki.errors import RegistryError, require

from .graph import fingerprint
from .schema import RECORDS, JobRecord, StoredSetting

FORMAT = "sirtaki-registry"
VERSION = 4
_SINCE = {"entries": 1, "row_ways": 2, "shard_ways": 4}
"""{list of records: format version that added the list}.

Version 3 is missing: it added fields of row records, but no list.
"""

MAX_FILE_CHARS = 1 << 29
MAX_RECORDS = 100_000


def write_document(records: Iterable[StoredSetting], file: IO[str]) -> int:
    """Write a document with one record per line, and return the number of records."""
    records = list(records)
    file.write(f'{{"format": "{FORMAT}", "version": {VERSION}')
    for kind in RECORDS:
        lines = ",".join("\n" + json.dumps(one.to_json(), allow_nan=False) for one in records if isinstance(one, kind))
        file.write(f', "{kind.table}": [{lines}\n]')
    file.write("}\n")
    return len(records)


def read_document(file: IO[str]) -> list[StoredSetting]:
    """Read and check all records of a document of this or an earlier version.

    Raises:
        RegistryError: the document has another format, or a record has an invalid field. The message names the record
            and the field.
    """
    try:
        text = file.read(MAX_FILE_CHARS + 1)
    except UnicodeDecodeError as err:
        raise RegistryError(f"the file to import is not UTF-8 text: {err}") from err
    require(len(text) <= MAX_FILE_CHARS, "file size", f"at most {MAX_FILE_CHARS} characters", "more", RegistryError)
    try:
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as err:
        raise RegistryError(f"the file to import is not JSON: {err!s:.200}") from err
    found = data.get("format", "") if isinstance(data, dict) else data
    shown = repr(found)[:40] if isinstance(found, str) else f"a {type(found).__name__}"
    require(found == FORMAT, "format", repr(FORMAT), shown, RegistryError)
    version = data.get("version")
    valid = type(version) is int and 1 <= version <= VERSION
    require(valid, "version", f"1 to {VERSION} (upgrade Sirtaki to read newer files)", repr(version), RegistryError)
    kinds = [kind for kind in RECORDS if _SINCE[kind.table] <= version]
    fields = ["format", "version", *(kind.table for kind in kinds)]
    require(set(data) == set(fields), "file", f"the fields {', '.join(fields)}", ", ".join(data), RegistryError)
    records: list[StoredSetting] = []
    for kind in kinds:
        items = data[kind.table]
        found = f"{len(items)} results" if isinstance(items, list) else f"a {type(items).__name__}"
        valid = isinstance(items, list) and len(items) <= MAX_RECORDS
        require(valid, kind.table, f"a list of at most {MAX_RECORDS} results", found, RegistryError)
        for number, item in enumerate(items, start=1):
            try:
                record = kind.from_json(item)
                if isinstance(record, JobRecord):
                    _check_graphs(record)
                records.append(record)
            except RegistryError as err:
                raise RegistryError(f"{kind.called} {number}: {err}") from err
    return records


def _check_graphs(record: JobRecord) -> None:
    """Check that a record's key contains the fingerprints of its graphs."""
    key, topology = record.key, record.topology
    expected = {
        "model": fingerprint(record.model),
        "topology": topology.fingerprint(),
        "world_size": topology.world_size,
    }
    for name, value in expected.items():
        require(getattr(key, name) == value, f"key.{name}", value, getattr(key, name), RegistryError)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"numbers must be finite, found {name}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        repeated, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the file to import has the field {repeated!r:.100} twice in one JSON object")
    return data
