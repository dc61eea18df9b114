"""Models under PyTorch's `replicate()`, whose gradients Sirtaki reduces, give what one process would give."""

import pytest
from rank_jobs import OVER_MESH, Job, played_on_ranks, slow

pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")

ENV = {**OVER_MESH, "SIRTAKI_REGISTRY": "off"}

test_replicated_models_train_as_in_one_process = played_on_ranks(
    "replicated", Job(2, env=ENV), slow(Job(3, env=ENV)), slow(Job(4, env=ENV))
)
