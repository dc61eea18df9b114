"""What is committed, put back and told, as far as it takes no other rank."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from sirtaki.engine import job
from sirtaki.engine.membership import Change
from sirtaki.torch.elastic.sampler import ElasticSampler
from sirtaki.torch.elastic.state import ObjectState, Standing, TorchState
from sirtaki.torch.exceptions import HorovodInternalError, HostsUpdatedInterrupt


class Others:
    """The other ranks of this one's generation, of which there is one."""

    def __init__(self) -> None:
        self.change = Change(0)
        self.says: object = (0, False, False, None)
        self.lost = ""

    def all_gather(self, mine: object) -> list[object]:
        self.heard = mine
        return [mine, self.says]

    def barrier(self) -> None:
        if self.lost:
            raise HorovodInternalError(self.lost)


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    others = Others()
    control = SimpleNamespace(rank=0, size=2, all_gather=others.all_gather, barrier=others.barrier)
    settings = SimpleNamespace(checkpoint_dir=None)
    current = SimpleNamespace(control=control, elastic=SimpleNamespace(change=lambda: others.change), settings=settings)
    monkeypatch.setattr(job, "current", lambda: current)
    return others


def test_a_commit_is_complete_once_all_have_spoken(others: Others) -> None:
    state = ObjectState(step=0)
    assert state._standing() == Standing(written=0, completed=-1)
    state.step = 1
    state.save()
    assert state._standing() == Standing(written=1, completed=-1)
    state.check_host_updates()
    assert state._standing() == Standing(written=1, completed=1)


def test_a_commit_does_not_return_before_all_know_that_all_hold_it(others: Others) -> None:
    state = ObjectState(step=0)
    others.lost = "rank 1 has ended"
    with pytest.raises(HorovodInternalError, match="rank 1"):
        state.commit()
    assert state._standing() == Standing(written=1, completed=1)  # others may have returned from it


@pytest.mark.parametrize(
    ("mine", "theirs", "skips"),
    [(Change.REMOVED, 0, True), (Change(0), Change.REMOVED.value, True), (Change.REMOVED, 1, False)],
)
def test_what_any_rank_has_heard_is_told_to_all(others: Others, mine: Change, theirs: int, skips: bool) -> None:
    others.change, others.says = mine, (theirs, False, False, None)
    state = ObjectState(step=0)
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        state.commit()
    assert interrupt.value.skip_sync is skips
    assert state._standing() == Standing(written=1, completed=1)  # what was saved is held all the same


def test_a_newer_commit_that_others_do_not_hold_is_forgotten_with_its_random_numbers(others: Others) -> None:
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


def test_model_optimizer_and_sampler_go_back_together(others: Others) -> None:
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


def test_samples_of_other_ranks_are_part_of_what_is_committed(others: Others) -> None:
    sampler = ElasticSampler(range(10))
    state = TorchState(sampler=sampler)
    sampler.record_indices([1])
    others.says = (0, False, False, {"sampler": (0, [7])})
    state.commit()
    assert others.heard == (0, False, False, {"sampler": (0, [1])})
    sampler.record_indices([2])
    state.restore()
    assert sampler.processed_indices == {1, 7}


def test_what_is_assigned_takes_the_place_of_what_was_given(others: Others) -> None:
    state = TorchState(model=torch.nn.Linear(2, 1), step=0)
    other = torch.nn.Linear(2, 1)
    state.model = other
    state.save()
    with torch.no_grad():
        other.weight.zero_()
    state.restore()
    assert other.weight.abs().sum() > 0
