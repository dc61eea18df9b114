"""Values of all ranks are put together."""

from rank_jobs import UNTUNED, Job, Play, RankCase, on_ranks, slow


@on_ranks("divided_data", Job(2, env=UNTUNED), slow(Job(3, env=UNTUNED)), only="numbers", cases="VALUES")
def test_values_of_ranks_are_put_together(play: Play, rank_case: RankCase) -> None:
    play(rank_case)
