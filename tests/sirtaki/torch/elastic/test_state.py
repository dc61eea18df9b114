"""State: what is committed, restored, synchronised and dealt."""

from __future__ import annotations

import collections
import copy
import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from sirtaki.engine import job
from sirtaki.torch.elastic.sampler import ElasticSampler
from sirtaki.torch.elastic.state import Commits, ObjectState, TorchState, copied

# ── state ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


Be = Callable[[int, int], None]


@pytest.fixture
def be(monkeypatch: pytest.MonkeyPatch) -> Be:
    """`be(rank, size)`: from now on this process is that rank."""

    def be(rank: int, size: int) -> None:
        current = SimpleNamespace(control=SimpleNamespace(rank=rank, size=size))
        monkeypatch.setattr(job, "current", lambda: current)

    return be


def test_a_newer_commit_that_others_lack_is_forgotten_with_its_random_numbers() -> None:
    state = ObjectState(step=0, history=[0])
    drawn = []
    for step in (1, 2):
        state.step = step
        state.history.append(step)
        state.save()
        drawn.append(random.random())
    state.restore()
    assert (state.step, state.history) == (2, [0, 1, 2])
    state._go_back(1)
    assert (state.step, state.history) == (1, [0, 1])
    assert random.random() == drawn[0]
    assert state._standing().written == 1
    state._count_from(9)
    state.save()
    assert state._standing().written == 9


def test_model_optimizer_and_sampler_are_restored_together(be: Be) -> None:
    be(0, 1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = ElasticSampler(range(10))
    state = TorchState(model=model, optimizer=optimizer, sampler=sampler, step=0)

    def train() -> torch.Tensor:
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model.weight.detach().clone()

    train()
    sampler.record_indices([3, 4])
    state.save()
    after = train()
    sampler.record_indices([5])
    state.restore()
    assert torch.equal(train(), after)  # with the momentum of then
    assert sampler.processed_indices == {3, 4}


def test_an_assigned_value_replaces_the_given_one() -> None:
    state = TorchState(model=torch.nn.Linear(2, 1), step=0)
    other = torch.nn.Linear(2, 1)
    state.model = other
    state.save()
    with torch.no_grad():
        other.weight.zero_()
    state.restore()
    assert other.weight.abs().sum() > 0


# ── commits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Refuses:
    def __deepcopy__(self, memo: object) -> None:
        raise MemoryError


def test_an_error_while_a_commit_is_written_keeps_the_previous_one() -> None:
    commits = Commits()
    commits.write({"a": torch.tensor([1.0]), "b": 1})
    commits.write({"a": torch.tensor([2.0]), "b": 2})
    with pytest.raises(MemoryError):
        commits.write({"a": torch.tensor([3.0]), "b": Refuses()})
    assert commits.newest.number == 1
    assert (commits.newest.tree["a"].item(), commits.newest.tree["b"]) == (2.0, 2)


def test_tensors_of_the_next_but_one_lie_where_the_first_lay() -> None:
    commits, weight = Commits(), torch.zeros(3)
    places = []
    for number in range(4):
        weight += 1
        places.append(commits.write({"weight": weight}).tree["weight"].data_ptr())
        assert commits.newest.tree["weight"].tolist() == [number + 1.0] * 3
    assert places[:2] == places[2:]
    assert len({*places, weight.data_ptr()}) == 3


def test_copies_are_of_their_own_types_and_share_nothing() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    tree = {"model": state, "list": [torch.ones(2), {"deep": (1, torch.zeros(1))}], "channels": torch.zeros(1, 2, 3, 4)}
    tree["channels"] = tree["channels"].to(memory_format=torch.channels_last)
    before = copied(tree)
    state["weight"].fill_(9.0)
    tree["list"][0].fill_(9.0)
    assert before["model"]["weight"].tolist() == [1.0, 1.0]
    assert before["list"][0].tolist() == [1.0, 1.0]
    assert isinstance(before["model"], collections.OrderedDict)
    assert before["model"]._metadata == state._metadata  # type: ignore[attr-defined]
    assert before["channels"].stride() == tree["channels"].stride()
    again = copied({"model": {"weight": torch.ones(5)}, "list": [1]}, before)  # of other shapes
    assert again["model"]["weight"].shape == (5,)
    assert again["list"] == [1]


# ── sampler ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def samplers_of(be: Be, size: int, length: int = 23) -> list[ElasticSampler]:
    samplers = []
    for rank in range(size):
        be(rank, size)
        samplers.append(ElasticSampler(range(length), seed=3))
    return samplers


def test_indices_processed_on_one_rank_are_not_dealt_again(be: Be) -> None:
    first, second, third = samplers_of(be, 3)
    for sampler in (first, second, third):
        sampler.record_batch(0, 2)
    marks = [sampler.mark() for sampler in (first, second, third)]
    said = [sampler.unsent(mark) for sampler, mark in zip((first, second, third), marks, strict=True)]
    done = {index for news in said for index in news.committed[1]}
    assert len(done) == 6
    for rank, sampler in enumerate((first, second)):  # the third is lost
        mark = sampler.merge(marks[rank], said)
        assert sampler.unsent(mark) == ((0, []), (0, []))
        be(rank, 2)
        sampler.reset()
    assert set(first) | set(second) == set(range(23)) - done
    assert len(first) == len(second)


def test_indices_recorded_after_a_mark_are_forgotten_and_unsent_ones_are_sent_again(be: Be) -> None:
    (sampler,) = samplers_of(be, 1)
    sampler.record_indices([1, 2])
    sampler.merge(sampler.mark(), [sampler.unsent(sampler.mark())])
    sampler.record_indices([3])
    mark = sampler.mark()
    sampler.record_indices([4, 5])
    assert copy.deepcopy(mark) is mark
    sampler.rewind(mark)
    assert sampler.processed_indices == {1, 2, 3}
    assert sampler.unsent(mark).committed == (0, [3])
    sampler.set_epoch(1)
    assert sampler.processed_num == 0
    sampler.rewind(mark)
    assert (sampler.epoch, sampler.processed_indices) == (0, {1, 2, 3})


def test_a_deal_is_even_covers_the_remaining_indices_and_is_fixed_at_the_reset(be: Be) -> None:
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


def test_the_order_of_an_epoch_is_one_in_all_versions(be: Be) -> None:
    (sampler,) = samplers_of(be, 1, 8)
    assert list(sampler) == [5, 7, 4, 6, 3, 1, 0, 2]
