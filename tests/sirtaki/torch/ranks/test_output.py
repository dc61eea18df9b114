"""Rank 0 prints and writes for all."""

from rank_jobs import UNTUNED, Job, played_on_ranks

from sirtaki.torch.ranks import on_root

test_one_rank_prints = played_on_ranks("divided_data", Job(2, env=UNTUNED), only="prints", cases="VALUES")


def test_before_there_are_ranks_everybody_does() -> None:
    assert on_root(len)([1, 2]) == 2
    assert on_root(len).__name__ == "len"
