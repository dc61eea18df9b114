"""Helpers of translated scripts on several ranks, which together process the data of one process.

Started by test_ranks.py.
"""

import itertools
import random

import torch
from conformance.training import main
from rank_jobs import cases
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import sirtaki.torch as hvd
from sirtaki.errors import ConfigError, MismatchError
from sirtaki.torch import ranks

BATCH = 12  # divisible by 2, 3 and 4


class Counting(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def batches_of_all(loader: DataLoader) -> list[list[int]]:
    """Return each batch of a pass: the sorted indices of all ranks together. Collective."""
    mine = [batch.tolist() for batch in loader]
    everyones = hvd.allgather_object(mine)
    return [sorted(itertools.chain(*parts)) for parts in zip(*everyones, strict=True)]


def shuffled(count: int, **options: object) -> DataLoader:
    numbers = torch.arange(count)
    return DataLoader(numbers, batch_size=BATCH, shuffle=True, **options)


def ranks_together_see_the_batches_of_one_process() -> None:
    for epoch in range(2):
        torch.manual_seed(epoch)
        wanted = [sorted(batch.tolist()) for batch in shuffled(5 * BATCH)]
        torch.manual_seed(epoch + 100 * (hvd.rank() != 0))  # only rank 0 has this seed
        loader = ranks.divided(shuffled(5 * BATCH))
        loader.sampler.set_epoch(epoch)
        assert batches_of_all(loader) == wanted
        assert len(loader) == len(wanted)


def what_is_left_is_padded_with_samples_of_the_pass() -> None:
    loader = ranks.divided(shuffled(2 * BATCH + 1))
    last = batches_of_all(loader)[-1]
    assert len(last) == hvd.size()
    assert {len(part) for part in hvd.allgather_object(list(loader))} == {3}


def what_is_left_may_be_dropped() -> None:
    loader = ranks.divided(shuffled(2 * BATCH + 5, drop_last=True))
    assert [len(batch) for batch in batches_of_all(loader)] == [BATCH, BATCH]


def a_stream_is_dealt_out() -> None:
    loader = ranks.divided(DataLoader(Counting(2 * BATCH), batch_size=BATCH))
    loader.sampler.set_epoch(0)
    assert batches_of_all(loader) == [list(range(BATCH)), list(range(BATCH, 2 * BATCH))]


def the_whole_data_can_be_seen_again() -> None:
    loader = ranks.divided(shuffled(BATCH + 4))
    seen = sorted(number for batch in ranks.whole(loader) for number in batch.tolist())
    assert seen == list(range(BATCH + 4))


def ranks_go_on_with_different_noise_and_agree_again() -> None:
    torch.manual_seed(3)
    loader = ranks.divided(shuffled(2 * BATCH))
    list(loader)
    noise = hvd.allgather_object(torch.randn(4).tolist())
    assert len({tuple(part) for part in noise}) == hvd.size()
    assert sorted(itertools.chain(*batches_of_all(loader))) == list(range(2 * BATCH))


def a_batch_that_cannot_be_divided_is_refused() -> None:
    loader = DataLoader(torch.arange(10), batch_size=hvd.size() + 1)
    try:
        ranks.divided(loader)
    except ConfigError as err:
        assert f"use batch_size={hvd.size()} or {2 * hvd.size()}" in str(err)
    else:
        raise AssertionError("it was divided")
    own = DataLoader(torch.arange(10), batch_sampler=BatchSampler(SequentialSampler(range(10)), 2, False))
    try:
        ranks.divided(own)
    except ConfigError as err:
        assert "batch sampler" in str(err)
    else:
        raise AssertionError("it was divided")


def ranks_in_different_epochs_are_told_so() -> None:
    loader = ranks.divided(shuffled(BATCH))
    loader.sampler.set_epoch(min(hvd.rank(), 1))
    try:
        list(loader)
    except MismatchError as err:
        assert hvd.rank() != 0
        assert "must begin the same epoch" in str(err)
    else:
        assert hvd.rank() == 0


def shares_of_a_batch_make_the_batch() -> None:
    batch = torch.arange(2 * BATCH).reshape(-1, 2)
    for value in (batch, batch.numpy(), batch.tolist()):
        parts = hvd.allgather_object([list(map(int, row)) for row in ranks.share(value)])
        assert sorted(itertools.chain(*parts)) == batch.tolist()


def numbers_of_all_ranks_are_put_together() -> None:
    me, size = hvd.rank(), hvd.size()
    everyone = range(size)
    assert ranks.average(float(me)) == sum(everyone) / size
    assert ranks.total(me) == sum(everyone)
    assert isinstance(ranks.total(me), int)
    assert ranks.total([me, 1.0]) == [sum(everyone), size]
    assert ranks.average({"a": me}) == {"a": sum(everyone) / size}
    mine = torch.tensor(float(me), requires_grad=True)
    tensor = ranks.total(mine)
    assert tensor.item() == sum(everyone)
    tensor.backward()
    assert mine.grad == size  # computed by all ranks from the same tensor
    assert abs(ranks.average(torch.tensor(me)).item() - sum(everyone) / size) < 1e-6
    assert ranks.agreed(me) == 0


def only_rank_0_prints() -> None:
    said: list[float] = []
    say = ranks.on_root(said.append)
    say(ranks.average(1.0))  # every rank evaluates it
    assert said == ([1.0] if hvd.rank() == 0 else [])
    writer = ranks.on_root(random.Random)(0)
    writer.random()
    assert bool(writer) == (hvd.rank() == 0)


def tuples_may_be_divided() -> None:
    numbers = torch.arange(2 * BATCH)
    loader = ranks.divided(DataLoader(TensorDataset(numbers, -numbers), batch_size=BATCH))
    for some, negated in loader:
        assert len(some) == BATCH // hvd.size()
        assert torch.equal(some, -negated)


VALUES = [numbers_of_all_ranks_are_put_together, only_rank_0_prints]
CASES = cases(globals())


if __name__ == "__main__":
    main((*CASES, *VALUES))
