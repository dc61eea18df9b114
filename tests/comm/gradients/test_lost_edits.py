"""What was done to gradients too early is told by every rank, in words that say what to do."""

import logging

import pytest
from fakes.gradients import make_buffers, parameters

from sirtaki.comm.gradients.buffers import Arrivals, Interference, LostEdits, Said

NOTHING = Interference((), ())
REPLACED, WRITTEN = Interference((0,), ()), Interference((), (0,))


def arrivals(own: int) -> Arrivals:
    """Of two parameters, of which the first ones' gradients have come."""
    params = parameters((2,), (3,))
    found = Arrivals(params, make_buffers(params))
    for index in range(own):
        found.add(index, params[index].grad, 0)  # type: ignore[arg-type]
    found.own = own
    return found


@pytest.mark.parametrize(
    ("done", "said", "words"),
    [
        (NOTHING, Said(complete=True), ""),
        (
            WRITTEN,
            Said(written=True),
            "the gradient of a was written before it was reduced, which ends with step()",
        ),
        (NOTHING, Said(written=True, complete=True), "another rank has written a gradient"),
        (REPLACED, Said(replaced=True), ""),
        (REPLACED, Said(replaced=True, complete=True), "the gradient of a was replaced before it was reduced, which"),
        (NOTHING, Said(replaced=True, complete=True), "another rank has replaced a gradient"),
    ],
)
def test_what_ranks_would_differ_by_is_a_problem(done: Interference, said: Said, words: str) -> None:
    edits = LostEdits(["a", "b"])
    edits.look(done, arrivals(1), said)
    assert edits.problem.startswith(words)
    assert bool(edits.problem) == bool(words)
    assert not words or "because b had no gradient" in edits.problem or "another rank" in edits.problem
    assert not words or "optimizer.synchronize()" in edits.problem
    edits.begin()
    assert not edits.problem


def test_a_replaced_gradient_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    edits = LostEdits(["a", "b"])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            edits.look(REPLACED, arrivals(1), Said(replaced=True))
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "the gradient of a was replaced before it was reduced"
    ]


def test_a_device_hears_of_others_an_iteration_later_and_of_itself_at_once() -> None:
    edits = LostEdits(["a", "b"])
    edits.look(WRITTEN, arrivals(1), Said())
    edits.hear_late(Said())
    assert edits.problem
    edits.begin()
    edits.hear_late(Said(written=True))
    assert not edits.problem, "this rank has said so"
    edits.begin()
    edits.hear_late(Said(written=True))
    assert "iteration before" in edits.problem
