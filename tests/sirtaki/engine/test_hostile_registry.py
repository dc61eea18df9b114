"""With any JSON in the registry, a job gets valid settings or none, and never an exception."""

import json
import logging
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conformance.store import changed_in, make_entry, places_in
from fakes.tuned import KnobJob
from fakes.warmup_job import ListArm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sirtaki.autotune.knobs import KIB, MIB, Cut, Knobs, KnobSpace
from sirtaki.autotune.meta.session import SessionResult
from sirtaki.autotune.trial import Arm, Trial
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.engine.settings import Settings
from sirtaki.engine.tuning.cache import TuningCache
from sirtaki.engine.tuning.knob_search import KnobSearch
from sirtaki.engine.tuning.plans import checked_plans
from sirtaki.registry.opening import open_store
from sirtaki.registry.schema import JobRecord

ROUTE = (TransportKind.GLOO, Algorithm.FLAT)
SPACE = KnobSpace(routes=(ROUTE,), unit_bytes=(64 * KIB, MIB), streams=(1, 2, 4))
DEFAULT = Knobs(unit_bytes=512 * KIB, streams=1, transport=ROUTE[0])
LAYERS = 4
NUMEL = LAYERS * 72

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(0, 300),
    st.floats(),
    st.sampled_from([1e300, -1e-300, 1e-9, 5.0, float("nan"), float("inf")]),
    st.text(max_size=4),
    st.lists(st.tuples(st.integers(-1, NUMEL + 1), st.integers(-1, 5), st.none() | st.integers(-1, 600)), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.lists(st.integers(), max_size=3),
)
CUTS = st.lists(st.integers(1, NUMEL), min_size=1, max_size=4, unique=True).map(
    lambda stops: [[stop, index % 2, None] for index, stop in enumerate(sorted(stops))]
)


def a_job(registry: Path, warmup_iterations: int = 12) -> tuple[TuningCache, GradientLayout, Settings]:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(LAYERS)))
    environ = {"SIRTAKI_REGISTRY": str(registry), "SIRTAKI_WARMUP_ITERATIONS": str(warmup_iterations)}
    given = Settings.from_environ(environ)
    cache = TuningCache(given, list(model.parameters()), ["host"] * 2)
    model(torch.randn(2, 8))
    sizes = tuple(parameter.numel() for parameter in reversed(list(model.parameters())))
    return cache, GradientLayout(sizes=sizes), given


def tuned(registry: Path, arms: Sequence[Arm] | None = None) -> list[Knobs]:
    """Run a warm-up on made-up times. Return the settings that ran, all valid; the last one is kept."""
    cache, layout, given = a_job(registry, 12 if arms is None else 40)  # in 12 no arm is asked
    search = KnobSearch(given, cache, default=DEFAULT, arms=arms, discarded_iterations=1)
    job, rng, ran = KnobJob(search, [layout], SPACE), np.random.default_rng(0), list[Knobs]()

    def span_s(knobs: Knobs) -> float:
        assert checked_plans(knobs, [layout])
        assert knobs in SPACE
        ran.append(knobs)
        return 1 + rng.random()

    job.begin()
    job.run(span_s, at_most=200)
    assert job.kept, "the warm-up does not end"
    return [*ran, job.running]


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a registry with this job's entry, an unfinished one of a similar job, and an unrelated one."""
    registry = tmp_path_factory.mktemp("registry") / "registry.db"
    cache, layout, _ = a_job(registry)
    cache.look_up([layout], SPACE)
    knobs = Knobs(unit_bytes=MIB, streams=2, transport=ROUTE[0], cuts=(Cut(stop=100), Cut(stop=NUMEL, stream=1)))
    result = SessionResult(
        knobs=knobs,
        default_span_s=2.0,
        best_span_s=1.0,
        noise_s=0.1,
        arm="grid",
        n_trials=3,
        iterations_used=10,
        reason="",
        tuned=True,
    )
    assert cache.keep(result, [Trial(arm="grid", knobs=knobs, iterations=2, span_s=1.0)], complete=True, links={})
    store = open_store(str(registry))
    (own,) = store.all(JobRecord)
    store.put_all([make_entry(model=own.model, ranks=4), make_entry(model=own.model, ranks=6, complete=False)])
    store.close()
    return registry


def fresh(folder: Path) -> Path:
    """Return a folder without files of earlier examples."""
    return Path(tempfile.mkdtemp(dir=folder)) / "registry.db"


@pytest.mark.lengthy
@given(st.data())
@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_warm_up_ends_well_with_any_remembered_setting(entries: Path, tmp_path: Path, data: st.DataObject) -> None:
    registry = fresh(tmp_path)
    registry.write_bytes(entries.read_bytes())
    connection = sqlite3.connect(registry)
    for name, body in connection.execute("SELECT id, body FROM entries").fetchall():
        entry = json.loads(body)
        for _ in range(data.draw(st.integers(0, 3))):
            place = data.draw(st.sampled_from(places_in(entry)))
            entry = changed_in(entry, place, data.draw(VALUES))
        if isinstance(entry, dict) and isinstance(entry.get("knobs"), dict) and data.draw(st.booleans()):
            entry["knobs"]["cuts"] = data.draw(CUTS)
        connection.execute("UPDATE entries SET body = ? WHERE id = ?", (json.dumps(entry), name))
    connection.commit()
    connection.close()
    tuned(registry)


@pytest.mark.lengthy
@given(st.data())
@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_warm_up_ends_well_with_any_changed_bytes(entries: Path, tmp_path: Path, data: st.DataObject) -> None:
    registry = fresh(tmp_path)
    raw = bytearray(entries.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(raw) - 1))
        length = data.draw(st.sampled_from([1, 16, 4096]))
        raw[start : start + length] = data.draw(st.binary(min_size=1, max_size=1)) * len(raw[start : start + length])
    registry.write_bytes(raw)
    tuned(registry)


class Broken:
    """An arm that raises in every method."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


def faults() -> list[tuple[str, str]]:
    return [
        ("sirtaki.engine.tuning.knob_search.make_planners", "search methods of the tuner have failed"),
        ("sirtaki.engine.tuning.knob_search.default_arms", "tuning has failed"),
        ("sirtaki.engine.tuning.knob_search.TuningSession", "tuning has failed"),
        ("sirtaki.engine.tuning.memory.neighbours", "without the registry"),
        ("sirtaki.engine.tuning.memory.open_store", "without the registry"),
        ("sirtaki.engine.tuning.cache.make_key", "without the registry"),
        ("sirtaki.engine.tuning.cache.JobRecord", "without the registry"),
    ]


@pytest.mark.lengthy
@pytest.mark.parametrize(("place", "says"), faults(), ids=lambda value: value.rpartition(".")[2])
def test_a_fault_anywhere_is_logged_once_and_tuning_continues_without_the_registry(
    place: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(*args: object, **options: object) -> None:
        raise ZeroDivisionError(place)

    open_store(str(tmp_path / "registry.db")).close()
    monkeypatch.setattr(place, fault)
    cache, layout, given = a_job(tmp_path / "registry.db")
    where = "rank 0, iteration 7"
    search = KnobSearch(given, cache, default=DEFAULT, arms=None, discarded_iterations=1, where=lambda: where)
    job = KnobJob(
        search,
        [layout],
        SPACE,
        make_model=lambda: None if "planners" not in place else model_that_fails(),
        where=lambda: where,
    )
    job.begin()
    assert job.searched
    job.run(lambda knobs: 1.0)
    assert not any(record.exc_info for record in caplog.records if record.levelno >= logging.WARNING)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    (told,) = [warning for warning in warnings if says in warning]
    assert ("; rank 0, iteration 7)" in told) == (
        says in ("search methods of the tuner have failed", "tuning has failed")
    ), told
    assert job.running in SPACE
    assert job.controller.failed == (says == "tuning has failed")
    if job.controller.failed:
        assert "training continues with the default setting" in told
        assert job.running == DEFAULT


def model_that_fails() -> None:
    raise ZeroDivisionError("planners")


def test_arms_that_raise_at_every_touch_leave_the_default(tmp_path: Path) -> None:
    *_, kept = tuned(tmp_path / "registry.db", [Broken("a"), Broken("b")])
    assert kept == DEFAULT


def test_one_unit_is_tried_once_on_however_many_streams(tmp_path: Path) -> None:
    the_same = DEFAULT.but(streams=4, unit_bytes=MIB)
    *ran, _ = tuned(tmp_path / "registry.db", [ListArm(*[the_same] * 1000)])
    assert set(ran) == {DEFAULT}
