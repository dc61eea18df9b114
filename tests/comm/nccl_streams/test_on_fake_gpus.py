"""Training on fake GPUs: all accesses are ordered between streams, and the host never waits."""

from rank_jobs import OVER_MESH, UNTUNED, Job, played_on_ranks, slow

ENV = {**OVER_MESH, **UNTUNED}

test_training_on_gpus_is_ordered = played_on_ranks("on_fake_gpus", Job(2, env=ENV), slow(Job(3, env=ENV)))
test_a_tuned_job_on_gpus_is_ordered = played_on_ranks(
    "on_fake_gpus", slow(Job(2, label="tuned", env={**OVER_MESH, "SIRTAKI_REGISTRY": "off"}))
)
test_staged_training_on_gpus_is_ordered = played_on_ranks(
    "on_fake_gpus", Job(2, label="staged", env={**ENV, "SIRTAKI_TRANSPORT": "staged"})
)
test_shares_between_nodes_are_ordered_and_aligned = played_on_ranks("on_fake_gpus", Job(4, env=ENV), cases="NODES")
test_one_rank_sends_nothing = played_on_ranks("on_fake_gpus", Job(1, env=ENV), cases="ALONE")
test_eager_operations_of_one_rank_are_ordered = played_on_ranks("on_fake_gpus", slow(Job(1, env=ENV)), only="eager")
