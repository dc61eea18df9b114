"""What is proposed where arms have nothing new."""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import pytest
from fakes.warmup_job import DEFAULT, SPACE, Job, ListArm, session

from sirtaki.autotune.knobs import KIB, KnobLattice, Knobs
from sirtaki.autotune.meta.session import FEW
from sirtaki.autotune.trial import Proposal

TINY = replace(SPACE, unit_bytes=(64 * KIB, 128 * KIB))
UNTUNED = replace(DEFAULT, unit_bytes=128 * KIB, streams=1)


def of_two_units(knobs: Knobs) -> Hashable:
    """One unit, or two of them on one or two streams."""
    units = 1 if knobs.unit_bytes > 70 * KIB else 2
    return units, min(units, knobs.streams)


class SameAgain(ListArm):
    """Proposes one setting for ever."""

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        return [Proposal(arm=self.name, knobs=UNTUNED)]


@pytest.mark.parametrize("arm", [SameAgain(), ListArm()])
def test_where_few_settings_differ_those_that_nobody_proposes_are_tried_too(arm: ListArm) -> None:
    span_s = {(1, 1): 1.0, (2, 1): 1.1, (2, 2): 0.5}
    job = Job(
        session(arm, space=TINY, default=UNTUNED, identity=of_two_units),
        span_of=lambda knobs: span_s[of_two_units(knobs)],  # type: ignore[index]
    ).run()
    assert {of_two_units(now.knobs) for now in job.assignments} == set(span_s)
    assert of_two_units(job.result.knobs) == (2, 2)


def test_where_many_differ_the_search_ends() -> None:
    assert len(KnobLattice(TINY)) > FEW
    job = Job(session(SameAgain(), space=TINY, default=UNTUNED), span_of=lambda knobs: 1.0).run()
    assert {now.knobs for now in job.assignments} == {UNTUNED}
