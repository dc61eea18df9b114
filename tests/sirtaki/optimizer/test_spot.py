"""Tensors of a replayed candidate: when they are there, when they are reduced, and which are critical."""

from __future__ import annotations

import pytest
from fakes.drawn_jobs import CHOICES
from fakes.played_jobs import GLOO, made_job, plan_of
from fakes.replays import LINK, SIZES

from sirtaki.analysis.plan_search import Candidate, Choices, Position, Schedule, Tensor, View

SCHEDULE = Schedule(
    route=GLOO, streams=1, unit_bytes=1, tensors=(Tensor(stop=1000), Tensor(stop=4000, parts=2), Tensor(stop=6500))
)


def spot(durations_s: tuple[float, ...], schedule: Schedule = SCHEDULE, choices: Choices = CHOICES) -> Position:
    job = made_job(
        durations_s=dict.fromkeys(range(2), durations_s),
        sizes=SIZES,
        plan=plan_of(SIZES, (4,)),
        link=LINK,
        copy_s=0.0,
    )
    return Position(View(job), choices, Candidate(schedule=schedule))


def test_a_tensor_is_ready_with_its_last_gradient_and_reduced_with_its_last_unit() -> None:
    here = spot((0.1, 0.1, 0.1, 0.1))
    assert [here.n_bytes(tensor) for tensor in range(3)] == [4000, 12000, 10000]
    assert [here.ready_s(tensor) for tensor in range(3)] == pytest.approx([0.12, 0.22, 0.42])
    # One unit after the other: 2 ms, and 10 µs a byte.
    assert here.end_s(0) == pytest.approx(0.12 + 0.042)
    assert here.end_s(1) == pytest.approx(0.22 + 2 * 0.062)
    assert here.end_s(2) == pytest.approx(0.42 + 0.102)


def test_tensors_that_others_wait_for_are_critical_and_so_are_those_behind_them() -> None:
    assert spot((0.1, 0.1, 0.1, 0.1)).critical == [2]
    assert spot((0.01, 0.001, 0.001, 0.001)).critical == [0, 1, 2]


def test_parts_are_as_many_as_are_quickest_of_those_that_are_not_too_small() -> None:
    many = Schedule(route=GLOO, streams=3, unit_bytes=1, tensors=SCHEDULE.tensors)
    large = spot((0.1,) * 4, many, Choices(routes=(GLOO,), streams=(1, 2, 3), least_bytes=1))
    parts, took_s = large.best_parts(100_000)
    assert parts == 3
    assert took_s == pytest.approx(
        min(LINK.together_s(100_000 / count, streams=count) for count in (1, 2, 3)), rel=1e-4
    )
    assert spot((0.1,) * 4, many).best_parts(40_000)[0] == 2
    assert spot((0.1,) * 4, many).best_parts(1000)[0] == 1
