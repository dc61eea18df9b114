"""The same job under other plans: as if it had been recorded with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.played_jobs import GLOO, made_job, plan_of, record
from fakes.replays import LINK, SIZES, on_one_host, over_a_link, times
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.analysis.job_model import JobModel, histories, job_model
from sirtaki.analysis.what_if import with_knobs, with_plans
from sirtaki.autotune.knobs import Knobs
from sirtaki.comm.plan import TransportKind
from sirtaki.errors import ReplayError

CUTS = [(4,), (1, 4), (2, 3, 4), (1, 2, 3, 4)]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(CUTS), st.integers(1, 3), st.sampled_from(CUTS), st.integers(1, 3), st.booleans())
def test_another_plan_takes_what_a_job_with_it_takes(
    cuts: tuple[int, ...], streams: int, others: tuple[int, ...], other_streams: int, recorded: bool
) -> None:
    def job(cuts: tuple[int, ...], streams: int) -> JobModel:
        return made_job(
            durations_s={0: (0.02, 0.01, 0.03, 0.02), 1: (0.03, 0.01, 0.01, 0.02)},
            sizes=SIZES,
            plan=plan_of(SIZES, cuts, streams=streams),
            link=LINK,
            copy_s=0.0,
            iterations=2,
        )

    was = job(cuts, streams)
    if recorded:
        was = job_model(histories(record(was)))
    asked = with_plans(was, {0: plan_of(SIZES, others, streams=other_streams)})
    expected = times(job(others, other_streams))
    assert times(asked).iteration_s == pytest.approx(expected.iteration_s, rel=1e-3)
    assert times(asked).backward_s == pytest.approx(expected.backward_s, rel=1e-3)


def test_copies_take_as_long_by_the_byte_wherever_they_come() -> None:
    asked = with_plans(over_a_link(cuts=(1, 2, 4)), {0: plan_of(SIZES, (4,))})
    copies = [piece for piece in asked.iterations[0].programs[0] if piece.activity.value == "copy"]
    assert sum(piece.seconds for piece in copies) == pytest.approx(0.003)
    assert [piece.issues for piece in copies if piece.issues] == [((0, 0, 6500),)]


def test_units_end_in_the_midst_of_gradients_and_what_never_comes_leaves_last() -> None:
    job = over_a_link(cuts=(4,))
    plan = Knobs(unit_bytes=4 * 1500, streams=2, transport=TransportKind.GLOO).to_plan(job.buffers[0].layout)
    dropped = replace(
        job,
        iterations=tuple(
            replace(
                each,
                programs={
                    rank: tuple(
                        replace(piece, ready=tuple(key for key in piece.ready if key != (0, 3))) for piece in one
                    )
                    for rank, one in each.programs.items()
                },
            )
            for each in job.iterations
        ),
    )
    for one in (job, dropped):
        asked = with_plans(one, {0: plan})
        issued = [key for piece in asked.iterations[0].programs[1] for key in piece.issues]
        assert issued == [(0, unit.start, unit.stop) for unit in plan.units]
        assert times(asked).iteration_s > 0


def test_knobs_cut_every_buffer() -> None:
    job = on_one_host(cuts=(4,))
    asked = with_knobs(job, Knobs(unit_bytes=4000, streams=2, transport=TransportKind.GLOO))
    assert len(asked.iterations[0].operations) == 7
    assert {one.lane for one in asked.iterations[0].operations} == {"gloo stream 0", "gloo stream 1"}


def test_an_unknown_route_another_layout_and_missing_gradients_are_refused() -> None:
    job = over_a_link()
    with pytest.raises(ReplayError, match=r"nothing is known of mpi flat.*known: gloo flat"):
        with_knobs(job, Knobs(unit_bytes=4000, streams=1, transport=TransportKind.MPI))
    with pytest.raises(ReplayError, match="plan is of 10 elements, buffer 0 has 6500"):
        with_plans(job, {0: plan_of((10,), (1,))})
    bare = replace(
        job,
        iterations=tuple(
            replace(
                each,
                programs={
                    rank: tuple(replace(piece, ready=()) for piece in one) for rank, one in each.programs.items()
                },
            )
            for each in job.iterations
        ),
    )
    with pytest.raises(ReplayError, match="gradients of buffer 0 come was not recorded"):
        with_plans(bare, {0: plan_of(SIZES, (4,))})


def test_a_probed_route_can_be_asked_for_though_nothing_used_it() -> None:
    job = over_a_link()
    other = (TransportKind.MPI, GLOO[1])
    probed = replace(job, links={**job.links, other: replace(LINK, throughput=(1e4,))})
    knobs = Knobs(unit_bytes=40000, streams=1, transport=TransportKind.MPI)
    assert times(with_knobs(probed, knobs)).iteration_s > 2 * times(job).iteration_s
