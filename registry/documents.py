"""Read and write registry documents, the format of `sirtaki registry export` and `import`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import IO, Any

from sirtaki.errors import RegistryError

from .graph import fingerprint
from .schema import RECORDS, JobRecord, StoredSetting

FORMAT = "sirtaki-registry"
VERSION = 4
_SINCE = {"entries": 1, "row_ways": 2, "shard_ways": 4}
"""Document version that added each list of records. Version 3 added values to row records, but no list."""

MAX_FILE_CHARS = 1 << 29
MAX_RECORDS = 100_000


def write_document(records: Iterable[StoredSetting], file: IO[str]) -> int:
    """Write a document with one record per line. Return the number of records."""
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
        raise RegistryError(
            f"the file to import into the registry (stored tuning results) must be UTF-8 text: {err}"
        ) from err
    if len(text) > MAX_FILE_CHARS:
        raise RegistryError(
            f"the file to import into the registry (stored tuning results) must have at most {MAX_FILE_CHARS} "
            "characters, found more: export fewer results into each file"
        )
    try:
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as err:
        raise RegistryError(
            f"the file to import must be JSON as `sirtaki registry export` writes it: {err!s:.200}"
        ) from err
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format", "") if isinstance(data, dict) else data
        shown = repr(found)[:40] if isinstance(found, str) else f"a {type(found).__name__}"
        raise RegistryError(
            f"the file to import must have the format {FORMAT!r}, found {shown}: write the file with "
            "`sirtaki registry export`"
        )
    version = data.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise RegistryError(
            f"the version of the file to import must be 1 to {VERSION}, found {version!r:.20}: upgrade Sirtaki to read "
            "files that a newer `sirtaki registry export` wrote"
        )
    kinds = [kind for kind in RECORDS if _SINCE[kind.table] <= version]
    if set(data) != {"format", "version", *(kind.table for kind in kinds)}:
        lists = " and ".join(kind.table for kind in kinds)
        raise RegistryError(
            f"the file to import must have exactly the fields format, version and {lists}, "
            f"found {', '.join(data)!s:.200}: write the file again with `sirtaki registry export`"
        )
    records: list[StoredSetting] = []
    for kind in kinds:
        items = data[kind.table]
        if not isinstance(items, list) or len(items) > MAX_RECORDS:
            found = f"{len(items)} results" if isinstance(items, list) else f"a {type(items).__name__}"
            raise RegistryError(
                f"the field {kind.table} of the file to import must be a list of at most {MAX_RECORDS} tuning results, "
                f"found {found}: export a longer list into several files"
            )
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
    if (model := fingerprint(record.model)) != key.model:
        raise RegistryError(
            f"key.model (hash of the model graph in this tuning result) must be {model}, found {key.model}: the file "
            "was edited or damaged; export the result again"
        )
    if (hosts := topology.fingerprint()) != key.topology:
        raise RegistryError(
            f"key.topology (hash of the hosts and ranks in this tuning result) must be {hosts}, found {key.topology}: "
            "the file was edited or damaged; export the result again"
        )
    if topology.world_size != key.world_size:
        raise RegistryError(
            f"key.world_size must be {topology.world_size}, the number of ranks in the topology of this tuning result, "
            f"found {key.world_size}: the file was edited or damaged; export the result again"
        )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"each number in the file to import must be finite, found {name}: export the file again")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        repeated, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"each JSON object must have a field only once, found the field {repeated!r:.100} twice")
    return data
