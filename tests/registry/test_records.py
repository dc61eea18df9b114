"""Records: which of two is kept, and the validation of imported ones."""

import copy
import io
import json
import math
import time
import unicodedata
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from conformance.graphs import chain_graph
from conformance.store import changed_in, make_entry, make_shard_way, make_way, places_in
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs, to_builtins

from sirtaki.autotune.knobs import Cut, Knobs, NcclWays
from sirtaki.comm.plan import Algorithm, NcclWay, TransportKind
from sirtaki.comm.sparse.plan import SparsePath
from sirtaki.errors import RegistryError
from sirtaki.fields import Text, checked, parsed
from sirtaki.measures import LinkModel
from sirtaki.registry.documents import read_document, write_document
from sirtaki.registry.schema import RECORDS, STALE_AFTER_S, JobRecord, RowsKey, RowsRecord, Skew, StoredSetting

DAY_1 = 1.7e9


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"best_span_s": 0.9}, {"best_span_s": 0.1, "complete": False, "created_s": 2e9}),  # it has come to its end
        ({"n_trials": 9, "complete": False, "best_span_s": 0.9}, {"n_trials": 3, "complete": False}),  # longer search
        ({"best_span_s": 0.505, "created_s": DAY_1 + 1}, {"best_span_s": 0.5}),  # newer, and no worse than the noise
        ({"best_span_s": 0.5}, {"best_span_s": 0.6, "created_s": DAY_1 + 1, "streams": 8}),  # better by more than that
        ({"best_span_s": 0.6, "created_s": DAY_1 + STALE_AFTER_S + 1, "streams": 8}, {"best_span_s": 0.5}),
        ({"best_span_s": 0.2, "created_s": DAY_1 - 100, "streams": 8}, {"best_span_s": 0.5}),
        ({"best_span_s": 0.9, "created_s": DAY_1 + 1}, {"best_span_s": 0.2}),  # what the same knobs are worth today
        ({"best_span_s": 0.8, "default_span_s": 3.0, "created_s": DAY_1 + 1}, {}),  # against each job's own default
    ],
)
def test_of_two_entries_one_replaces_the_other(better: dict[str, Any], worse: dict[str, Any]) -> None:
    assert make_entry(**better).supersedes(make_entry(**worse))
    assert not make_entry(**worse).supersedes(make_entry(**better))


def test_old_entries_keep_their_ids() -> None:
    assert structs.replace(make_entry().key, gradients="", fixed={}).digest() == "f2386e8d0859c78f54b693320cbdc438"


def test_of_three_records_saved_in_any_order_a_complete_one_stays() -> None:
    entries = [make_entry(), make_entry(complete=False, n_trials=99), make_entry(best_span_s=0.4, streams=8)]
    for order in permutations(entries):
        kept = order[0]
        for entry in order[1:]:
            if entry.supersedes(kept):
                kept = entry
        assert kept == entries[2]


# ── what is checked ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_text_is_printable() -> None:
    for character in map(chr, range(0x110000)):
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp", "Zs") and character != " ":
            with pytest.raises(RegistryError, match=r"^x: expected printable text"):
                checked(Text, f"a{character}", at="x")
    assert checked(Text, "π — 漢 🙂", at="x") == "π — 漢 🙂"
    with pytest.raises(RegistryError, match="length <= 1000"):
        checked(Text, "a" * 1001)
    with pytest.raises(RegistryError, match="printable"):
        checked(Text, "a\n")


@pytest.mark.parametrize("text", ["{", b"\xff", None, "[" * 100_000, "\ud800", '{"a": ' * 100_000])
def test_invalid_json_is_a_registry_error(text: Any) -> None:
    with pytest.raises(RegistryError):
        parsed(dict, text)


# ── entries ──────────────────────────────────────────────────────────────────────────────────────────────────────────


GOOD = make_entry().to_json()

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)

SAMPLES = [make_entry(), make_way(), make_shard_way()]
PLACES = [(type(one), one.to_json(), place) for one in SAMPLES for place in places_in(one.to_json())]


def test_there_is_a_sample_of_every_record() -> None:
    assert {type(one) for one in SAMPLES} == set(RECORDS)


@pytest.mark.lengthy
@given(st.sampled_from(PLACES), JSON)
def test_any_value_in_any_place_is_a_record_or_a_registry_error(
    sample: tuple[type[StoredSetting], Any, tuple[Any, ...]], value: Any
) -> None:
    kind, good, place = sample
    try:
        record = kind.from_json(changed_in(good, place, value))
    except RegistryError as err:
        message = str(err)
    else:
        assert kind.from_json(json.loads(json.dumps(record.to_json()))) == record
        return
    assert message.isprintable()
    assert len(message) < 1000


@given(st.sampled_from(RECORDS), JSON)
def test_any_document_is_a_registry_error(kind: type[StoredSetting], data: Any) -> None:
    with pytest.raises(RegistryError):
        kind.from_json(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("knobs", "streams"), 0, r"^knobs\.streams: expected int >= 1"),
        (("knobs", "streams"), True, r"knobs\.streams"),
        (("knobs", "unit_bytes"), 1e6, r"knobs\.unit_bytes"),
        (("knobs", "unit_bytes"), 10**400, r"knobs\.unit_bytes"),
        (("knobs", "transport"), "carrier pigeon", r"knobs\.transport"),
        (("knobs", "transport"), ["gloo"], r"knobs\.transport"),
        (
            ("knobs", "cuts"),
            [[5, 0, None], [5, 0, None]],
            r"knobs: .* cuts: expected ascending stops",
        ),
        (("knobs", "cuts"), [[5, 4, None]], r"knobs: .* cuts: .* streams below 4, found .*stream=4"),
        (("knobs", "cuts"), [[5, 0, None, 1]], r"knobs\.cuts\[0\]"),
        (("knobs", "surprise"), 1, "knobs: object contains unknown field surprise"),
        (
            ("knobs", "cuts"),
            [[n + 1, 0, None] for n in range(100_001)],
            r"knobs\.cuts: expected array of length <= 100000",
        ),
        (("best_span_s",), 0, "best_span_s"),
        (("best_span_s",), float("nan"), "best_span_s"),
        (("best_span_s",), "0.5", "best_span_s"),
        (("complete",), 1, "complete"),
        (("arm",), "grid\x1b[31m", "^arm: expected printable text"),
        (("arm",), "\ud800", "^arm: expected printable text"),
        (("trials", 0, "status"), "won", r"trials\[0\]\.status"),
        (("model",), None, r"model: expected"),
        (("trials", 0, "knobs", "streams"), None, r"trials\[0\]\.knobs\.streams"),
        (("link", "throughput"), [1.0, 0.0], r"link\.throughput\[1\]"),
        (("link", "throughput"), [], r"link\.throughput: expected array of length >= 1"),
        (("link", "alpha_s"), -1.0, r"link\.alpha_s"),
        (("provenance", "versions"), {"torch": 2}, r"provenance\.versions"),
        (("provenance", "created_s"), -1, r"provenance\.created_s"),
        (("provenance", "created_s"), 1e10, "created_s: expected a time before now .* found 10000000000"),
        (("best_span_s",), 1e-6, r"best_span_s must be .* found 1e\+06 times as fast"),
        (("default_span_s",), 1e-6, r"best_span_s must be .* found 2e-06 times as fast"),
        (("model", "directed"), False, "directed"),
        (("key", "fixed"), {"streams": 4}, r"key\.fixed"),
        (("key", "gradients"), 5, r"key\.gradients"),
        (("model", "nodes", 0, 2), -5, r"model\.nodes\[0\]"),
        (("topology", "places"), [], "number of ranks: expected 1 to"),
        (("surprise",), 1, "unknown field surprise"),
    ],
)
def test_an_invalid_record_is_rejected_by_name(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(RegistryError, match=message):
        JobRecord.from_json(changed_in(GOOD, path, value))


def test_entries_of_old_releases_do_not_say_which_gradients_they_reduced() -> None:
    data = copy.deepcopy(GOOD)
    del data["key"]["gradients"], data["key"]["fixed"]
    entry = JobRecord.from_json(data)
    assert (entry.key.gradients, entry.key.fixed) == ("", {})
    assert entry.to_json() == data


def test_entries_of_old_releases_write_their_link_in_another_way() -> None:
    old = {"latency_s": 1e-3, "bandwidth_bytes_per_s": 1e8, "concurrency": [1.0, 1.5]}
    assert JobRecord.from_json(changed_in(GOOD, ("link",), old)).link == LinkModel(
        alpha_s=1e-3, throughput=(1e8, 1.5e8)
    )
    unknown = JobRecord.from_json(changed_in(GOOD, ("link",), {**old, "concurrency": []})).link
    assert unknown == LinkModel(alpha_s=1e-3, throughput=(1e8,))


def test_a_missing_field_is_named() -> None:
    with pytest.raises(RegistryError, match="missing required field best_span_s"):
        JobRecord.from_json({name: value for name, value in GOOD.items() if name != "best_span_s"})


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
        nccl=st.builds(NcclWays, small=st.none() | st.sampled_from(NcclWay), large=st.sampled_from(NcclWay)),
    )
)
def test_all_knobs_of_the_tuner_pass(knobs: Knobs) -> None:
    found = JobRecord.from_json(changed_in(GOOD, ("knobs",), json.loads(json.dumps(knobs.to_json()))))
    assert found.knobs == knobs


# ── documents ──


def exported(records: list[StoredSetting]) -> str:
    file = io.StringIO()
    assert write_document(records, file) == len(records)
    return file.getvalue()


JOBS = [make_entry(), make_entry(model=chain_graph([4, 4])), make_entry(ranks=6, complete=False)]
ROWS, SHARDS = [make_way(), make_way(ranks=8)], [make_shard_way(), make_shard_way(ranks=8)]
DOCUMENT = exported([*JOBS, *ROWS, *SHARDS])


@pytest.mark.parametrize("records", [[], JOBS[:1], [*JOBS, *ROWS, *SHARDS]], ids=len)
def test_exported_records_can_be_imported(records: list[StoredSetting]) -> None:
    assert read_document(io.StringIO(exported(records))) == records


def test_documents_of_earlier_versions_are_read() -> None:
    data = json.loads(DOCUMENT)
    del data["shard_ways"]
    for version in (3, 2):
        assert read_document(io.StringIO(json.dumps({**data, "version": version}))) == [*JOBS, *ROWS]
    del data["row_ways"]
    assert read_document(io.StringIO(json.dumps({**data, "version": 1}))) == JOBS


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(DOCUMENT), **fields})


def with_second_entry(**fields: Any) -> str:
    data = json.loads(DOCUMENT)
    data["entries"][1].update(fields)
    return json.dumps(data)


def with_second_way(of: str = "row_ways", **fields: Any) -> str:
    data = json.loads(DOCUMENT)
    data[of][1].update(fields)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[]", "format"),
        ("{}", "format"),
        ("[" * 100_000, "is not JSON"),
        ('{"a":' * 100_000, "is not JSON"),
        ('{"format": 1' + "0" * 5000 + "}", "is not JSON"),
        (DOCUMENT[:-20], "is not JSON"),
        (DOCUMENT.replace('"n_trials": 20', '"n_trials": 20, "n_trials": 21'), "twice"),
        (DOCUMENT.replace('"noise_s": 0.01', '"noise_s": NaN'), "NaN"),
        (changed(format="pickle"), "format"),
        (changed(version=5), "version"),
        (changed(version=1), "file: expected the fields format, version, entries, found"),
        (changed(version=True), "version"),
        (changed(extra=1), "extra"),
        (changed(entries={}), "entries"),
        (changed(row_ways=None), "row_ways: expected a list"),
        (changed(row_ways=[{}]), "way of rows 1: JSON: object missing required field key"),
        (with_second_way(path="by air"), "way of rows 2: path: "),
        (with_second_way(created_s=4e9), "way of rows 2: .*created_s"),
        (with_second_way("shard_ways", streams=0), r"setting of sharded training 2: setting\.streams"),
        (with_second_way("shard_ways", behind=10), "setting of sharded training 2: behind must be at most 9, found 10"),
        (with_second_way("shard_ways", created_s=4e9), "setting of sharded training 2: .*created_s"),
        (changed(entries=[1]), "entry 1: JSON: expected object, got int"),
        (with_second_entry(noise_s=-1), "entry 2: noise_s"),
        (with_second_entry(knobs={}), "entry 2: knobs: object missing required field unit_bytes"),
        (with_second_entry(key={**GOOD["key"], "world_size": 8}), r"entry 2: .*key\.model"),
        (with_second_entry(**{**GOOD, "key": {**GOOD["key"], "world_size": 8}}), r"entry 2: .*key\.world_size"),
        (with_second_entry(**{**GOOD, "key": {**GOOD["key"], "topology": "00"}}), r"entry 2: .*key\.topology"),
        (
            with_second_entry(model={**GOOD["model"], "edges": [[0, 1, ""], [1, 2, ""], [2, 0, ""]]}),
            "entry 2: .* it has a cycle",
        ),
        (with_second_entry(model={"directed": True, "nodes": [], "edges": []}), r"entry 2: .*key\.model"),
    ],
)
def test_a_record_that_does_not_fit_is_rejected_with_entry_and_field(text: str, message: str) -> None:
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
    assert read_document(io.StringIO(exported(found))) == found


# ── ways of rows ──

KEY = RowsKey(
    topology="ab" * 32,
    ranks=4,
    n_rows=100_000,
    row_bytes=256,
    dtype="float32",
    versions={"sirtaki": "0.1"},
    fixed={"streams": "2"},
)


def zipf(exponent: float, touched: float = 8000.0, rows: int = 20_000) -> Skew:
    share = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    places = sorted({*np.geomspace(1, rows, 24).astype(int).tolist()})
    curve = tuple((place, float(share[place - 1] / share[-1])) for place in places)
    return Skew(touched=touched, union=0.7 * touched, curve=curve)


def way(skew: Skew | None = None, name: str = "table", **changes: Any) -> RowsRecord:
    given = RowsRecord(
        key=KEY,
        name=name,
        skew=skew or zipf(1.0),
        path=SparsePath.HOT_COLD,
        cold=SparsePath.OWNER,
        block_rows=1,
        n_hot=300,
        span_s=0.01,
        created_s=time.time(),
    )
    return structs.replace(given, **changes)


def test_rows_that_are_touched_alike_are_near_whichever_the_popular_ones_are() -> None:
    here = zipf(1.0)
    assert here.distance(here) == 0.0
    assert here.distance(zipf(1.02, touched=8500, rows=21_000)) < 1.0


@pytest.mark.parametrize(
    "other",
    [zipf(0.6), zipf(1.5), zipf(1.0, touched=11_000), structs.replace(zipf(1.0), union=8000.0)],
    ids=["flatter", "steeper", "more is touched", "by fewer ranks at once"],
)
def test_another_skew_is_not(other: Skew) -> None:
    assert zipf(1.0).distance(other) > 1.0
    assert other.distance(zipf(1.0)) == pytest.approx(zipf(1.0).distance(other))
    assert way(other).distance(("table", zipf(1.0))) == math.inf


def test_coverage_between_points_goes_by_the_logarithm_of_the_rows() -> None:
    skew = Skew(touched=1.0, union=1.0, curve=((1, 0.2), (100, 0.6), (10_000, 1.0)))
    assert [skew.covered(rows) for rows in (1, 10, 100, 1000, 10_000, 10**6)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1, 1]
    )


def test_rows_of_the_same_name_are_first_then_the_nearest() -> None:
    far, near = way(zipf(1.04), name="far"), way(zipf(1.01), name="near")
    assert near.distance(("table", zipf(1.0))) < far.distance(("table", zipf(1.0))) < math.inf
    assert far.distance(("far", zipf(1.0))) < near.distance(("far", zipf(1.0)))


@pytest.mark.parametrize(("record", "wanted"), [(way(), ("table", zipf(1.0))), (make_shard_way(), 0)])
def test_old_settings_are_of_no_use(record: StoredSetting, wanted: object) -> None:
    new, old = time.time(), time.time() - STALE_AFTER_S - 60
    assert structs.replace(record, created_s=new).distance(wanted) < math.inf
    assert structs.replace(record, created_s=old).distance(wanted) == math.inf


def test_one_way_is_kept_for_each_parameter_and_kind_of_skew() -> None:
    assert way().id == way(path=SparsePath.GATHER, n_hot=0, span_s=1.0).id
    others = (
        way(name="other"),
        way(zipf(0.6)),
        way(key=structs.replace(KEY, ranks=8)),
        way(key=structs.replace(KEY, aggregator=True)),
    )
    assert len({way().id, *(other.id for other in others)}) == 5


def test_a_way_can_be_written_and_read_again() -> None:
    given = way(key=structs.replace(KEY, aggregator=True), aggregated=True)
    assert RowsRecord.from_json(json.loads(json.dumps(given.to_json()))) == given


def skew(**changes: Any) -> dict[str, Any]:
    return {"touched": 2.0, "union": 1.0, "curve": [[1, 1.0]], **changes}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_rows": 0}, "block_rows"),
        ({"n_hot": 0}, "n_hot"),
        ({"n_hot": KEY.n_rows + 1}, "n_hot"),
        ({"path": "gather"}, "n_hot must be 0 to 0 .* with the path gather, found 300"),
        ({"path": "\x1b"}, "path: "),
        ({"cold": "dense"}, "cold"),
        ({"aggregated": True}, "aggregated"),
        ({"span_s": float("nan")}, "span_s"),
        ({"created_s": time.time() + 1e6}, "created_s: expected a time before now"),
        ({"skew": skew(curve=[])}, "skew"),
        ({"skew": skew(touched=0.0)}, r"skew\.touched"),
        ({"skew": skew(union=1e6)}, "skew must not have more accessed rows"),
        (
            {"skew": skew(curve=[[2, 0.5], [1, 1.0]])},
            r"skew\.curve: expected .* found \[1, 1\.0\] after \[2, 0\.5\]",
        ),
        ({"skew": skew(curve=[[1, 1.0, 2]])}, r"skew\.curve"),
        ({"skew": skew(curve=[[1, 1.5]])}, r"skew\.curve"),
        ({"skew": skew(curve=[[KEY.n_rows + 1, 1.0]])}, "skew must not have more"),
        ({"key": {}}, "key: object missing required field topology"),
        ({"key": {**to_builtins(KEY), "aggregator": 1}}, r"key\.aggregator"),
        ({"more": 1}, "unknown field more"),
    ],
)
def test_a_wrong_record_is_rejected(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(RegistryError, match=message):
        RowsRecord.from_json({**way().to_json(), **wrong})
