import io
import json
from typing import Any

import pytest
from conformance.store import make_entry
from hypothesis import example, given
from hypothesis import strategies as st

from sirtaki.errors import RegistryError
from sirtaki.registry.entry import Entry
from sirtaki.registry.exchange import read_entries, write_entries
from sirtaki.registry.model_graph import chain_graph


def exported(*entries: Entry) -> str:
    file = io.StringIO()
    assert write_entries(entries, file) == len(entries)
    return file.getvalue()


ENTRIES = [make_entry(), make_entry(model=chain_graph([4, 4])), make_entry(ranks=6, complete=False)]
DOCUMENT = exported(*ENTRIES)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_what_was_exported_comes_back(count: int) -> None:
    assert read_entries(io.StringIO(exported(*ENTRIES[:count]))) == ENTRIES[:count]


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(DOCUMENT), **fields})


def with_second_entry(**fields: Any) -> str:
    data = json.loads(DOCUMENT)
    data["entries"][1].update(fields)
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
        (changed(version=2), "version"),
        (changed(version=True), "version"),
        (changed(extra=1), "exactly"),
        (changed(entries={}), "entries"),
        (changed(entries=[1]), "entry 1: entry: must be an object"),
        (with_second_entry(noise_s=-1), "entry 2: noise_s"),
        (with_second_entry(knobs={}), "entry 2: knobs: lacks unit_bytes"),
        (with_second_entry(model={"directed": True, "nodes": [], "edges": []}), r"entry 2: key\.model"),
    ],
)
def test_what_does_not_fit_is_refused_with_entry_and_field(text: str, message: str) -> None:
    with pytest.raises(RegistryError, match=message):
        read_entries(io.StringIO(text))


@given(st.text())
@example('{"format": "sirtaki-registry", "version": 1, "entries": null}')
def test_any_text_is_entries_or_a_registry_error(text: str) -> None:
    with pytest.raises(RegistryError):
        read_entries(io.StringIO(text))


@given(st.data())
def test_a_document_with_bytes_changed_is_entries_or_a_registry_error(data: st.DataObject) -> None:
    raw = bytearray(DOCUMENT.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        entries = read_entries(io.TextIOWrapper(io.BytesIO(bytes(raw)), encoding="utf-8"))
    except RegistryError:
        return
    assert read_entries(io.StringIO(exported(*entries))) == entries
