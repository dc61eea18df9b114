"""A job's participants live as long as their users keep them."""

import gc
import weakref
from typing import Any, cast

from sirtaki.engine.participants import ActiveReducer, ActiveReducers


class Reducer:
    """A participant of whom only that it exists matters."""


def made(participants: ActiveReducers) -> Any:
    reducer = cast(ActiveReducer, Reducer())
    participants.add(reducer)
    return reducer


def test_they_are_named_oldest_first_and_not_kept_alive() -> None:
    participants = ActiveReducers()
    first, second = made(participants), made(participants)
    assert list(participants) == [first, second]
    del first
    gc.collect()
    assert list(participants) == [second]
    participants.remove(second)
    assert list(participants) == []


def test_in_use_are_the_newest_and_the_one_that_was_stepped_last() -> None:
    participants = ActiveReducers()
    assert participants.in_use == []
    first, second, third = (made(participants) for _ in range(3))
    participants.last_finished = weakref.ref(first)
    assert participants.in_use == [third, first]
    assert second not in participants.in_use


def test_iterations_that_all_ranks_have_deferred_are_drained_without_references_to_them() -> None:
    class Late(Reducer):
        settled = 0

        def drain(self) -> None:
            Late.settled += 1

    participants = ActiveReducers()
    kept, dropped = cast(ActiveReducer, Late()), cast(ActiveReducer, Late())
    participants.add(kept)
    participants.add(dropped)
    participants.drain()
    del dropped
    assert list(participants) == [kept]
    participants.drain()
    assert Late.settled == 3
