from dataclasses import replace

from fakes import recordings


def test_iterations_are_common_if_every_rank_has_them() -> None:
    recorded = recordings.recording()
    assert recorded.common_iterations == (102, 103, 104)
    short = replace(recorded.ranks[1], iterations=recorded.ranks[1].iterations[1:])
    assert replace(recorded, ranks={**recorded.ranks, 1: short}).common_iterations == (103, 104)
    assert replace(recorded, ranks={}).common_iterations == ()


def test_a_job_has_as_many_ranks_as_were_placed() -> None:
    assert recordings.job(4).n_ranks == 4
