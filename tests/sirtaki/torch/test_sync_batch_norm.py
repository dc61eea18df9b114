"""SyncBatchNorm against a BatchNorm of the joined batch."""

from rank_jobs import UNTUNED, Job, Play, RankCase, on_ranks, slow


@on_ranks("bn_sync_batch_norm", Job(2, env=UNTUNED), *(slow(Job(ranks, env=UNTUNED)) for ranks in (1, 3, 4)))
def test_normalising_on_several_ranks_equals_normalising_the_joined_batch(play: Play, rank_case: RankCase) -> None:
    play(rank_case)
