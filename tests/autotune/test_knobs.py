"""Knobs expand to plans that hold their invariants, go through JSON, and know their space."""

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sirtaki.autotune.knobs import KIB, MIB, Cut, Knobs, KnobSpace, format_bytes
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.errors import PlanError

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


def knobs(*, planned: st.SearchStrategy[Any]) -> st.SearchStrategy[Knobs]:
    return st.builds(
        Knobs,
        unit_bytes=st.integers(1, 64 * KIB),
        streams=st.integers(1, 24),
        threads=st.none() | st.sampled_from([128, 512, 4096]),
        algorithm=st.sampled_from(Algorithm),
        transport=st.sampled_from(TransportKind),
        cuts=planned,
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


def test_an_empty_layout_has_an_empty_plan() -> None:
    plan = Knobs(unit_bytes=MIB, streams=3, transport=TransportKind.GLOO).to_plan(GradientLayout(sizes=()))
    assert plan.units == ()


@given(knobs=knobs(planned=st.none() | cuts))
def test_knobs_survive_json_and_can_be_keys(knobs: Knobs) -> None:
    again = Knobs.from_json(json.loads(json.dumps(knobs.to_json())))
    assert again == knobs
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
        {"cuts": [[1]]},
    ],
)
def test_what_is_no_knobs_is_refused(broken: dict[str, Any]) -> None:
    good = Knobs(unit_bytes=MIB, streams=1, transport=TransportKind.GLOO).to_json()
    with pytest.raises(PlanError):
        Knobs.from_json({**good, **broken})


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
def test_a_space_holds_what_every_knob_permits_and_nothing_else(outside: dict[str, Any]) -> None:
    inside = {"unit_bytes": 2 * MIB, "streams": 2, "transport": TransportKind.GLOO}
    assert Knobs(**inside) in SPACE
    assert Knobs(**{**inside, **outside}) not in SPACE


def test_a_count_has_itself_and_the_permitted_ones_next_to_it_around() -> None:
    space = KnobSpace(routes=((TransportKind.GLOO, Algorithm.FLAT),), streams=(1, 2, 4, 8), threads=(None, 256, 512))
    assert [space.streams_around(count) for count in (1, 2, 8)] == [(1, 2), (1, 2, 4), (4, 8)]
    assert space.streams_around(3) == ()
    assert space.threads_around(None) == (None, 256)


def test_explicit_cuts_bring_their_own_threads() -> None:
    knobs = Knobs(unit_bytes=MIB, streams=1, threads=4096, transport=TransportKind.GLOO, cuts=(Cut(stop=1),))
    assert knobs in SPACE


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
