"""Plans of sparse gradients hold together by construction."""

from typing import Any

import pytest

from sirtaki.comm.sparse.plan import SparsePath, SparsePlan
from sirtaki.errors import PlanError


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"path": SparsePath.HOT_COLD}, "has 0 of them"),
        ({"path": SparsePath.GATHER, "hot_rows": (1,)}, "has 1 of them"),
        ({"path": SparsePath.HOT_COLD, "hot_rows": (3, 3)}, "ascend"),
        ({"path": SparsePath.HOT_COLD, "hot_rows": (3,), "cold": SparsePath.DENSE}, "not by dense"),
        ({"path": SparsePath.BLOCKS, "block_rows": 0}, "at least one row"),
        ({"path": SparsePath.OWNER, "aggregated": True}, "the path owner has none"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], found: str) -> None:
    with pytest.raises(PlanError, match=found):
        SparsePlan(**given)


def test_fingerprints_differ_where_anything_does() -> None:
    plans = [
        *(SparsePlan(path=path) for path in SparsePath if path is not SparsePath.HOT_COLD),
        SparsePlan(path=SparsePath.BLOCKS, block_rows=2),
        SparsePlan(path=SparsePath.HOT_COLD, hot_rows=(1, 2)),
        SparsePlan(path=SparsePath.HOT_COLD, hot_rows=(1, 3)),
        SparsePlan(path=SparsePath.HOT_COLD, hot_rows=(1, 3), cold=SparsePath.OWNER),
        SparsePlan(path=SparsePath.HOT_COLD, hot_rows=(1, 3), aggregated=True, cold=SparsePath.OWNER),
    ]
    assert len({plan.fingerprint() for plan in plans}) == len(plans)
    assert plans[-1].describe() == "hot_cold (2 hot rows through the aggregator, the others by owner)"
    assert plans[-2].describe() == "hot_cold (2 hot rows, the others by owner)"
    assert plans[-5].describe() == "blocks (of 2)"
    assert plans[0].describe() == "gather"
