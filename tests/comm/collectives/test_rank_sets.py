"""Subsets of the ranks: made and ended by all, used by members, and one verdict about each on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes.meshes import on_planes

from sirtaki.comm.collectives.engine import GLOBAL, EagerEngine, RankSets
from sirtaki.comm.collectives.operations import CollectiveKind, Signature
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.errors import CommError, MismatchError

SIZE = 3


class Watchdog:
    """Notes whom it watches."""

    def __init__(self) -> None:
        self.watched: list[tuple[Any, Any]] = []

    def watch(self, *who: Any) -> None:
        self.watched.append(who)  # type: ignore[arg-type]

    def unwatch(self, *who: Any) -> None:
        self.watched.remove(who)  # type: ignore[arg-type]


def on_sets(act: Callable[[RankSets, ControlPlane, Watchdog], Any], *, size: int = SIZE) -> list[Any]:
    def run(control: ControlPlane) -> Any:
        watchdog = Watchdog()
        sets = RankSets(control, watchdog)  # type: ignore[arg-type]
        result = act(sets, control, watchdog)
        sets.close()
        assert watchdog.watched == []
        return result

    return on_planes(size, run)


def total(engine: EagerEngine, value: float, name: str = "x") -> float:
    tensor = torch.tensor([value])
    work = engine.submit(Signature.of([tensor], name=name, kind=CollectiveKind.ALLREDUCE, op="sum"), [tensor])
    engine.finish(work)
    return float(work.results[0])


def test_members_get_a_control_plane_once_and_only_they() -> None:
    def act(sets: RankSets, control: ControlPlane, watchdog: Watchdog) -> None:
        sets.add([1, 2])
        assert sets[1].control is None
        if control.rank:
            inner = sets.members(1).control
            assert inner is not None
            assert sets.members(1).control is inner
            assert inner.all_gather(control.rank) == [1, 2]
        control.barrier()
        assert sets.remove(1)

    on_sets(act)


def test_a_removed_set_ends_its_operations_and_its_number_is_not_reused() -> None:
    def act(sets: RankSets, control: ControlPlane, watchdog: Watchdog) -> None:
        sets.add([0, 1])
        ended: list[tuple[int, bool]] = []
        assert sets.remove(1, lambda number: ended.append((number, number in sets)))
        assert ended == [(1, True)]
        assert 1 not in sets
        assert not sets.remove(1)
        assert not sets.remove(GLOBAL)
        assert not sets.remove(None)
        assert GLOBAL in sets
        assert sets.add([0, 1]) == 2

    on_sets(act)


def test_ranks_that_remove_different_sets_all_get_an_error() -> None:
    def act(sets: RankSets, control: ControlPlane, watchdog: Watchdog) -> None:
        for member in range(2):
            sets.add([member])
        with pytest.raises(MismatchError, match=r"the same process set .* passed the ids \[1, 2, 1\]"):
            sets.remove(2 if control.rank == 1 else 1)
        assert 1 in sets
        assert 2 in sets

    on_sets(act)


def test_a_set_in_use_is_not_removed() -> None:
    def act(sets: RankSets, control: ControlPlane, watchdog: Watchdog) -> None:
        sets.add([0, 2])
        engine = sets[1].engine
        work = None
        if control.rank == 2:
            assert engine is not None
            tensor = torch.ones(1)
            work = engine.submit(Signature.of([tensor], name="x", kind=CollectiveKind.ALLREDUCE, op="sum"), [tensor])
        with pytest.raises(
            CommError, match=r"process set \(group of ranks\) 1, because operations on rank 2 have not ended"
        ):
            sets.remove(1, lambda number: pytest.fail("nothing has ended"))
        if control.rank == 0:
            assert engine is not None
            assert total(engine, 1.0) == 2.0
        if work is not None:
            assert engine is not None
            engine.finish(work)
        control.barrier()
        assert sets.remove(1)

    on_sets(act)
