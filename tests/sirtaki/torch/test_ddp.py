"""DistributedDataParallel's gradients, reduced by Sirtaki, give what one process would give."""

from rank_jobs import OVER_MESH, Job, played_on_ranks, slow

ENV = {**OVER_MESH, "SIRTAKI_REGISTRY": "off"}


test_attached_models_train_as_in_one_process = played_on_ranks(
    "ddp_attached", Job(2, env=ENV), slow(Job(3, env=ENV)), slow(Job(4, env=ENV))
)
