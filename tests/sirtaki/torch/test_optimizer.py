"""Training with a DistributedOptimizer equals training in one process."""

from rank_jobs import OVER_MESH, UNTUNED, Job, integration, played_on_ranks, slow

SETTINGS = {
    "": UNTUNED,
    "tuned": {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "60"},
    "always tuning": {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "100000"},
    "small units": {**UNTUNED, "SIRTAKI_UNIT_BYTES": "65536"},
    "two nodes": {**UNTUNED, "SIRTAKI_LOCAL_SIZE": "2", "SIRTAKI_STREAMS": "3"},
    "mesh": {**UNTUNED, **OVER_MESH},
    "gloo": {**UNTUNED, "SIRTAKI_TRANSPORT": "gloo", "SIRTAKI_STREAMS": "3"},
}


def job(ranks: int, label: str = "") -> Job:
    return Job(ranks, label, SETTINGS[label])


LIVES = (job(2), slow(job(1)), slow(job(3)), slow(job(3, "tuned")), slow(job(4, "two nodes")))
"""For cases of optimizers that are dropped, closed or wrapped again."""


test_training_on_ranks_equals_training_on_the_joined_batch = played_on_ranks(
    "optimizers",
    job(2),
    slow(job(1)),
    slow(job(3, "mesh")),
    slow(job(2, "tuned")),
    slow(job(3, "small units")),
    slow(job(3, "always tuning")),
    slow(job(4, "tuned")),
    slow(job(4, "two nodes")),
    cases="TRAINING",
)


test_types_and_strides_of_all_kinds_train_right = played_on_ranks(
    "optimizers",
    job(2),
    slow(job(1)),
    slow(job(2, "tuned")),
    slow(job(3, "small units")),
    slow(job(4, "two nodes")),
    cases="TYPES",
)


test_shared_parameters_and_dropped_closed_and_rewrapped_optimizers_train_right = played_on_ranks(
    "optimizers", *LIVES, cases="LIFETIMES"
)


test_dropped_optimizers_and_ended_jobs_leave_nothing = played_on_ranks("optimizers", *LIVES, cases="LEFTOVERS")


test_sparse_gradients_groups_process_sets_and_join_train_right = played_on_ranks(
    "optimizers",
    job(3),
    slow(job(3, "mesh")),
    slow(job(1)),
    slow(job(2, "tuned")),
    slow(job(4)),
    slow(job(4, "tuned")),
    cases="FEATURES",
)


test_plans_tried_by_the_warmup_change_no_gradient = played_on_ranks(
    "optimizers", integration(job(2, "tuned")), only="plans_that_change", cases="TRAINING"
)


test_many_lifetimes_leave_nothing = played_on_ranks(
    "optimizers", slow(job(2)), slow(job(2, "gloo")), cases="MANY_LEFTOVERS"
)
