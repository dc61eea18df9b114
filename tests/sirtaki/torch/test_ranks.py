"""Helpers of translated scripts on several ranks: they divide data like one process, and rank 0 prints.

Values of all ranks are combined.
"""

from rank_jobs import UNTUNED, Job, played_on_ranks, slow

from sirtaki.torch.ranks import on_root, shares

test_ranks_share_data_as_one_process_would_see_it = played_on_ranks(
    "divided_data", Job(2, env=UNTUNED), slow(Job(3, env=UNTUNED))
)
test_one_rank_prints = played_on_ranks("divided_data", Job(2, env=UNTUNED), only="prints", cases="VALUES")
test_values_of_ranks_are_put_together = played_on_ranks(
    "divided_data", Job(2, env=UNTUNED), slow(Job(3, env=UNTUNED)), only="numbers", cases="VALUES"
)


def test_samples_are_padded_from_their_beginning() -> None:
    assert shares([1, 2, 3], 2) == [1, 2, 3, 1]
    assert shares([1, 2], 2) == [1, 2]
    assert shares([7], 4) == [7, 7, 7, 7]
    assert shares([], 4) == []


def test_before_init_every_process_prints() -> None:
    assert on_root(len)([1, 2]) == 2
    assert on_root(len).__name__ == "len"
