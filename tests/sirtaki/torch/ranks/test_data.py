"""Data divided among ranks is what one process would see."""

from rank_jobs import UNTUNED, Job, played_on_ranks, slow

from sirtaki.torch.ranks import shares

test_ranks_share_data_as_one_process_would_see_it = played_on_ranks(
    "divided_data", Job(2, env=UNTUNED), slow(Job(3, env=UNTUNED))
)


def test_samples_are_padded_from_their_beginning() -> None:
    assert shares([1, 2, 3], 2) == [1, 2, 3, 1]
    assert shares([1, 2], 2) == [1, 2]
    assert shares([7], 4) == [7, 7, 7, 7]
    assert shares([], 4) == []
