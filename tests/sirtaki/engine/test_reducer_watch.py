"""What the watchdog hears of a reducer: what it waits for, how far it is, and nothing once it is gone."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from sirtaki.comm.control.watchdog import Wait
from sirtaki.engine.participants import Progress, Stage
from sirtaki.engine.reducing.reducer import ReducerWatch
from sirtaki.errors import CommError


class Reducer:
    """As far as the watch knows one."""

    def __init__(self, *, tuned: bool = True) -> None:
        self.progress, self.pending = Progress(), False
        self.missing: list[str] = []
        self.stalled: tuple[int, float] | None = None
        self.unit, self.problem = "", ""
        in_flight = SimpleNamespace(stalled=lambda: self.stalled, unreduced_unit=lambda: self.unit)
        sync = SimpleNamespace(iteration=7, in_flight=in_flight, missing_names=lambda: self.missing)
        self.tuned: Any = SimpleNamespace(synchroniser=sync, check=self.check) if tuned else None

    def check(self) -> None:
        if self.problem:
            raise CommError(self.problem)


def watch(reducer: Any, *in_use: Any) -> ReducerWatch:
    return ReducerWatch(SimpleNamespace(in_use=in_use), reducer)  # type: ignore[arg-type]


def test_who_waits_for_nothing_is_not_worried_about() -> None:
    reducer = Reducer()
    assert watch(reducer).current_wait() is None


def test_a_wait_is_for_the_gradients_of_the_current_iteration_since_it_began() -> None:
    reducer = Reducer()
    reducer.progress.waiting = (Stage.FINISH, 12.5)
    assert watch(reducer).current_wait() == Wait(what="the gradients of iteration 7", since_s=12.5)


def test_a_device_that_stalls_is_waited_for_though_this_rank_goes_on() -> None:
    reducer = Reducer()
    reducer.stalled = (6, 3.0)
    assert watch(reducer).current_wait() == Wait(what="the gradients of iteration 6", since_s=3.0)
    reducer.progress.waiting = (Stage.REDUCE, 12.5)
    assert watch(reducer).current_wait() == Wait(what="the gradients of iteration 7", since_s=12.5)


def test_without_dense_gradients_there_is_no_iteration_to_name() -> None:
    reducer = Reducer(tuned=False)
    assert watch(reducer).current_wait() is None
    reducer.progress.waiting = (Stage.FINISH, 1.0)
    assert watch(reducer).current_wait() == Wait(what="the gradients of iteration 0", since_s=1.0)
    assert watch(reducer, reducer).progress() == ""


def test_what_a_transport_has_found_out_by_itself_is_raised() -> None:
    reducer = Reducer()
    reducer.problem = "NCCL has failed"
    with pytest.raises(CommError, match="NCCL has failed"):
        watch(reducer).current_wait()


def test_an_optimizer_that_another_one_has_followed_says_nothing() -> None:
    reducer = Reducer()
    assert watch(reducer).progress() == ""
    assert watch(reducer, reducer).progress() == "is in iteration 7"
    reducer.pending = True
    assert watch(reducer).progress() == "is in iteration 7"
    reducer.pending, reducer.progress.waiting = False, (Stage.FINISH, 1.0)
    assert watch(reducer).progress() == "is in iteration 7"


@pytest.mark.parametrize(
    ("missing", "words"),
    [(["a"], "a"), (list("abcde"), "a, b, c, d, e"), (list("abcdefg"), "a, b, c, d, e and 2 more")],
)
def test_what_is_missing_is_named_up_to_five(missing: list[str], words: str) -> None:
    reducer = Reducer()
    reducer.missing, reducer.unit = missing, "unit 2 of 3 (a) on stream 1"
    assert watch(reducer, reducer).progress() == (
        f"is in iteration 7, has not computed {words}, its GPU waits for unit 2 of 3 (a) on stream 1"
    )


def test_a_reducer_that_is_gone_is_not_kept_for_it() -> None:
    reducer = Reducer()
    reducer.progress.waiting = (Stage.FINISH, 1.0)
    watching = watch(reducer)
    del reducer
    gc.collect()
    assert watching.current_wait() is None
    assert watching.progress() == ""
