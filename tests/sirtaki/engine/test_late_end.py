"""When an iteration's end may come late, who keeps what is under way, and what is waited for then."""

from types import SimpleNamespace
from typing import Any

import pytest

from sirtaki.engine.participants import Progress, Stage
from sirtaki.engine.reducing.reducer import LateEnd
from sirtaki.errors import CommError


class Keeper:
    def __init__(self, *, keeps: bool = True) -> None:
        self.keeps, self.settled, self.closed = keeps, 0, 0

    def keep(self) -> bool:
        return self.keeps

    def settle(self) -> None:
        self.settled += 1

    def close(self) -> None:
        self.closed += 1


class Reducer:
    """As much of one as a late end knows."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.shared, self.failed_in, self.progress = False, None, Progress()
        reductions = SimpleNamespace(
            wait_for=self._wait_for,
            hand_out_some=lambda numbers: self.log.append(numbers),
            reduce=lambda interrupted: self.log.append(("reduce", self.progress.waiting is not None, interrupted())),
        )
        self.hooked: Any = SimpleNamespace(
            empty=False, can_put_off=True, put_off=lambda: self.log.append("put off"), reductions=reductions
        )
        self.job: Any = SimpleNamespace(
            joining=SimpleNamespace(begins=lambda reducer, stage: self.log.append(stage)),
            participants=SimpleNamespace(note_finished=lambda reducer: None),
            blocked=SimpleNamespace(need=lambda reducer: True),
        )
        self.late = LateEnd(self.job, self)  # type: ignore[arg-type]

    def _wait_for(self, number: int, interrupted: Any) -> list[int]:
        waiting = self.progress.waiting
        assert waiting is not None
        self.log.append((number, waiting[0], interrupted is not None and interrupted()))
        return [number]


def test_gradients_are_kept_only_where_somebody_does_and_the_end_needs_no_message() -> None:
    reducer = Reducer()
    assert not reducer.late.kept()
    keeper = Keeper()
    reducer.late.use(keeper)
    assert reducer.late.kept()
    for name, value in (("shared", True), ("failed_in", 0), ("hooked", None)):
        before = getattr(reducer, name)
        setattr(reducer, name, value)
        assert not reducer.late.kept(), name
        setattr(reducer, name, before)
    for name, value in (("can_put_off", False), ("empty", True)):
        before = getattr(reducer.hooked, name)
        setattr(reducer.hooked, name, value)
        assert not reducer.late.kept(), name
        setattr(reducer.hooked, name, before)
    keeper.keeps = False
    assert not reducer.late.kept()


def test_the_keeper_is_not_kept_alive() -> None:
    reducer, keeper = Reducer(), Keeper()
    reducer.late.use(keeper)
    reducer.late.settle()
    reducer.late.close()
    assert (keeper.settled, keeper.closed) == (1, 1)
    del keeper
    reducer.late.settle()
    reducer.late.close()
    assert not reducer.late.kept()


def test_before_the_step_a_wait_may_be_interrupted_and_after_it_not() -> None:
    reducer = Reducer()
    assert reducer.late.wait_for(3) == [3]
    reducer.late.begin()
    reducer.late.wait_for(4)
    reducer.late.hand_out([4])
    assert reducer.log == [(3, Stage.REDUCE, True), Stage.FINISH, "put off", (4, Stage.FINISH, False), [4]]
    assert reducer.progress.waiting is None


def test_an_iteration_that_was_put_off_ends_once() -> None:
    reducer, keeper = Reducer(), Keeper()
    reducer.late.use(keeper)
    assert not reducer.late.ends()
    reducer.late.begin()
    assert not reducer.late.kept()
    assert reducer.late.ends()
    assert not reducer.late.ends()


def test_before_the_step_all_can_be_waited_for_as_a_backward_pass_does() -> None:
    reducer = Reducer()
    reducer.late.reduce()
    assert reducer.log == [("reduce", True, True)]
    reducer.hooked = None
    reducer.late.reduce()
    assert len(reducer.log) == 1


def test_what_never_came_is_an_error() -> None:
    reducer = Reducer()
    reducer.late.begin()
    reducer.hooked = None
    with pytest.raises(CommError, match="call optimizer"):
        reducer.late.wait_for(0)
