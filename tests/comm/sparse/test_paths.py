"""Every path adds up the same rows, in training with a DistributedOptimizer over each transport."""

from rank_jobs import OVER_MESH, UNTUNED, Job, integration, played_on_ranks, slow

TUNED = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "100"}
SETTINGS = {
    **{path: {**UNTUNED, "SIRTAKI_SPARSE": path} for path in ("gather", "owner", "blocks", "dense")},
    "hot_cold": {**TUNED, "SIRTAKI_SPARSE": "hot_cold"},
    "auto": TUNED,
    "auto mesh": {**TUNED, **OVER_MESH},
    "gloo": {**UNTUNED, "SIRTAKI_TRANSPORT": "gloo", "SIRTAKI_STREAMS": "3"},
    "auto gloo": {**TUNED, "SIRTAKI_TRANSPORT": "gloo"},
    "mpi": {**UNTUNED, "SIRTAKI_TRANSPORT": "mpi", "SIRTAKI_STREAMS": "2"},
    "two nodes": {**UNTUNED, "SIRTAKI_LOCAL_SIZE": "2"},
}


def job(ranks: int, label: str) -> Job:
    return Job(ranks, label, SETTINGS[label])


test_sparse_gradients_of_all_kinds_train_right_by_each_way = played_on_ranks(
    "sparse_paths",
    slow(job(2, "owner")),
    job(2, "auto"),
    integration(job(3, "auto")),
    *(slow(job(ranks, label)) for ranks, label in ((1, "auto"), (2, "gather"), (3, "blocks"), (4, "dense"))),
    *(slow(job(ranks, label)) for ranks, label in ((2, "hot_cold"), (5, "hot_cold"), (5, "auto"), (4, "auto gloo"))),
    *(slow(job(ranks, label)) for ranks, label in ((2, "auto mesh"), (3, "mpi"), (4, "two nodes"), (5, "owner"))),
)


test_plans_may_change_with_every_iteration = played_on_ranks(
    "sparse_paths",
    job(3, "gather"),
    slow(job(1, "gather")),
    slow(job(2, "gloo")),
    slow(job(4, "gloo")),
    slow(job(5, "gather")),
    slow(job(4, "two nodes")),
    cases="ANY_PATH",
)


test_many_random_steps_are_right = played_on_ranks(
    "sparse_paths", slow(job(4, "gather")), slow(job(3, "gloo")), slow(job(2, "mpi")), cases="MANY"
)
