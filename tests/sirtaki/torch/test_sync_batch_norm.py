"""SyncBatchNorm against a BatchNorm of the joined batch."""

from rank_jobs import UNTUNED, Job, played_on_ranks, slow

test_normalising_on_several_ranks_equals_normalising_the_joined_batch = played_on_ranks(
    "bn_sync_batch_norm", Job(2, env=UNTUNED), *(slow(Job(ranks, env=UNTUNED)) for ranks in (1, 3, 4))
)
