"""What `hvd.elastic` does where ranks come and go, as far as one rank alone shows it."""

from rank_jobs import OVER_MESH, UNTUNED, Job, Play, RankCase, on_ranks


@on_ranks("elastic_alone", Job(1, env={**UNTUNED, **OVER_MESH}))
def test_a_rank_goes_from_generation_to_generation(rank_case: RankCase, play: Play) -> None:
    play(rank_case)
