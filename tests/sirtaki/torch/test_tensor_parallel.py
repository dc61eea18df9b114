"""Parameters that are DTensors, beside data parallelism by a process set, train as in one process."""

from rank_jobs import OVER_MESH, UNTUNED, Job, Play, RankCase, integration, on_ranks, slow

TUNED = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "60"}


@on_ranks(
    "tensor_parallel",
    integration(Job(4, env={**UNTUNED, **OVER_MESH}), but="shards_train_as_in_one_process"),
    slow(Job(4, "tuned", env={**TUNED, **OVER_MESH})),
)
def test_a_grid_of_ranks_trains_as_in_one_process(play: Play, rank_case: RankCase) -> None:
    play(rank_case)
