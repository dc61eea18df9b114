"""All planners in one list: each once, with one forecast, and LIBRA-M where there are threads to allocate."""

from dataclasses import replace

from fakes.trial_logs import PLANNING
from fakes.warmup_job import SPACE

from sirtaki.autotune.arms.planners import OUR_PLANNERS, LibraM, make_planners

WITH_THREADS = replace(SPACE, threads=(512, 1024))


def test_each_is_there_once_and_the_best_one_first() -> None:
    made = make_planners(space=WITH_THREADS)
    assert [type(planner) for planner in made] == list(OUR_PLANNERS)
    assert made[0].name == "asc_wfbp_n"
    assert len({planner.name for planner in made}) == len(OUR_PLANNERS)


def test_one_that_allocates_threads_is_left_out_where_there_are_none() -> None:
    for space in (SPACE, replace(SPACE, threads=(512,))):
        names = [type(planner) for planner in make_planners(space=space)]
        assert names == [planner for planner in OUR_PLANNERS if planner is not LibraM]


def test_without_a_model_they_propose_nothing_until_they_are_given_one() -> None:
    made = make_planners(space=SPACE)
    assert [list(planner.ask()) for planner in made] == [[]] * len(made)
    for planner in made:
        planner.update_model(PLANNING)
    assert any(planner.ask() for planner in made)


def test_with_a_model_that_is_presumed_right_they_propose_and_else_are_silent() -> None:
    assert any(planner.ask() for planner in make_planners(space=SPACE, model=PLANNING))
    doubted = make_planners(space=SPACE, model=PLANNING, presumed=False)
    assert [list(planner.ask()) for planner in doubted] == [[]] * len(doubted)
