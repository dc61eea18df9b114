"""Whether a rank that waits for gradients is needed elsewhere."""

from rank_jobs import UNTUNED, Job, Play, RankCase, on_ranks


@on_ranks("blocked", Job(3, env=UNTUNED))
def test_a_rank_that_waits_for_gradients_learns_who_waits_for_it(play: Play, rank_case: RankCase) -> None:
    play(rank_case)
