"""Parameters that are DTensors, beside data parallelism by a process set, train as in one process."""

from rank_jobs import OVER_MESH, UNTUNED, Job, integration, played_on_ranks, slow

TUNED = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "60"}


test_a_grid_of_ranks_trains_as_in_one_process = played_on_ranks(
    "tensor_parallel",
    integration(Job(4, env={**UNTUNED, **OVER_MESH}), but="shards_train_as_in_one_process"),
    slow(Job(4, "tuned", env={**TUNED, **OVER_MESH})),
)
