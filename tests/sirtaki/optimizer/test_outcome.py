"""What is found is judged by the whole job, and what settings fix stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.compiled_jobs import compiled_job
from fakes.drawn_jobs import drawn_job
from fakes.played_jobs import GLOO
from fakes.replays import on_one_host, over_a_link, times

from sirtaki.analysis.plan_search import STREAMS_ON_ONE_HOST, View, choices_of, optimize, planned
from sirtaki.analysis.what_if import WORTH_A_LINE, with_knobs
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.measures import LinkModel


def test_the_plan_brings_what_is_said() -> None:
    job = drawn_job(9)
    outcome = optimize(job, least_bytes=16 * 1024)
    assert outcome.gain > 0.05
    assert times(with_knobs(job, outcome.knobs)).iteration_s == pytest.approx(outcome.after.iteration_s)
    assert outcome.before.iteration_s == pytest.approx(outcome.as_recorded.iteration_s, rel=0.1)
    assert outcome.price_error == pytest.approx(outcome.before.iteration_s / outcome.as_recorded.iteration_s - 1)
    assert outcome.without_communication_s < outcome.after.iteration_s
    assert outcome.plan.knobs == outcome.knobs
    assert (outcome.plan.ranks, outcome.plan.sizes) == (len(job.ranks), (job.buffers[0].layout.sizes,))
    assert sum(part.share for part in outcome.parts_after) == pytest.approx(1.0)


def test_where_nothing_is_faster_the_recorded_plan_stays() -> None:
    first = optimize(drawn_job(9), least_bytes=16 * 1024)
    again = optimize(with_knobs(drawn_job(9), first.knobs), least_bytes=16 * 1024)
    assert again.gain <= 0.002
    job = over_a_link(cuts=(4,), streams=1)
    alone = replace(job, links={}, link=replace(job.link, totals=(1.0,)) if job.link else None)
    fastest = optimize(alone, settings={"SIRTAKI_STREAMS": "1"}, least_bytes=10**6)
    assert fastest.gain >= 0


def test_what_variables_fix_is_not_changed() -> None:
    job = over_a_link()
    other = (TransportKind.MPI, Algorithm.FLAT)
    job = replace(job, links={**job.links, other: job.links[GLOO]})
    view = View(job)
    free = choices_of(job, view, {}, least_bytes=1)
    assert free.routes == (GLOO, other)
    assert free.streams[-1] == 24
    fixed = choices_of(job, view, {"SIRTAKI_TRANSPORT": "mpi", "SIRTAKI_STREAMS": "3"}, least_bytes=1)
    assert (fixed.routes, fixed.streams) == ((other,), (3,))


def test_on_one_host_there_are_as_many_streams_as_shared_memory_has() -> None:
    job = on_one_host()
    view = View(job)
    assert choices_of(job, view, {}, least_bytes=1).streams[-1] == STREAMS_ON_ONE_HOST
    assert choices_of(job, view, {"SIRTAKI_TRANSPORT": "gloo"}, least_bytes=1).streams[-1] == 24


SLOW = LinkModel(alpha_s=0.001, throughput=(2e7, 3e7, 4e7), host_s=0.0)


def test_a_compiled_model_is_advised_to_be_compiled_in_parts_where_its_gradients_could_hide() -> None:
    job = compiled_job(SLOW)
    found, whole = optimize(job), planned(job)
    size = found.plan.part_bytes
    assert size
    assert found.plan_alone == whole.after
    assert found.after.iteration_s < 0.8 * whole.after.iteration_s
    assert found.before == whole.before
    (extra,) = found.extras
    assert extra.line == f"torch.compile(model, backend=hvd.early_gradients(part_bytes={size}))"
    assert times(with_knobs(extra.apply(job), found.knobs)).iteration_s == pytest.approx(found.after.iteration_s)


@pytest.mark.parametrize(
    "link",
    [
        LinkModel(alpha_s=1e-4, throughput=(2e9,), host_s=0.0),  # next to nothing is left to hide
        LinkModel(alpha_s=1e-3, throughput=(4e4, 8e4), host_s=0.0),  # 100 s: there is nothing to hide it behind
    ],
)
def test_where_parts_bring_nothing_the_plan_says_that_the_model_stays_whole(link: LinkModel) -> None:
    found = optimize(compiled_job(link))
    assert (found.plan.part_bytes, found.extras, found.plan_alone) == (0, (), None)


def test_of_models_that_were_not_compiled_nothing_is_said() -> None:
    assert optimize(drawn_job(9), least_bytes=16 * 1024).plan.part_bytes is None


@pytest.mark.slow
def test_parts_are_never_advised_for_less_than_a_line_of_code_is_worth() -> None:
    for backward_s in (0.005, 0.02, 0.1, 2.0):
        for rate in (2e7, 2e8, 1e9):
            job = compiled_job(
                LinkModel(alpha_s=2e-4, throughput=(rate, 1.5 * rate), host_s=0.0), backward_s=backward_s
            )
            found = optimize(job, limit_s=0.3)
            if found.plan_alone is not None:
                assert found.after.iteration_s <= (1 - WORTH_A_LINE) * found.plan_alone.iteration_s
            else:
                assert found.plan.part_bytes == 0
