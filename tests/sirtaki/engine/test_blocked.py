"""Ranks that wait for gradients continue if they are needed elsewhere."""

from rank_jobs import UNTUNED, Job, played_on_ranks

test_a_rank_that_waits_for_gradients_learns_who_waits_for_it = played_on_ranks("blocked", Job(3, env=UNTUNED))
