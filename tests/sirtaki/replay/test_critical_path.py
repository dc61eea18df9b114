"""What a step is made of, in words that add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.graphs import drawn_graphs
from fakes.played_jobs import made_job, plan_of
from fakes.replays import LINK, SIZES, on_one_host, over_a_link, played
from hypothesis import given, settings

from sirtaki.analysis.global_graph import critical_path, parts
from sirtaki.analysis.job_model import JobModel
from sirtaki.autotune.model.replayer import Graph, replay
from sirtaki.measures import LinkModel


def shares(job: JobModel) -> dict[str, float]:
    return {part.words: part.share for part in parts(played(job))}


@settings(max_examples=100, deadline=None)
@given(drawn_graphs())
def test_the_path_has_no_hole_from_beginning_to_end(one: Graph) -> None:
    found = replay(one)
    path = critical_path(found)
    assert sum(visit.end_s - visit.begin_s + visit.gap_s for visit in path) == pytest.approx(found.total_s)
    assert sum(part.share for part in parts(found)) == pytest.approx(1.0 if found.total_s else 0.0)


def test_a_slow_link_is_most_of_the_step() -> None:
    job = over_a_link(iterations=1)
    found = shares(job)
    assert next(iter(found)) == "is the link between hosts"
    assert found["is the link between hosts"] > 0.4
    assert found["is the forward pass"] == pytest.approx(0.02 / played(job).total_s)


def test_a_straggler_is_called_by_name_for_what_it_takes_longer() -> None:
    durations = (0.02, 0.01, 0.03, 0.02)
    job = made_job(
        durations_s={0: durations, 1: durations, 2: tuple(2 * seconds for seconds in durations)},
        sizes=SIZES,
        plan=plan_of(SIZES, (4,)),
        link=LinkModel(alpha_s=0.0, throughput=(1e9,)),
        data_s={0: 0.01, 1: 0.01, 2: 0.01},
    )
    found = shares(job)
    assert found["waits for rank 2's backward pass"] == pytest.approx(0.08 / played(job).total_s, rel=1e-3)
    assert found["is the backward pass"] == pytest.approx(0.08 / played(job).total_s, rel=1e-3)


def test_a_loader_that_only_one_rank_waits_for_is_called_by_name() -> None:
    durations = (0.02, 0.01, 0.03, 0.02)
    job = made_job(
        durations_s=dict.fromkeys(range(4), durations),
        sizes=SIZES,
        plan=plan_of(SIZES, (4,)),
        link=LINK,
        data_s={3: 0.5},
    )
    found = parts(played(job))
    assert found[0].words == "waits for rank 3's data loader"
    assert found[0].describe().endswith("% of the step waits for rank 3's data loader")
    assert found[0].seconds == pytest.approx(0.5)


def test_ranks_that_share_processors_say_so() -> None:
    found = shares(on_one_host(ranks=4, capacity=2))
    assert found["is sharing the processors of host0"] > 0.3
    assert "is sharing the processors of host0" not in shares(on_one_host(ranks=4))


def test_seconds_are_those_of_a_mean_iteration() -> None:
    once, twice = over_a_link(iterations=1), over_a_link(iterations=2)
    assert sum(part.seconds for part in parts(played(twice))) == pytest.approx(played(once).total_s, rel=1e-6)


def test_results_that_ranks_see_late_are_named() -> None:
    job = over_a_link(iterations=1)
    (each,) = job.iterations
    late = {
        rank: tuple(
            replace(piece, waits=tuple((key, 0.5) for key, _ in piece.waits)) if rank == 1 else piece
            for piece in program
        )
        for rank, program in each.programs.items()
    }
    found = parts(played(replace(job, iterations=(replace(each, programs=late),))))
    assert (found[0].words, found[0].seconds) == ("is ranks that see results later than the first", pytest.approx(0.5))
