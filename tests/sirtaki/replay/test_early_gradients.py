"""A compiled backward pass in parts: nothing is lost, gradients come early, and cuts are paid for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.compiled_jobs import compiled_job
from fakes.replays import over_a_link, times

from sirtaki.analysis.job_model import JobModel
from sirtaki.analysis.what_if import (
    COMPILED,
    COST_S,
    COST_SHARE,
    backward_order,
    compiled_backwards,
    in_parts,
    sizes_worth_trying,
)
from sirtaki.autotune.model.replayer import Activity
from sirtaki.comm.plan import GradientLayout
from sirtaki.errors import ReplayError
from sirtaki.measures import LinkModel

MB = 1_000_000
SLOW = LinkModel(alpha_s=0.001, throughput=(2e7, 3e7, 4e7), host_s=0.0)
FAST = LinkModel(alpha_s=1e-6, throughput=(1e12,), host_s=0.0)


def computed_s(job: JobModel) -> float:
    return sum(piece.seconds for piece in job.iterations[0].programs[0] if piece.activity is Activity.COMPUTE)


def ready(job: JobModel) -> list[list[int]]:
    """Gradients that come behind each compiled operator of a rank."""
    found: list[list[int]] = []
    for piece in job.iterations[0].programs[0]:
        if piece.name == COMPILED:
            found.append([])
        if found:
            found[-1] += [index for _, index in piece.ready]
    return found


def test_the_operator_is_found_with_all_that_comes_of_it() -> None:
    (one,) = compiled_backwards(compiled_job(SLOW))
    assert one.seconds == pytest.approx(0.4)
    assert sorted(one.gradients) == [(0, index) for index in range(8)]
    assert sum(one.n_bytes) == 8 * MB
    assert compiled_backwards(over_a_link()) == ()
    assert sizes_worth_trying(over_a_link()) == ()
    with pytest.raises(ReplayError, match="no compiled backward pass"):
        in_parts(over_a_link(), MB)


def test_parts_have_their_share_of_the_time_and_cuts_their_price() -> None:
    job = compiled_job(SLOW)
    cut = in_parts(job, 2 * MB)
    assert ready(job) == [list(range(8))]
    assert ready(cut) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert computed_s(cut) == pytest.approx(computed_s(job) + 3 * (COST_S + COST_SHARE * 0.4))
    parts = [piece.seconds for piece in cut.iterations[0].programs[0] if piece.name == COMPILED]
    assert parts[0] == pytest.approx(0.1)
    assert parts[1] == pytest.approx(0.1 + COST_S + COST_SHARE * 0.4)
    assert computed_s(in_parts(job, 8 * MB)) == pytest.approx(computed_s(job))


def test_what_travels_is_hidden_behind_later_parts() -> None:
    job = compiled_job(SLOW)
    whole_s, early_s = times(in_parts(job, 8 * MB)).iteration_s, times(in_parts(job, 2 * MB)).iteration_s
    # 8 MB at 40 MB/s take 0.2 s, of which a part of four can be left at the end.
    assert early_s < whole_s - 0.1
    assert early_s > whole_s - 0.2


def test_the_layout_follows_the_order_in_which_gradients_will_come() -> None:
    job = compiled_job(SLOW, out_of_place=True)
    before, after = job.buffers[0].layout, in_parts(job, 2 * MB).buffers[0].layout
    assert before.names[0] == "blocks.0.weight"
    in_order = [f"blocks.{number}.{kind}" for number in (3, 2, 1) for kind in ("bias", "weight")]
    assert after.names[:-1] == (*in_order, "blocks.0.weight", "blocks.0.bias")
    assert sorted(before.sizes) == sorted(after.sizes)
    assert after.names[-1] == before.names[-1]  # the flags stay where they are


def test_gradients_go_back_to_their_block() -> None:
    names = ("emb.weight", "h.0.b", "norm.weight", "h.1.c", "h.1.b", "h.1.a", "h.0.c", "h.0.a", "emb.bias")
    layout = GradientLayout(sizes=(1,) * len(names), names=names)
    order = backward_order(layout, range(len(names)))
    assert [names[index] for index in order][1:] == [
        "h.1.c", "h.1.b", "h.1.a", "h.0.b", "h.0.c", "h.0.a", "emb.weight", "emb.bias",
    ]  # fmt: skip
    assert backward_order(replace(layout, names=()), [3, 1]) == [3, 1]


def test_theorem_1_leaves_out_what_travels_in_less_time_than_a_cut_costs() -> None:
    job = compiled_job(SLOW)
    (one,) = compiled_backwards(job)
    assert sizes_worth_trying(job) == (500_000, 666_667, 1_000_000, 1_333_334, 2_000_000, 2_666_667, 4_000_000)
    # In a backward pass of a 25 s a cut costs 0.1 s, in which four MB travel over that link, and no less.
    assert sizes_worth_trying(compiled_job(SLOW, backward_s=25.0)) == (4_000_000,)
    assert one.cost_s < 0.002
    assert sizes_worth_trying(compiled_job(FAST)) == ()


def test_ranks_that_differ_are_not_cut() -> None:
    job = compiled_job(SLOW)
    (each,) = job.iterations
    other = tuple(
        piece if piece.name != COMPILED else replace(piece, name="AddmmBackward0") for piece in each.programs[1]
    )
    assert compiled_backwards(replace(job, iterations=(replace(each, programs={**each.programs, 1: other}),))) == ()


def test_each_graph_is_cut_by_itself() -> None:
    job = compiled_job(SLOW, graphs=2)
    assert ready(job) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ready(in_parts(job, 2 * MB)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ready(in_parts(job, 4 * MB)) == ready(job)
