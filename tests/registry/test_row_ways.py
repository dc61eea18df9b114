"""Ways of rows are found for rows that are touched alike, and for no others."""

import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sirtaki.comm.sparse.plan import COLD_PATHS as PLANS_COLD_PATHS
from sirtaki.comm.sparse.plan import SparsePath
from sirtaki.errors import RegistryError
from sirtaki.registry.entry import COLD_PATHS, PATHS, STALE_AFTER_S, RowsKey, RowWay, Skew, nearest_way, way_from_json

KEY = RowsKey(
    topology="ab" * 32,
    ranks=4,
    n_rows=100_000,
    row_bytes=256,
    dtype="float32",
    versions=(("sirtaki", "0.1"),),
    fixed=(("streams", "2"),),
)


def zipf(exponent: float, touched: float = 8000.0, rows: int = 20_000) -> Skew:
    share = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    places = sorted({*np.geomspace(1, rows, 24).astype(int).tolist()})
    curve = tuple((place, float(share[place - 1] / share[-1])) for place in places)
    return Skew(touched=touched, union=0.7 * touched, curve=curve)


def way(skew: Skew | None = None, name: str = "table", **changes: Any) -> RowWay:
    given = RowWay(
        key=KEY,
        name=name,
        skew=skew or zipf(1.0),
        path="hot_cold",
        cold="owner",
        block_rows=1,
        n_hot=300,
        span_s=0.01,
    )
    return replace(given, **changes)


def test_rows_that_are_touched_alike_are_near_whichever_the_popular_ones_are() -> None:
    here = zipf(1.0)
    assert here.distance(here) == 0.0
    assert here.distance(zipf(1.02, touched=8500, rows=21_000)) < 1.0


@pytest.mark.parametrize(
    "other",
    [zipf(0.6), zipf(1.5), zipf(1.0, touched=11_000), replace(zipf(1.0), union=8000.0)],
    ids=["flatter", "steeper", "more is touched", "by fewer ranks at once"],
)
def test_another_skew_is_not(other: Skew) -> None:
    assert zipf(1.0).distance(other) > 1.0
    assert other.distance(zipf(1.0)) == pytest.approx(zipf(1.0).distance(other))
    assert nearest_way([way(other)], zipf(1.0), name="table") is None


def test_coverage_between_points_goes_by_the_logarithm_of_the_rows() -> None:
    skew = Skew(touched=1.0, union=1.0, curve=((1, 0.2), (100, 0.6), (10_000, 1.0)))
    assert [skew.covered(rows) for rows in (1, 10, 100, 1000, 10_000, 10**6)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1, 1]
    )


def test_the_way_of_the_same_name_comes_first_then_the_nearest() -> None:
    far, near = way(zipf(1.04), name="far"), way(zipf(1.01), name="near")
    assert nearest_way([far, near], zipf(1.0), name="table") is near
    assert nearest_way([far, near], zipf(1.0), name="far") is far
    assert nearest_way([], zipf(1.0), name="table") is None


def test_old_ways_are_not_taken() -> None:
    assert nearest_way([way(created_s=time.time() - STALE_AFTER_S - 60)], zipf(1.0), name="table") is None


def test_one_way_is_kept_for_each_parameter_and_kind_of_skew() -> None:
    assert way().id == way(path="gather", n_hot=0, span_s=1.0).id
    others = (way(name="other"), way(zipf(0.6)), way(key=replace(KEY, ranks=8)), way(key=replace(KEY, aggregator=True)))
    assert len({way().id, *(other.id for other in others)}) == 5


def test_a_way_can_be_written_and_read_again() -> None:
    given = way(key=replace(KEY, aggregator=True), aggregated=True)
    assert way_from_json(json.loads(json.dumps(given.to_json()))) == given


def skew(**changes: Any) -> dict[str, Any]:
    return {"touched": 2.0, "union": 1.0, "curve": [[1, 1.0]], **changes}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_rows": 0}, "block_rows"),
        ({"n_hot": 0}, "n_hot"),
        ({"n_hot": KEY.n_rows + 1}, "n_hot"),
        ({"path": "gather"}, "n_hot: must be a whole number from 0 to 0"),
        ({"path": "\x1b"}, "path: must be one of gather, owner, hot_cold, blocks, dense"),
        ({"cold": "dense"}, "cold"),
        ({"aggregated": True}, "aggregated"),
        ({"span_s": float("nan")}, "span_s"),
        ({"created_s": time.time() + 1e6}, "created_s: .* is in the future"),
        ({"skew": skew(curve=[])}, "skew"),
        ({"skew": skew(touched=0.0)}, r"skew\.touched"),
        ({"skew": skew(union=1e6)}, r"skew\.union"),
        ({"skew": skew(curve=[[2, 0.5], [1, 1.0]])}, r"skew\.curve: must ascend"),
        ({"skew": skew(curve=[[1, 1.0, 2]])}, r"skew\.curve"),
        ({"skew": skew(curve=[[1, 1.5]])}, r"skew\.curve"),
        ({"skew": skew(curve=[[KEY.n_rows + 1, 1.0]])}, r"skew\.curve"),
        ({"key": {}}, "key: lacks topology"),
        ({"key": {**KEY.to_json(), "aggregator": 1}}, r"key\.aggregator"),
        ({"more": 1}, "unknown field 'more'"),
    ],
)
def test_what_is_wrong_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(RegistryError, match=message):
        way_from_json({**way().to_json(), **wrong})


def test_paths_are_those_of_plans() -> None:
    assert set(PATHS) == {path.value for path in SparsePath}
    assert set(COLD_PATHS) == {path.value for path in PLANS_COLD_PATHS}
