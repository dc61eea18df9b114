"""What lies next to a setting, and that a session runs it."""

from __future__ import annotations

import math
from dataclasses import replace

from fakes.warmup_job import BEST, DEFAULT, SPACE, Job, ListArm, landscape, session

from sirtaki.autotune.knobs import MIB, Cut, Knobs
from sirtaki.autotune.meta.session import REFINEMENT_ARM, neighbours, untried


def test_neighbours_differ_in_one_knob_by_one_step_and_lie_in_the_space() -> None:
    found = list(neighbours(BEST, SPACE))
    assert {one.streams for one in found} == {3, 4, 6}
    assert {round(one.unit_bytes / MIB, 1) for one in found} == {2.8, 4.0, 5.7}
    assert all(one in SPACE and (one.streams == BEST.streams) != (one.unit_bytes == BEST.unit_bytes) for one in found)


def test_at_the_edge_there_are_fewer() -> None:
    corner = replace(BEST, streams=1, unit_bytes=SPACE.unit_bytes[1])
    assert {(one.streams, one.unit_bytes < corner.unit_bytes) for one in neighbours(corner, SPACE)} == {
        (2, False),
        (1, True),
    }


def test_those_of_a_plan_are_uniform_units_of_its_size_and_what_lies_next_to_them() -> None:
    assert list(neighbours(replace(BEST, cuts=(Cut(stop=5),)), SPACE)) == [BEST, *neighbours(BEST, SPACE)]


def test_what_is_near_to_a_tried_setting_is_tried() -> None:
    tried = [BEST, replace(BEST, streams=3), replace(BEST, unit_bytes=6 * MIB)]
    assert {(one.streams, one.unit_bytes > BEST.unit_bytes) for one in untried(BEST, SPACE, tried)} == {
        (6, False),
        (4, False),
    }


def test_a_session_walks_from_neighbour_to_neighbour() -> None:
    """An arm stops two steps off the best number of streams."""
    job = Job(session(ListArm(replace(BEST, streams=2)), refine=True)).run()
    assert job.result.knobs.streams in (3, 4)
    assert job.result.best_span_s < landscape(replace(BEST, streams=2))
    assert any(trial.arm == REFINEMENT_ARM for trial in job.session.trials)
    assert job.iterations <= 100


def test_where_noise_hides_neighbours_they_are_not_run() -> None:
    job = Job(session(ListArm(replace(BEST, streams=2)), refine=True), noise=0.3).run()
    assert not any(trial.arm == REFINEMENT_ARM for trial in job.session.trials)


def test_settings_of_one_identity_are_neighbours_once() -> None:
    def identity(knobs: Knobs) -> int:
        return math.ceil(math.log2(knobs.streams))

    job = Job(session(ListArm(), refine=True, identity=identity)).run()
    ran = [trial.knobs for trial in job.session.trials if trial.arm == REFINEMENT_ARM]
    assert len({identity(knobs) for knobs in (DEFAULT, *ran)}) == len({DEFAULT, *ran})
