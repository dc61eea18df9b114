"""DistributedDataParallel's gradients, reduced by Sirtaki, give what one process would give."""

from rank_jobs import OVER_MESH, Job, Play, RankCase, on_ranks, slow

ENV = {**OVER_MESH, "SIRTAKI_REGISTRY": "off"}


@on_ranks("ddp_attached", Job(2, env=ENV), slow(Job(3, env=ENV)), slow(Job(4, env=ENV)))
def test_attached_models_train_as_in_one_process(play: Play, rank_case: RankCase) -> None:
    play(rank_case)
