"""The lattice lies inside its space, tells its points apart, and finds the nearest one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.autotune.knobs import KIB, MIB, Cut, KnobLattice, Knobs, KnobSpace
from sirtaki.comm.plan import Algorithm, TransportKind

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
def test_every_point_lies_in_the_space_once_with_both_ends_of_the_unit_sizes(space: KnobSpace, steps: int) -> None:
    lattice = KnobLattice(space, steps_per_octave=steps)
    assert all(knobs in space for knobs in lattice.points)
    assert len(set(lattice.points)) == len(lattice) == np.prod(lattice.shape)
    assert (lattice.unit_bytes[0], lattice.unit_bytes[-1]) == space.unit_bytes


@given(space=spaces())
def test_coordinates_lie_in_the_unit_cube_and_tell_points_apart(space: KnobSpace) -> None:
    lattice = KnobLattice(space)
    assert lattice.coordinates.shape[0] == len(lattice)
    assert np.all((lattice.coordinates >= 0.0) & (lattice.coordinates <= 1.0))
    assert len(np.unique(lattice.coordinates, axis=0)) == len(lattice)


@given(space=spaces(), cube=st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4))
def test_any_point_of_the_cube_snaps_to_a_point_that_knows_its_index(space: KnobSpace, cube: list[float]) -> None:
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


@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(unit_bytes=MIB, streams=1, transport=TransportKind.GLOO, cuts=(Cut(stop=1),)),
        Knobs(unit_bytes=KIB, streams=1, transport=TransportKind.GLOO),
        Knobs(unit_bytes=MIB, streams=1, transport=TransportKind.NCCL),
    ],
)
def test_explicit_cuts_and_foreign_knobs_have_no_place(knobs: Knobs) -> None:
    lattice = KnobLattice(KnobSpace(routes=(GLOO,), unit_bytes=(MIB, 4 * MIB)))
    assert lattice.index_of(knobs) is None
    assert lattice.place(knobs) is None


def test_a_route_has_only_points_with_as_many_streams_as_it_offers() -> None:
    flat, tree = (TransportKind.GLOO, Algorithm.FLAT), (TransportKind.GLOO, Algorithm.HIERARCHICAL)
    space = KnobSpace(routes=(flat, tree), streams=(1, 2, 4, 8), most_streams=((tree, 4),))
    lattice = KnobLattice(space)
    assert len(lattice.points) == len(lattice.coordinates) == len(set(lattice.points))
    assert {point.streams for point in lattice.points if point.algorithm is Algorithm.HIERARCHICAL} == {1, 2, 4}
    assert {point.streams for point in lattice.points if point.algorithm is Algorithm.FLAT} == {1, 2, 4, 8}
    assert all(lattice.at((0, streams, 0, 1)) in space for streams in range(4))
