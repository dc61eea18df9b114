"""The grid covers the space early and once."""

import numpy as np
import pytest

from sirtaki.autotune.arms.techniques import GridArm, halton, radical_inverse
from sirtaki.autotune.knobs import MIB, KnobLattice, Knobs, KnobSpace
from sirtaki.autotune.trial import Trial
from sirtaki.comm.plan import Algorithm, TransportKind

SPACE = KnobSpace(routes=((TransportKind.GLOO, Algorithm.FLAT), (TransportKind.MPI, Algorithm.FLAT)))


def test_the_radical_inverse_mirrors_digits() -> None:
    assert [radical_inverse(i, 2) for i in range(5)] == [0.0, 0.5, 0.25, 0.75, 0.125]
    assert radical_inverse(5, 3) == pytest.approx(2 / 3 + 1 / 9)  # 12 in base 3


def test_the_order_holds_every_point_once() -> None:
    lattice = KnobLattice(SPACE)
    order = list(halton(lattice))
    assert len(order) == len(set(order)) == len(lattice)


def test_the_first_proposals_are_spread_over_every_axis() -> None:
    first = [proposal.knobs for proposal in GridArm(SPACE).ask(12)]
    assert {knobs.transport for knobs in first} == {TransportKind.GLOO, TransportKind.MPI}
    octaves = np.log2([knobs.unit_bytes / SPACE.unit_bytes[0] for knobs in first])
    assert octaves.min() <= 3
    assert octaves.max() >= 9
    assert min(knobs.streams for knobs in first) <= 2
    assert max(knobs.streams for knobs in first) >= 12


def test_what_has_been_measured_is_not_proposed_whoever_asked() -> None:
    arm = GridArm(SPACE)
    first, second = (proposal.knobs for proposal in arm.ask(2))
    arm.tell([Trial(arm="another", knobs=first, iterations=2, span_s=1.0)])
    assert arm.ask()[0].knobs == second


def test_the_grid_ends() -> None:
    arm = GridArm(KnobSpace(routes=SPACE.routes[:1], unit_bytes=(MIB, 4 * MIB), streams=(1, 2)))
    seen: set[Knobs] = set()
    while proposals := arm.ask():
        seen.add(proposals[0].knobs)
        arm.tell([Trial(arm="grid", knobs=proposals[0].knobs, iterations=2, span_s=1.0)])
    assert len(seen) == 6
