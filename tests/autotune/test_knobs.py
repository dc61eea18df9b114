"""Knobs: their plans, JSON, their space, the search lattice, and trials."""

import json
import math
import pickle
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sirtaki.autotune.knobs import KIB, MIB, Cut, KnobLattice, Knobs, KnobSpace, Lossy, NcclWays, format_bytes
from sirtaki.autotune.trial import Trial, TrialStatus
from sirtaki.comm.plan import Algorithm, GradientLayout, NcclWay, TransportKind
from sirtaki.errors import PlanError, TuningError

layouts = st.builds(
    GradientLayout,
    sizes=st.lists(st.integers(0, 5000), max_size=12).map(tuple),
    itemsize_bytes=st.sampled_from([1, 2, 4, 8]),
)


cuts = st.lists(
    st.builds(
        Cut, stop=st.integers(1, 20_000), stream=st.integers(0, 3), threads=st.none() | st.sampled_from([512, 1024])
    ),
    max_size=6,
    unique_by=lambda cut: cut.stop,
).map(lambda drawn: tuple(sorted(drawn, key=lambda cut: cut.stop)))


compressors = st.sampled_from(["", "int8", "topk:0.01"])


ways = st.none() | st.sampled_from(NcclWay)


def knobs(*, planned: st.SearchStrategy[Any]) -> st.SearchStrategy[Knobs]:
    return st.builds(
        Knobs,
        unit_bytes=st.integers(1, 64 * KIB),
        streams=st.integers(4, 24),  # of which cuts use four
        threads=st.none() | st.sampled_from([128, 512, 4096]),
        algorithm=st.sampled_from(Algorithm),
        transport=st.sampled_from(TransportKind),
        cuts=planned,
        lossy=st.builds(Lossy, large=compressors, embeddings=compressors, small=compressors),
        nccl=st.builds(NcclWays, small=ways, large=ways),
    )


@given(knobs=knobs(planned=st.none()), layout=layouts)
def test_uniform_units_cover_each_element_once_and_none_is_larger_than_asked(
    knobs: Knobs, layout: GradientLayout
) -> None:
    assume(layout.numel * layout.itemsize_bytes / knobs.unit_bytes < 2000)
    plan = knobs.to_plan(layout)
    covered = [element for unit in plan.units for element in (unit.start, unit.stop)]
    assert plan.numel == layout.numel
    assert covered == sorted(covered)
    assert sum(unit.numel for unit in plan.units) == layout.numel
    largest = max(1, knobs.unit_bytes // layout.itemsize_bytes)
    assert all(unit.numel == largest for unit in plan.units[:-1])
    assert all(unit.numel <= largest for unit in plan.units)
    assert [unit.stream for unit in plan.units] == [index % knobs.streams for index in range(len(plan.units))]
    assert {unit.algorithm for unit in plan.units} <= {knobs.algorithm}


@given(drawn=cuts.filter(bool))
def test_explicit_cuts_become_the_units_as_they_are(drawn: tuple[Cut, ...]) -> None:
    layout = GradientLayout(sizes=(drawn[-1].stop,))
    knobs = Knobs(unit_bytes=MIB, streams=4, transport=TransportKind.NCCL, threads=2048, cuts=drawn)
    units = knobs.to_plan(layout).units
    assert [unit.stop for unit in units] == [cut.stop for cut in drawn]
    assert [unit.stream for unit in units] == [cut.stream for cut in drawn]
    assert [unit.threads for unit in units] == [cut.threads or 2048 for cut in drawn]


def test_cuts_of_another_layout_are_refused() -> None:
    knobs = Knobs(unit_bytes=MIB, streams=1, transport=TransportKind.GLOO, cuts=(Cut(stop=10), Cut(stop=20)))
    for numel in (15, 19, 21):
        with pytest.raises(PlanError):
            knobs.to_plan(GradientLayout(sizes=(numel,)))


@given(knobs=knobs(planned=st.none() | cuts))
def test_knobs_survive_json_and_can_be_keys(knobs: Knobs) -> None:
    data = knobs.to_json()
    again = Knobs.from_json(json.loads(json.dumps(data)))
    assert again == knobs
    assert json.loads(json.dumps(data)) == data  # lists, not tuples: what is kept is compared with what was read
    assert hash(again) == hash(knobs)


@pytest.mark.parametrize(
    "broken",
    [
        {"unit_bytes": 0},
        {"unit_bytes": "big"},
        {"streams": -1},
        {"streams": None},
        {"threads": 0},
        {"algorithm": "tree"},
        {"transport": "pigeon"},
        {"cuts": 3},
        {"cuts": [["1", 0, None]]},
    ],
)
def test_invalid_knobs_are_rejected(broken: dict[str, Any]) -> None:
    good = Knobs(unit_bytes=MIB, streams=1, transport=TransportKind.GLOO).to_json()
    with pytest.raises(PlanError):
        Knobs.from_json({**good, **broken})


def test_units_are_compressed_by_the_codec_of_their_size_class() -> None:
    layout = GradientLayout(sizes=(30_000, 400, 600, 20_000), names=("w", "b", "n", "e"), embeddings=("e",))
    cut = tuple(Cut(stop=stop) for stop in (30_000, 31_000, 51_000))
    lossy = Lossy(large="int8", embeddings="topk:0.01")
    knobs = Knobs(unit_bytes=MIB, streams=1, transport=TransportKind.GLOO, cuts=cut, lossy=lossy)
    assert [unit.compressor for unit in knobs.to_plan(layout).units] == ["int8", "", "topk:0.01"]
    assert knobs.describe().endswith("1 stream, compressed by int8 (large), topk:0.01 (embeddings)")
    space = KnobSpace(routes=(knobs.route,), lossy=("int8", "topk:0.01"))
    assert knobs in space
    assert knobs not in KnobSpace(routes=(knobs.route,), lossy=("int8",))
    assert "lossy" not in Knobs(unit_bytes=MIB, streams=1, transport=TransportKind.GLOO).to_json()


def test_nccl_reduces_units_by_the_setting_of_their_size_class() -> None:
    layout = GradientLayout(sizes=(2 * MIB,), itemsize_bytes=4)
    cuts = tuple(Cut(stop=stop) for stop in (MIB, MIB + MIB // 4, MIB + MIB // 4 + 1, 2 * MIB))
    ways = NcclWays(small=NcclWay.RING_LL, large=NcclWay.TREE_SIMPLE)
    knobs = Knobs(unit_bytes=MIB, streams=1, transport=TransportKind.NCCL, cuts=cuts, nccl=ways)
    large, small = NcclWay.TREE_SIMPLE, NcclWay.RING_LL
    assert [unit.nccl for unit in knobs.to_plan(layout).units] == [large, large, small, large]
    assert knobs.describe().endswith("1 stream, NCCL by ring/ll (small), tree/simple (large)")
    assert [unit.nccl for unit in knobs.but(nccl=NcclWays(small=small)).to_plan(layout).units][:2] == [None, None]


def test_nccl_settings_apply_to_nccl_only() -> None:
    told = NcclWays(large=NcclWay.RING_SIMPLE)
    knobs = Knobs(unit_bytes=MIB, streams=1, transport=TransportKind.NCCL, nccl=told)
    space = KnobSpace(routes=(knobs.route, GLOO), nccl=(told, NcclWays(small=NcclWay.RING_LL)))
    assert knobs in space
    assert knobs.but(nccl=NcclWays(small=NcclWay.RING_LL, large=NcclWay.RING_SIMPLE)) in space
    assert knobs.but(nccl=NcclWays(small=NcclWay.RING_SIMPLE)) not in space
    assert knobs.but(transport=TransportKind.GLOO) not in space
    assert KnobLattice(space).index_of(knobs) is None
    assert replace(space, unit_bytes=(MIB, MIB), streams=(1,), routes=(knobs.route,)).has_choices


def test_settings_without_nccl_knobs_are_unchanged() -> None:
    knobs = Knobs(unit_bytes=MIB, streams=1, transport=TransportKind.NCCL)
    assert "nccl" not in knobs.to_json()
    assert knobs.but(nccl=NcclWays()) == Knobs.from_json(knobs.to_json()) == knobs
    (unit,) = knobs.to_plan(GradientLayout(sizes=(4,))).to_json()["units"]
    assert "nccl" not in unit
    with pytest.raises(PlanError, match=r"communication setting .* is invalid"):
        Knobs.from_json({**knobs.to_json(), "nccl": {"large": "ring/ll256"}})


@pytest.mark.parametrize("name", ["int4", "INT8", "topk:.01"])
def test_compressors_in_knobs_have_their_one_name(name: str) -> None:
    with pytest.raises(PlanError, match="compressor"):
        Lossy(large=name)


def test_knobs_describe_themselves_in_words() -> None:
    base = Knobs(unit_bytes=4 * MIB, streams=2, transport=TransportKind.SHARED_MEMORY)
    assert base.describe() == "shared_memory flat, 4 MiB units, 2 streams"
    planned = Knobs(
        unit_bytes=MIB,
        streams=1,
        threads=512,
        algorithm=Algorithm.HIERARCHICAL,
        transport=TransportKind.NCCL,
        cuts=(Cut(stop=1), Cut(stop=2)),
    )
    assert planned.describe() == "nccl hierarchical, 2 planned units, 1 stream, 512 threads"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (256 * KIB, "256 KiB"), (1500000, "1.43 MiB"), (2**30, "1 GiB")]
)
def test_byte_counts_read_well(count: int, text: str) -> None:
    assert format_bytes(count) == text


SPACE = KnobSpace(
    routes=((TransportKind.GLOO, Algorithm.FLAT), (TransportKind.MPI, Algorithm.HIERARCHICAL)),
    unit_bytes=(MIB, 16 * MIB),
    streams=(1, 2, 4),
    threads=(None, 512),
)


@pytest.mark.parametrize(
    "outside",
    [
        {"unit_bytes": MIB - 1},
        {"unit_bytes": 16 * MIB + 1},
        {"streams": 3},
        {"threads": 1024},
        {"transport": TransportKind.MPI},
        {"algorithm": Algorithm.HIERARCHICAL},
    ],
)
def test_a_space_contains_exactly_the_permitted_values_of_every_knob(outside: dict[str, Any]) -> None:
    inside = {"unit_bytes": 2 * MIB, "streams": 2, "transport": TransportKind.GLOO}
    assert Knobs(**inside) in SPACE
    assert Knobs(**{**inside, **outside}) not in SPACE


def test_a_count_has_itself_and_the_permitted_ones_next_to_it_around() -> None:
    space = KnobSpace(routes=((TransportKind.GLOO, Algorithm.FLAT),), streams=(1, 2, 4, 8), threads=(None, 256, 512))
    assert [space.streams_around(count) for count in (1, 2, 8)] == [(1, 2), (1, 2, 4), (4, 8)]
    assert space.streams_around(3) == ()
    assert space.threads_around(None) == (None, 256)


@pytest.mark.parametrize(
    "broken",
    [
        {"unit_bytes": (2, 1)},
        {"unit_bytes": (0, 1)},
        {"streams": ()},
        {"streams": (2, 1)},
        {"streams": (0, 1)},
        {"streams": (1, 1)},
        {"threads": ()},
        {"routes": ()},
    ],
)
def test_an_impossible_space_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        KnobSpace(**{"routes": SPACE.routes, **broken})


GLOO, MPI = (TransportKind.GLOO, Algorithm.FLAT), (TransportKind.MPI, Algorithm.FLAT)


@st.composite
def spaces(draw: st.DrawFn) -> KnobSpace:
    low, high = sorted((draw(st.integers(1, 256 * MIB)), draw(st.integers(1, 256 * MIB))))
    return KnobSpace(
        routes=draw(st.sampled_from([(GLOO,), (GLOO, MPI)])),
        unit_bytes=(low, high),
        streams=tuple(sorted(draw(st.sets(st.integers(1, 24), min_size=1, max_size=4)))),
        threads=draw(st.sampled_from([(None,), (512, 1024), (None, 128, 4096)])),
    )


@given(space=spaces(), steps=st.integers(1, 4))
def test_every_point_is_in_the_space_once_with_both_ends_of_the_unit_sizes(space: KnobSpace, steps: int) -> None:
    lattice = KnobLattice(space, steps_per_octave=steps)
    assert all(knobs in space for knobs in lattice.points)
    assert len(set(lattice.points)) == len(lattice) == np.prod(lattice.shape)
    assert (lattice.unit_bytes[0], lattice.unit_bytes[-1]) == space.unit_bytes


@given(space=spaces(), cube=st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4))
def test_any_point_of_the_cube_snaps_to_a_point_with_its_index(space: KnobSpace, cube: list[float]) -> None:
    lattice = KnobLattice(space)
    knobs = lattice.snap(np.array(cube))
    index = lattice.index_of(knobs)
    assert index is not None
    assert lattice.at(index) == knobs


def test_knobs_between_two_points_count_as_the_nearer() -> None:
    lattice = KnobLattice(KnobSpace(routes=(GLOO,), unit_bytes=(MIB, 4 * MIB), streams=(1, 2)), steps_per_octave=1)
    index = lattice.index_of(Knobs(unit_bytes=int(1.9 * MIB), streams=2, transport=TransportKind.GLOO))
    assert index is not None
    assert lattice.at(index).unit_bytes == 2 * MIB


def test_a_route_has_only_points_with_as_many_streams_as_it_offers() -> None:
    flat, tree = (TransportKind.GLOO, Algorithm.FLAT), (TransportKind.GLOO, Algorithm.HIERARCHICAL)
    space = KnobSpace(routes=(flat, tree), streams=(1, 2, 4, 8), most_streams=((tree, 4),))
    lattice = KnobLattice(space)
    assert len(lattice.points) == len(lattice.coordinates) == len(set(lattice.points))
    assert {point.streams for point in lattice.points if point.algorithm is Algorithm.HIERARCHICAL} == {1, 2, 4}
    assert {point.streams for point in lattice.points if point.algorithm is Algorithm.FLAT} == {1, 2, 4, 8}
    assert all(lattice.at((0, streams, 0, 1)) in space for streams in range(4))


KNOBS = Knobs(unit_bytes=MIB, streams=2, transport=TransportKind.MPI)


trials = st.builds(
    Trial,
    arm=st.text("abcπ _-", min_size=1, max_size=20),
    knobs=st.just(KNOBS),
    iterations=st.integers(0, 100),
    span_s=st.floats(min_value=1e-9, max_value=1e6) | st.just(math.inf),
    noise_s=st.floats(min_value=0.0, max_value=1e6),
    status=st.sampled_from(TrialStatus),
    was_best=st.booleans(),
)


@pytest.mark.parametrize("setting", [KNOBS, KNOBS.but(lossy=Lossy(large="int8"), cuts=(Cut(stop=3),))])
def test_a_setting_is_pickled_without_asking_other_modules(setting: Knobs, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}, as all modules are for msgspec.UNSET")

    monkeypatch.setattr(sys, "modules", {"first": Asked("first"), **sys.modules})
    assert pickle.loads(pickle.dumps(setting)) == setting


@given(trial=trials)
def test_a_trial_survives_json(trial: Trial) -> None:
    text = json.dumps(trial.to_json(), allow_nan=False)
    assert Trial.from_json(json.loads(text)) == trial


@pytest.mark.parametrize(
    "broken",
    [
        {"span_s": -1.0},
        {"span_s": math.nan},
        {"span_s": "soon"},
        {"noise_s": math.inf},
        {"iterations": -3},
        {"iterations": math.inf},
        {"status": "fine"},
        {"knobs": {"streams": 1}},
        {"knobs": None},
    ],
)
def test_an_invalid_trial_is_rejected(broken: dict[str, Any]) -> None:
    good = Trial(arm="grid", knobs=KNOBS, iterations=2, span_s=0.1).to_json()
    with pytest.raises(TuningError, match="trial"):
        Trial.from_json({**good, **broken})
    for field in ("arm", "knobs", "iterations", "span_s"):
        with pytest.raises(TuningError, match=field):
            Trial.from_json({name: value for name, value in good.items() if name != field})
