"""What remedies cost, on jobs whose steps are counted by hand."""

from __future__ import annotations

import pytest
from fakes.memories import job

from sirtaki.analysis.global_graph import play, replayed
from sirtaki.analysis.job_model import JobModel
from sirtaki.analysis.memory import ADDING, AGAIN, CALL_S, OPERATOR_S, with_accumulation, with_recomputation
from sirtaki.autotune.model.replayer import Activity, Phase


def step_s(job: JobModel) -> float:
    return replayed(play(job)).iteration_s


def test_a_block_that_computes_again_takes_its_forward_pass_longer() -> None:
    was = job(gap_s=0.02)
    again = with_recomputation(was, {(0, "blocks.1"), (0, "blocks.3")})
    # Of the gaps behind its two operators one is inside the block.
    assert step_s(again) - step_s(was) == pytest.approx(2 * (0.1 + 0.01 + CALL_S + 2 * OPERATOR_S))


def test_it_does_so_before_its_backward_pass() -> None:
    program = with_recomputation(job(), {(0, "blocks.1")}).iterations[0].programs[0]
    place = next(place for place, piece in enumerate(program) if piece.name == AGAIN)
    assert program[place].phase is Phase.BACKWARD
    assert program[place + 1].module == (0, "blocks.1.linear")
    assert sum(piece.name == AGAIN for piece in program) == 1


def test_a_block_is_what_lies_below_its_name_and_of_one_model() -> None:
    was = job()
    assert step_s(with_recomputation(was, {(0, "blocks")})) == pytest.approx(
        step_s(was) + 0.4 + CALL_S + 8 * OPERATOR_S
    )
    assert with_recomputation(was, {(1, "blocks"), (0, "block")}) == was


def test_passes_share_what_samples_take_and_repeat_the_rest() -> None:
    was = job(gap_s=0.02)
    program = was.iterations[0].programs[0]
    copy_s = sum(piece.seconds for piece in program if piece.activity is Activity.COPY)
    three = with_accumulation(was, 3)
    # Each pass has its gaps; the second and the third add their gradients to those that are there.
    assert step_s(three) - step_s(was) == pytest.approx(2 * 4 * 0.02 + 2 * copy_s)


def test_gradients_are_exchanged_once_in_the_last_pass() -> None:
    program = with_accumulation(job(), 4).iterations[0].programs[0]
    issues = [place for place, piece in enumerate(program) if piece.issues]
    assert len(issues) == sum(bool(piece.issues) for piece in job().iterations[0].programs[0])
    assert issues[0] > max(place for place, piece in enumerate(program) if piece.phase is Phase.FORWARD)
    assert sum(piece.name == ADDING for piece in program) == 3 * sum(
        piece.activity is Activity.COPY for piece in program
    )
