"""Sparse gradients on fake GPUs: rows are summed over NCCL as on the host, and the host never waits."""

from rank_jobs import OVER_MESH, UNTUNED, Job, played_on_ranks, slow

ENV = {**OVER_MESH, **UNTUNED}

test_rows_are_summed_on_the_gpu = played_on_ranks(
    "sparse_on_gpu",
    Job(2, env=ENV),
    Job(3, label="gather", env={**ENV, "SIRTAKI_SPARSE": "gather"}),
    slow(Job(4, label="gather", env={**ENV, "SIRTAKI_SPARSE": "gather"})),
    slow(Job(2, label="dense", env={**ENV, "SIRTAKI_SPARSE": "dense"})),
)
test_rows_are_summed_on_the_gpu_in_a_tuned_job = played_on_ranks(
    "sparse_on_gpu", Job(2, label="tuned", env={**OVER_MESH, "SIRTAKI_REGISTRY": "off"})
)
test_rows_are_summed_on_the_host_where_nccl_cannot = played_on_ranks(
    "sparse_on_gpu",
    Job(2, label="owner", env={**ENV, "SIRTAKI_SPARSE": "owner"}),
    slow(Job(2, label="staged", env={**ENV, "SIRTAKI_TRANSPORT": "staged"})),
)
