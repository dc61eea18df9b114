import io
import json
from typing import Any

import pytest
from conformance.graphs import chain_graph
from conformance.store import make_entry, make_way
from hypothesis import example, given
from hypothesis import strategies as st

from sirtaki.errors import RegistryError
from sirtaki.registry.entry import Entry, RowWay, read_document, write_document


def exported(entries: list[Entry], ways: list[RowWay]) -> str:
    file = io.StringIO()
    assert write_document(entries, ways, file) == len(entries) + len(ways)
    return file.getvalue()


ENTRIES = [make_entry(), make_entry(model=chain_graph([4, 4])), make_entry(ranks=6, complete=False)]
WAYS = [make_way(), make_way(ranks=8)]
DOCUMENT = exported(ENTRIES, WAYS)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_what_was_exported_comes_back(count: int) -> None:
    given = (ENTRIES[:count], WAYS[:count])
    assert read_document(io.StringIO(exported(*given))) == given


def test_a_document_from_before_there_were_ways_of_rows_is_read() -> None:
    data = json.loads(DOCUMENT)
    del data["row_ways"]
    assert read_document(io.StringIO(json.dumps({**data, "version": 1}))) == (ENTRIES, [])


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(DOCUMENT), **fields})


def with_second_entry(**fields: Any) -> str:
    data = json.loads(DOCUMENT)
    data["entries"][1].update(fields)
    return json.dumps(data)


def with_second_way(**fields: Any) -> str:
    data = json.loads(DOCUMENT)
    data["row_ways"][1].update(fields)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not the JSON"),
        ("[]", "format"),
        ("{}", "format"),
        ("[" * 100_000, "not the JSON"),
        ('{"a":' * 100_000, "not the JSON"),
        ('{"format": 1' + "0" * 5000 + "}", "not the JSON"),
        (DOCUMENT[:-20], "not the JSON"),
        (DOCUMENT.replace('"n_trials": 20', '"n_trials": 20, "n_trials": 21'), "twice"),
        (DOCUMENT.replace('"noise_s": 0.01', '"noise_s": NaN'), "NaN"),
        (changed(format="pickle"), "format"),
        (changed(version=3), "version"),
        (changed(version=1), "exactly the fields format, version and entries$"),
        (changed(version=True), "version"),
        (changed(extra=1), "exactly"),
        (changed(entries={}), "entries"),
        (changed(row_ways=None), "row_ways must be a list"),
        (changed(row_ways=[{}]), "way of rows 1: way: lacks key"),
        (with_second_way(path="by air"), "way of rows 2: path: must be one of gather"),
        (with_second_way(created_s=4e9), "way of rows 2: created_s"),
        (changed(entries=[1]), "entry 1: entry: must be an object"),
        (with_second_entry(noise_s=-1), "entry 2: noise_s"),
        (with_second_entry(knobs={}), "entry 2: knobs: lacks unit_bytes"),
        (with_second_entry(model={"directed": True, "nodes": [], "edges": []}), r"entry 2: key\.model"),
    ],
)
def test_what_does_not_fit_is_refused_with_entry_and_field(text: str, message: str) -> None:
    with pytest.raises(RegistryError, match=message):
        read_document(io.StringIO(text))


@given(st.text())
@example('{"format": "sirtaki-registry", "version": 2, "entries": null, "row_ways": []}')
def test_any_text_is_a_document_or_a_registry_error(text: str) -> None:
    with pytest.raises(RegistryError):
        read_document(io.StringIO(text))


@given(st.data())
def test_a_document_with_bytes_changed_is_one_or_a_registry_error(data: st.DataObject) -> None:
    raw = bytearray(DOCUMENT.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read_document(io.TextIOWrapper(io.BytesIO(bytes(raw)), encoding="utf-8"))
    except RegistryError:
        return
    assert read_document(io.StringIO(exported(*found))) == found
