from dataclasses import replace

from fakes import recordings


def test_iterations_are_common_if_every_rank_has_them() -> None:
    recorded = recordings.recording()
    assert recorded.common_iterations == (102, 103, 104)
    short = replace(recorded.ranks[1], iterations=recorded.ranks[1].iterations[1:])
    assert replace(recorded, ranks={**recorded.ranks, 1: short}).common_iterations == (103, 104)
    assert replace(recorded, ranks={}).common_iterations == ()


def test_what_was_slowed_shows_what_a_step_takes_only_where_there_is_nothing_else() -> None:
    recorded = recordings.recording()

    def marked(*marks: dict[str, bool]) -> tuple[int, ...]:
        steps = tuple(replace(one, **each) for one, each in zip(recorded.ranks[1].iterations, marks, strict=True))
        return replace(
            recorded, ranks={**recorded.ranks, 1: replace(recorded.ranks[1], iterations=steps)}
        ).usual_iterations

    profiling, slowed = {"profiling": True}, {"slowed": True}
    assert marked({}, {}, {}) == (102, 103, 104)
    assert marked(slowed, slowed, {}) == (104,)
    assert marked(profiling, slowed, {}) == (104,)
    assert marked(profiling, slowed, slowed) == (103, 104)
    assert marked(profiling, profiling, profiling) == ()


def test_a_job_has_as_many_ranks_as_were_placed() -> None:
    assert recordings.job(4).n_ranks == 4
