"""State that one rank has and all ranks get."""

from rank_jobs import UNTUNED, Job, Play, RankCase, on_ranks, slow


@on_ranks("optimizer_state", Job(2, env=UNTUNED), slow(Job(1, env=UNTUNED)), slow(Job(4, env=UNTUNED)))
def test_every_optimizer_and_model_starts_alike_on_all_ranks(play: Play, rank_case: RankCase) -> None:
    play(rank_case)
