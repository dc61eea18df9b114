"""A sampler deals out what an epoch has left, whoever has processed the rest, and goes back to where it was marked."""

import copy
from types import SimpleNamespace

import pytest

from sirtaki.engine import job
from sirtaki.torch.elastic.sampler import ElasticSampler


@pytest.fixture
def be(monkeypatch: pytest.MonkeyPatch) -> object:
    """`be(rank, size)`: from now on this process is that rank."""

    def be(rank: int, size: int) -> None:
        current = SimpleNamespace(control=SimpleNamespace(rank=rank, size=size))
        monkeypatch.setattr(job, "current", lambda: current)

    return be


def samplers_of(be: object, size: int, length: int = 23) -> list[ElasticSampler]:
    samplers = []
    for rank in range(size):
        be(rank, size)  # type: ignore[operator]
        samplers.append(ElasticSampler(range(length), seed=3))
    return samplers


def test_what_one_rank_has_heard_of_is_dealt_out_to_nobody(be: object) -> None:
    first, second, third = samplers_of(be, 3)
    for sampler in (first, second, third):
        sampler.record_batch(0, 2)
    said = [sampler.news() for sampler in (first, second, third)]
    done = {index for _, indices in said for index in indices}
    assert len(done) == 6
    for rank, sampler in enumerate((first, second)):  # the third is lost
        sampler.hear(said)
        assert sampler.news() == (0, [])
        be(rank, 2)  # type: ignore[operator]
        sampler.reset()
    assert set(first) | set(second) == set(range(23)) - done
    assert len(first) == len(second)


def test_what_was_recorded_after_a_mark_is_forgotten_and_what_others_never_heard_is_told_again(be: object) -> None:
    (sampler,) = samplers_of(be, 1)
    sampler.record_indices([1, 2])
    sampler.hear([sampler.news()])
    sampler.record_indices([3])
    mark = sampler.mark()
    sampler.record_indices([4, 5])
    assert copy.deepcopy(mark) is mark
    sampler.rewind(mark)
    assert sampler.processed_indices == {1, 2, 3}
    assert sampler.news() == (0, [3])
    sampler.set_epoch(1)
    assert sampler.processed_num == 0
    sampler.rewind(mark)
    assert (sampler.epoch, sampler.processed_indices) == (0, {1, 2, 3})


def test_news_of_another_epoch_say_nothing_of_this_one(be: object) -> None:
    (sampler,) = samplers_of(be, 1)
    sampler.set_epoch(2)
    sampler.hear([(1, [5]), (2, [6])])
    assert sampler.processed_indices == {6}


def test_a_state_that_is_loaded_is_gone_on_with(be: object) -> None:
    (sampler,) = samplers_of(be, 1)
    sampler.load_state_dict({"epoch": 4, "processed_indices": {1, 3}})
    assert sampler.state_dict() == {"epoch": 4, "processed_indices": {1, 3}}
    assert sampler.news() == (4, [])
    assert set(sampler) == set(range(23)) - {1, 3}


def test_a_deal_is_even_covers_what_is_left_and_is_that_of_the_moment_of_the_reset(be: object) -> None:
    for size, length in ((1, 5), (3, 7), (4, 2), (2, 0)):
        samplers = samplers_of(be, size, length)
        dealt = [list(sampler) for sampler in samplers]
        assert set().union(*dealt) == set(range(length))
        assert {len(part) for part in dealt} == {-(-length // size)}
        assert {sampler.total_size for sampler in samplers} == {size * -(-length // size)}
    (sampler,) = samplers_of(be, 1, 4)
    sampler.record_indices([2])
    assert set(sampler) == set(sampler.remaining_indices) == {0, 1, 2, 3}  # until it is reset
    sampler.reset()
    assert (set(sampler), len(sampler)) == ({0, 1, 3}, 3)
    first = list(sampler)
    sampler.set_epoch(1)
    sampler.record_indices([2])
    sampler.reset()
    assert sorted(first) == sorted(sampler)


def test_the_order_of_an_epoch_is_one_in_all_versions(be: object) -> None:
    (sampler,) = samplers_of(be, 1, 8)
    assert list(sampler) == [5, 7, 4, 6, 3, 1, 0, 2]
