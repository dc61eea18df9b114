"""State that one rank has and all ranks get."""

from rank_jobs import UNTUNED, Job, played_on_ranks, slow

test_every_optimizer_and_model_starts_alike_on_all_ranks = played_on_ranks(
    "optimizer_state", Job(2, env=UNTUNED), slow(Job(1, env=UNTUNED)), slow(Job(4, env=UNTUNED))
)
