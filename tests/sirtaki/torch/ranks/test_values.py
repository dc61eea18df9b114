"""Values of all ranks are put together."""

from rank_jobs import UNTUNED, Job, played_on_ranks, slow

test_values_of_ranks_are_put_together = played_on_ranks(
    "divided_data", Job(2, env=UNTUNED), slow(Job(3, env=UNTUNED)), only="numbers", cases="VALUES"
)
