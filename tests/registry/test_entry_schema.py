import copy
import json
from typing import Any

import pytest
from conformance.store import make_entry
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.autotune.knobs import Cut, Knobs
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.errors import RegistryError
from sirtaki.measures import LinkModel
from sirtaki.registry.entry import Entry, checked_knobs, entry_from_json

GOOD = make_entry().to_json()

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places_in(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a JSON document."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(place for key, value in items for place in places_in(value, (*path, key)))]


PLACES = places_in(GOOD)


def changed(path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    data = copy.deepcopy(GOOD)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return data


def test_json_comes_back_as_the_same_entry() -> None:
    assert entry_from_json(json.loads(json.dumps(GOOD))) == make_entry()


@given(st.sampled_from(PLACES), JSON)
def test_any_value_in_any_place_is_an_entry_or_a_registry_error(path: tuple[Any, ...], value: Any) -> None:
    try:
        entry = entry_from_json(changed(path, value))
    except RegistryError as err:
        message = str(err)
    else:
        assert isinstance(entry, Entry)
        assert entry_from_json(json.loads(json.dumps(entry.to_json()))) == entry
        return
    assert message.isprintable()
    assert len(message) < 1000


@given(JSON)
def test_any_document_is_an_entry_or_a_registry_error(data: Any) -> None:
    with pytest.raises(RegistryError):
        entry_from_json(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("knobs", "streams"), 0, r"knobs\.streams: must be a whole number from 1 to 1024, not 0"),
        (("knobs", "streams"), True, r"knobs\.streams"),
        (("knobs", "unit_bytes"), 1e6, r"knobs\.unit_bytes"),
        (("knobs", "unit_bytes"), 10**400, r"knobs\.unit_bytes"),
        (("knobs", "transport"), "carrier pigeon", r"knobs\.transport"),
        (("knobs", "transport"), ["gloo"], r"knobs\.transport"),
        (("knobs", "cuts"), [[5, 0, None], [5, 0, None]], r"knobs\.cuts\[1\]\.stop"),
        (("knobs", "cuts"), [[5, 4, None]], r"knobs\.cuts\[0\]\.stream"),
        (("knobs", "cuts"), [[5, 0]], r"knobs\.cuts\[0\]"),
        (("knobs", "cuts"), [[n + 1, 0, None] for n in range(100_001)], r"knobs\.cuts: must be a list of at most"),
        (("best_span_s",), 0, "best_span_s"),
        (("best_span_s",), float("nan"), "best_span_s"),
        (("best_span_s",), "0.5", "best_span_s"),
        (("complete",), 1, "complete"),
        (("arm",), "grid\x1b[31m", "arm: must be printable"),
        (("arm",), "\ud800", "arm: must be printable"),
        (("trials", 0, "status"), "won", r"trials\[0\]\.status"),
        (("trials", 0, "knobs", "streams"), None, r"trials\[0\]\.knobs\.streams"),
        (("link", "throughput"), [1.0, 0.0], r"link\.throughput\[1\]"),
        (("link", "throughput"), [], r"link\.throughput: must not be empty"),
        (("link", "alpha_s"), -1.0, r"link\.alpha_s"),
        (("provenance", "versions"), {"torch": 2}, r"provenance\.versions\.torch"),
        (("provenance", "created_s"), -1, r"provenance\.created_s"),
        (("provenance", "created_s"), 1e10, r"provenance\.created_s: 10000000000 is in the future"),
        (("best_span_s",), 1e-6, r"best_span_s: 1e\+06 times as fast"),
        (("default_span_s",), 1e-6, r"best_span_s: 2e-06 times as fast"),
        (("model", "edges"), [[0, 1, ""], [1, 2, ""], [2, 0, ""]], "model: .* no cycle"),
        (("model", "directed"), False, "model: .* directed"),
        (("key", "fixed"), {"streams": 4}, r"key\.fixed\.streams"),
        (("key", "gradients"), 5, r"key\.gradients"),
        (("key", "world_size"), 8, r"key\.world_size"),
        (("key", "model"), "00", r"key\.model"),
        (("key", "topology"), "00", r"key\.topology"),
        (("model", "nodes", 0, 2), -5, "model: size of node 0"),
        (("topology", "places"), [], "topology: "),
        (("surprise",), 1, "unknown field 'surprise'"),
    ],
)
def test_what_is_invalid_is_refused_by_name(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(RegistryError, match=message):
        entry_from_json(changed(path, value))


def test_entries_of_old_releases_do_not_say_which_gradients_they_reduced() -> None:
    data = copy.deepcopy(GOOD)
    del data["key"]["gradients"], data["key"]["fixed"]
    entry = entry_from_json(data)
    assert (entry.key.gradients, entry.key.fixed) == ("", ())
    assert entry.to_json() == data


def test_entries_of_old_releases_write_their_link_in_another_way() -> None:
    old = {"latency_s": 1e-3, "bandwidth_bytes_per_s": 1e8, "concurrency": [1.0, 1.5]}
    assert entry_from_json(changed(("link",), old)).link == LinkModel(alpha_s=1e-3, throughput=(1e8, 1.5e8))
    unknown = entry_from_json(changed(("link",), {**old, "concurrency": []})).link
    assert unknown == LinkModel(alpha_s=1e-3, throughput=(1e8,))


def test_a_missing_field_is_named() -> None:
    with pytest.raises(RegistryError, match="lacks noise_s"):
        entry_from_json({name: value for name, value in GOOD.items() if name != "noise_s"})


@given(
    st.builds(
        Knobs,
        unit_bytes=st.integers(1, 1 << 30),
        streams=st.integers(4, 24),
        transport=st.sampled_from(TransportKind),
        algorithm=st.sampled_from(Algorithm),
        threads=st.none() | st.integers(1, 4096),
        cuts=st.none()
        | st.lists(st.integers(1, 10**9), unique=True, max_size=5).map(
            lambda stops: tuple(
                Cut(stop=stop, stream=index % 4, threads=512) for index, stop in enumerate(sorted(stops))
            )
        ),
    )
)
def test_all_knobs_of_the_tuner_pass(knobs: Knobs) -> None:
    assert Knobs.from_json(checked_knobs("knobs", json.loads(json.dumps(knobs.to_json())))) == knobs
