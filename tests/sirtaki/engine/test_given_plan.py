"""A plan given by the user is read, sent to all ranks, and run, or ignored with one sentence."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from rank_jobs import Job, played_on_ranks

from sirtaki.autotune.knobs import KIB, Cut, Knobs, KnobSpace, NcclWays
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.plan import Algorithm, CommPlan, GradientLayout, NcclWay, TransportKind
from sirtaki.engine.tuning.plans import GivenPlan, given_to_all, part_bytes_of
from sirtaki.errors import ConfigError

SIZES = (30_000, 20_000, 50_000, 2)
LAYOUTS = [GradientLayout(sizes=SIZES)]
SPACE = KnobSpace(routes=((TransportKind.GLOO, Algorithm.FLAT),), unit_bytes=(64 * KIB, 1024 * KIB), streams=(1, 2))
KNOBS = Knobs(
    unit_bytes=100 * KIB,
    streams=2,
    transport=TransportKind.GLOO,
    cuts=(Cut(stop=50_000), Cut(stop=100_002, stream=1)),
)
GIVEN = GivenPlan(source="plan.json", knobs=KNOBS, ranks=4, sizes=(SIZES,))


class Ranks:
    """A control plane of one rank that takes itself for one of several."""

    def __init__(self, rank: int = 0, size: int = 4) -> None:
        self.rank, self.size = rank, size

    def broadcast(self, value: object) -> object:
        return value


def ranks(rank: int = 0, size: int = 4) -> ControlPlane:
    return cast(ControlPlane, Ranks(rank, size))


def test_a_file_holds_knobs_and_their_units(tmp_path: Path) -> None:
    data = json.loads(json.dumps(GIVEN.to_json()))
    assert GivenPlan.from_json(data, source="plan.json") == GIVEN
    assert CommPlan.from_json(data) == KNOBS.to_plan(LAYOUTS[0])
    (tmp_path / "plan.json").write_text(json.dumps(data))
    for path in (tmp_path, tmp_path / "plan.json"):
        assert GivenPlan.read(path) == replace(GIVEN, source=str(tmp_path / "plan.json"))


def test_a_plan_file_with_nccl_settings_needs_nccl() -> None:
    told = NcclWays(small=NcclWay.RING_LL)
    given = replace(GIVEN, knobs=KNOBS.but(transport=TransportKind.NCCL, nccl=told))
    data = json.loads(json.dumps(given.to_json()))
    assert GivenPlan.from_json(data, source="plan.json") == given
    assert [unit["nccl"] for unit in data["units"]] == ["ring/ll", "ring/ll"]
    assert CommPlan.from_json(data) == given.knobs.to_plan(LAYOUTS[0])
    over_nccl = replace(SPACE, routes=((TransportKind.NCCL, Algorithm.FLAT),))
    misfit = given.misfit(LAYOUTS, 4, over_nccl)  # where the user has set NCCL_ALGO
    assert misfit.startswith("the plan plan.json has the setting nccl flat")
    assert given.misfit(LAYOUTS, 4, replace(over_nccl, nccl=(told,))) == ""


def test_the_part_on_compiled_graphs_is_read_separately(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for part_bytes in (None, 0, 3_000_000):
        path.write_text(json.dumps(replace(GIVEN, part_bytes=part_bytes).to_json()))
        assert GivenPlan.read(path).part_bytes == part_bytes
        assert part_bytes_of(str(tmp_path)) == part_bytes
    older = {key: value for key, value in GIVEN.to_json().items() if key != "part_bytes"}
    assert GivenPlan.from_json(older, source="plan.json") == GIVEN
    path.write_text("no plan")
    assert part_bytes_of(str(path)) is None  # the optimizer says why
    assert part_bytes_of(None) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "expected .*plan', 1.*, found .*, 2"),
        ({"format": "other"}, "found .*other.* with `sirtaki optimize`"),
        ({"knobs": {}}, "the communication plan x is invalid"),
        ({"sizes": [["many"]]}, "the communication plan x is invalid"),
        ({"ranks": None}, "the communication plan x is invalid"),
    ],
)
def test_an_invalid_plan_file_is_rejected_with_a_message(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GivenPlan.from_json({**GIVEN.to_json(), **changes}, source="x")


def test_an_unreadable_plan_file_is_reported_on_all_ranks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"SIRTAKI_PLAN: the communication plan .*nowhere cannot be read"):
        given_to_all(ranks(), str(tmp_path / "nowhere"))
    (tmp_path / "broken").write_text("{")
    with pytest.raises(ConfigError, match="broken cannot be read"):
        given_to_all(ranks(), str(tmp_path / "broken"))
    assert given_to_all(ranks(), str(tmp_path / "nowhere"), ranks_stay=False) is None
    assert f"Sirtaki ignores it: the communication plan {tmp_path}/nowhere cannot be read" in caplog.text
    assert given_to_all(ranks(), None) is None
    assert given_to_all(ranks(1), str(tmp_path / "nowhere")) is None  # rank 0 reads


@pytest.mark.parametrize(
    ("layouts", "size", "space", "words"),
    [
        (LAYOUTS, 2, SPACE, "is for 4 ranks, but this job has 2"),
        (
            [GradientLayout(sizes=(30_000, 70_000, 2))],
            4,
            SPACE,
            "is for other gradients: 3 of 100002 elements in all, but this model has 2 of 100002",
        ),
        (
            LAYOUTS,
            4,
            replace(SPACE, streams=(1,)),
            "has the setting gloo flat",
        ),
        (LAYOUTS * 2, 4, SPACE, "is for other gradients"),
    ],
)
def test_a_plan_that_does_not_fit_is_ignored_or_an_error_if_it_is_required(
    layouts: list[GradientLayout], size: int, space: KnobSpace, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=f"SIRTAKI_PLAN: the plan plan.json {words}"):
        GIVEN.accepted(layouts, ranks(1, size), space, must_run=True)
    for rank in range(2):
        assert GIVEN.accepted(layouts, ranks(rank, size), space, must_run=False) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert words in caplog.text
    assert "Sirtaki ignores it (the plan plan.json" in caplog.text


def test_gradients_may_be_ready_in_another_order(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    other = [GradientLayout(sizes=(50_000, 20_000, 30_000, 2))]
    assert GIVEN.accepted(other, ranks(), SPACE, must_run=True) == KNOBS
    assert (
        "the plan plan.json of SIRTAKI_PLAN fits this job and will run: gloo flat, 2 planned units, 2 streams"
        in caplog.text
    )
    torn = replace(GIVEN, knobs=KNOBS.but(cuts=(Cut(stop=7),)))
    assert "does not fit: the communication plan is for 7 gradient elements" in torn.misfit(LAYOUTS, 4, SPACE)


test_a_job_takes_it = played_on_ranks(
    "given_plan", Job(2, env={"SIRTAKI_REGISTRY": "off", "SIRTAKI_TRANSPORT": "gloo"})
)
