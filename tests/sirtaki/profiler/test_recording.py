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


def test_usual_iterations_follow_each_other() -> None:
    recorded = recordings.recording(n_iterations=6)
    there = recorded.ranks[1].iterations

    def without(*places: int) -> tuple[int, ...]:
        kept = tuple(one for place, one in enumerate(there) if place not in places)
        return replace(
            recorded, ranks={**recorded.ranks, 1: replace(recorded.ranks[1], iterations=kept)}
        ).usual_iterations

    assert without() == (102, 103, 104, 105, 106, 107)
    assert without(1) == (104, 105, 106, 107)
    assert without(2, 5) == (105, 106)


def test_a_step_in_which_a_rank_had_joined_others_is_not_usual() -> None:
    recorded = recordings.recording()
    first, second, third = recorded.ranks[0].iterations
    assert not first.joined
    merged = replace(second, units=(*first.units, *second.units))
    assert merged.joined
    ranks = {**recorded.ranks, 0: replace(recorded.ranks[0], iterations=(first, merged, third))}
    assert replace(recorded, ranks=ranks).usual_iterations == (104,)


def test_a_job_has_as_many_ranks_as_were_placed() -> None:
    assert recordings.job(4).n_ranks == 4
