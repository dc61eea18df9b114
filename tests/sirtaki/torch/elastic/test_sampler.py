"""An elastic sampler in any order of iterating, recording, committing, restoring, resets and changes of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sirtaki.engine import job
from sirtaki.errors import ConfigError
from sirtaki.torch.elastic.sampler import ElasticSampler
from sirtaki.torch.elastic.state import TorchState

PLACE = SimpleNamespace(rank=0, size=1)


@pytest.fixture(autouse=True)
def _ranks_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process the rank that `PLACE` names."""
    PLACE.rank, PLACE.size = 0, 1
    monkeypatch.setattr(job, "current", lambda: SimpleNamespace(control=PLACE))


class Reference:
    """What a sampler must know, by sets and whole copies.

    Attributes:
        done: indices of the epoch that this rank knows to be processed.
        saved: (epoch, done) of the newest commit.
        order: in which batches are counted; None until an iteration begins.
        left: what the next iteration deals out, to all ranks.
    """

    def __init__(self, n_samples: int) -> None:
        self.everything = frozenset(range(n_samples))
        self.epoch = 0
        self.done: frozenset[int] = frozenset()
        self.saved: tuple[int, frozenset[int]] = (0, frozenset())
        self.order: list[int] | None = None
        self.left = self.everything

    def go_to(self, epoch: int, done: frozenset[int]) -> None:
        if epoch != self.epoch:
            self.order = None
        self.epoch, self.done = epoch, done
        self.left = self.everything - done


Rank = tuple[TorchState, Reference]
WHO = st.integers(0, 3)


class AnyOrder(RuleBasedStateMachine):
    """Several ranks in one process. Collective operations run on all of them."""

    ranks: list[Rank]

    @initialize(size=st.integers(1, 4), n_samples=st.integers(0, 30), shuffle=st.booleans())
    def begin(self, size: int, n_samples: int, shuffle: bool) -> None:
        self.n_samples, self.shuffle, self.newest_epoch = n_samples, shuffle, 0
        self.ranks = []
        for _ in self.each(range(size), size):
            self.ranks.append(self.new_rank())

    def new_rank(self) -> Rank:
        sampler = ElasticSampler(range(self.n_samples), shuffle=self.shuffle, seed=3)
        return TorchState(sampler=sampler), Reference(self.n_samples)

    def each(self, members: Any, size: int | None = None) -> Iterator[Any]:
        """Go through ranks, while this process is the one that is yielded."""
        members = list(members)
        for rank, member in enumerate(members):
            PLACE.rank, PLACE.size = rank, len(members) if size is None else size
            yield member

    def one(self, who: int) -> Rank:
        PLACE.rank, PLACE.size = who % len(self.ranks), len(self.ranks)
        return self.ranks[PLACE.rank]

    # ── what one rank does ──

    @rule(who=WHO)
    def iterate(self, who: int) -> None:
        state, reference = self.one(who)
        dealt = list(state.sampler)
        assert set(dealt) <= reference.left
        assert len(dealt) == len(state.sampler) == math.ceil(len(reference.left) / len(self.ranks))
        assert set(state.sampler.remaining_indices) == reference.left
        reference.order = dealt

    @rule(who=WHO, number=st.integers(0, 8), size=st.integers(1, 5))
    def record_a_batch(self, who: int, number: int, size: int) -> None:
        state, reference = self.one(who)
        order = reference.order
        if order is None:
            order = list(state.sampler.indices)
            assert set(order) <= reference.left
        batch = order[number * size : (number + 1) * size]
        assert state.sampler.get_indices(number, size) == batch
        state.sampler.record_batch(number, size)
        reference.done |= set(batch)

    @rule(who=WHO, indices=st.sets(st.integers(0, 29)))
    def record_indices(self, who: int, indices: set[int]) -> None:
        state, reference = self.one(who)
        state.sampler.record_indices(sorted(indices & reference.everything))
        reference.done |= indices & reference.everything

    @rule(who=WHO)
    def reset_one(self, who: int) -> None:
        state, reference = self.one(who)
        state.sampler.reset()
        reference.left = reference.everything - reference.done

    # ── what all ranks do together ──

    @rule()
    def save(self) -> None:
        for state, reference in self.each(self.ranks):
            state.save()
            reference.saved = (reference.epoch, reference.done)

    @rule()
    def look_for_changes(self) -> None:
        """Exchange recorded indices without a commit. No commit may contain later indices."""
        news = [state._news() for state, _ in self.each(self.ranks)]
        saved = [reference.saved for _, reference in self.ranks]
        known = [(reference.epoch, reference.done) for _, reference in self.ranks]
        for state, reference in self.each(self.ranks):
            state._complete(news)
            for epoch, done in (*saved, *known):
                if epoch == reference.epoch:
                    reference.done |= done
            for epoch, done in saved:
                if epoch == reference.saved[0]:
                    reference.saved = (epoch, reference.saved[1] | done)

    @rule()
    def commit(self) -> None:
        self.save()
        self.look_for_changes()

    @rule()
    def restore(self) -> None:
        for state, reference in self.each(self.ranks):
            state.restore()
            reference.go_to(*reference.saved)

    @rule(again=st.booleans())
    def begin_an_epoch(self, again: bool) -> None:
        self.newest_epoch += not again
        for state, reference in self.each(self.ranks):
            state.sampler.set_epoch(self.newest_epoch)
            reference.go_to(self.newest_epoch, frozenset())
            reference.order = None
        if again:  # else a commit and the running epoch have one number, and it is not defined which indices count
            self.save()

    @rule(lost=st.sets(WHO), new=st.integers(0, 2), undo=st.booleans())
    def ranks_come_and_go(self, lost: set[int], new: int, undo: bool) -> None:
        """Restore commits on all ranks if one is lost. Then merge the states of all ranks."""
        stay = [rank for number, rank in enumerate(self.ranks) if number not in lost] or self.ranks[:1]
        if undo:
            self.restore()
        members = [*stay, *(self.new_rank() for _ in range(new))][:4]
        for state, reference in self.each(members):
            state.on_reset()
            reference.order = None
        told = [state.sampler.state_dict() for state, _ in members]
        epoch = told[0]["epoch"]
        together = frozenset().union(*(each["processed_indices"] for each in told if each["epoch"] == epoch))
        for state, reference in self.each(members):
            state.sampler.load_state_dict({"epoch": epoch, "processed_indices": together})
            state.save()
            reference.go_to(epoch, together)
            reference.saved = (epoch, together)
        self.ranks, self.newest_epoch = members, max(self.newest_epoch, epoch)

    # ── what must hold ──

    @invariant()
    def each_rank_knows_what_the_reference_knows(self) -> None:
        for state, reference in self.ranks:
            assert state.sampler.epoch == reference.epoch
            assert state.sampler.processed_indices == reference.done
            assert state.sampler.processed_num == len(reference.done)
            mark = state._checkpoint()["samplers"]["sampler"]
            assert (mark["epoch"], mark["processed_indices"]) == (reference.saved[0], set(reference.saved[1]))

    @precondition(lambda self: len({(reference.epoch, reference.done) for _, reference in self.ranks}) == 1)
    @rule()
    def ranks_that_know_the_same_are_dealt_all_that_is_left(self) -> None:
        dealt = []
        for state, reference in self.each(self.ranks):
            state.sampler.reset()
            dealt.append(list(state.sampler))
            reference.order, reference.left = dealt[-1], reference.everything - reference.done
        left = self.ranks[0][1].left
        assert set().union(*dealt) == left
        assert sum(map(len, dealt)) - len(left) < len(self.ranks)


class TestAnyOrder(AnyOrder.TestCase):  # type: ignore[misc]  # Hypothesis makes the class
    settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_batch_after_restore_belongs_to_the_running_iteration() -> None:
    sampler = ElasticSampler(range(8), shuffle=True)
    order = list(sampler)
    state = TorchState(sampler=sampler)
    for batch in (0, 1):
        sampler.record_batch(batch, 2)
    state.save()
    for batch in (2, 3):
        sampler.record_batch(batch, 2)
    state.restore()
    sampler.record_batch(2, 2)
    assert sampler.processed_indices == set(order[:6])
    assert set(sampler) == set(range(8)) - set(order[:4])  # the next iteration has what was left at the commit


def told(states: list[TorchState]) -> None:
    """All ranks look for changes."""
    news = [state._news() for state in states]
    for state in states:
        state._complete(news)


def test_indices_recorded_after_a_commit_are_sent_and_are_undone_with_it() -> None:
    states = [TorchState(sampler=ElasticSampler(range(8))) for _ in range(2)]
    for number, state in enumerate(states):
        state.sampler.record_indices([number])
        state.save()
        state.sampler.record_indices([4 + number])
    told(states)
    for state in states:
        assert state.sampler.processed_indices == {0, 1, 4, 5}
        assert state._checkpoint()["samplers"]["sampler"]["processed_indices"] == {0, 1}
        state.restore()
        assert state.sampler.processed_indices == {0, 1}


def test_indices_restored_before_they_were_sent_are_sent_later() -> None:
    states = [TorchState(sampler=ElasticSampler(range(8))) for _ in range(2)]
    states[0].sampler.record_indices([3])
    for _ in range(2):
        for state in states:
            state.save()
            state.restore()
    told(states)
    assert [state.sampler.processed_indices for state in states] == [{3}, {3}]


def test_a_state_of_horovod_counts_processed_indices_in_horovods_order() -> None:
    for seed, epoch, order in HOROVODS_ORDERS:
        sampler = ElasticSampler(range(len(order)), seed=seed)
        sampler.load_state_dict({"epoch": epoch, "processed_num": 4})
        assert (sampler.epoch, sampler.processed_indices) == (epoch, set(order[:4]))
        assert set(sampler) == set(order[4:])
    sampler = ElasticSampler(range(6), shuffle=False)
    sampler.load_state_dict({"epoch": 1, "processed_num": 8})  # with those that some ranks had twice
    assert sampler.processed_num == 6


HOROVODS_ORDERS = [
    (0, 0, [4, 1, 5, 2, 0, 3, 7, 6]),
    (3, 2, [6, 3, 1, 0, 7, 2, 5, 4]),
    (7, 5, [9, 10, 6, 2, 0, 3, 1, 5, 8, 4, 7]),
]
"""(seed, epoch, order of an epoch), as Horovod 0.28.1 has dealt it to one rank."""


@pytest.mark.parametrize(
    "state", [{}, {"epoch": 1}, {"processed_indices": []}, {"epoch": 0, "processed_indices": [2, 10]}]
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(state: dict[str, Any]) -> None:
    sampler = ElasticSampler(range(10))
    sampler.record_indices([1])
    with pytest.raises(ConfigError, match=r"must have `epoch`|has index 10, but the data set has 10"):
        sampler.load_state_dict(state)
    assert (sampler.epoch, sampler.processed_indices) == (0, {1})
