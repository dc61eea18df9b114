"""Running a training function so that it goes on when ranks are lost, come and go, or disagree."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from sirtaki.engine import job
from sirtaki.errors import MismatchError

from ..basics import init_again, let_go
from ..exceptions import HorovodInternalError, HostsUpdatedInterrupt
from .checkpoints import resume
from .settling import settle, share
from .state import ObjectState, State

logger = logging.getLogger(__name__)

Training = Callable[..., Any]  # of the state and whatever else the script gives


def run(func: Training) -> Training:
    """Decorates `func(state, …)`: the state is synchronised before each call, and restored before a repeated one.

    Where ranks come and go, `func` is called again by all that are there when a rank is lost (from the last commit) and
    when hosts have come or gone (from where it is); new ranks take the state of those that were there.

    Where ranks stay, it is called again after a disagreement between ranks, which all of them survive; other failures
    of communication mean that a rank is lost, and end the job.
    """
    return run_fn(func, lambda: None)


def run_fn(func: Training, reset: Callable[[], None]) -> Training:
    """Like `run`, with a function that is called before each repetition."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        train = functools.partial(func, state, *args, **kwargs)
        repeat = _on_ranks_that_stay if job.current().elastic is None else _on_ranks_that_come_and_go
        return repeat(train, state, reset)

    return wrapper


def _on_ranks_that_stay(train: Callable[[], Any], state: State, reset: Callable[[], None]) -> Any:
    skip_sync = False
    if isinstance(state, ObjectState):
        resume(state, has_state=False)
    while True:
        if not skip_sync:
            state.sync()
        try:
            return train()
        except MismatchError as err:
            logger.warning("%s; going back to the last commit", err)
            state.restore()
            skip_sync = False
        except HostsUpdatedInterrupt as interrupt:
            skip_sync = interrupt.skip_sync
        reset()
        state.on_reset()


def _on_ranks_that_come_and_go(train: Callable[[], Any], state: State, reset: Callable[[], None]) -> Any:
    repeated, restored, wants_sync = False, False, True
    while True:
        try:
            if not job.is_initialized():
                init_again()
            out_of_step = settle(state, restored=restored, wants_sync=wants_sync)
            if repeated:
                settled_in = job.current()
                reset()
                if job.current() is not settled_in:  # which it has ended, and begun another
                    out_of_step = settle(state, restored=False, wants_sync=out_of_step)
                state.on_reset()
            if out_of_step:
                share(state)
            restored = False
            return _call(train)
        except HostsUpdatedInterrupt as interrupt:
            logger.info("hosts have come or gone")
            wants_sync = not interrupt.skip_sync
            _part(together=True)
        except HorovodInternalError as err:
            logger.info("%s; going back to the last commit", err)
            if job.is_initialized():
                job.current().give_up(f"rank {job.current().rank} has given up: {err}")
            state.restore()
            restored = wants_sync = True
            _part(reason=str(err))
        repeated = True


def _call(train: Callable[[], Any]) -> Any:
    current = job.current()
    current.training = True
    try:
        return train()
    finally:
        current.training = False


def _part(*, together: bool = False, reason: str = "") -> None:
    """Ends this rank's generation, see `job.leave`; what the script holds of it belongs to no ranks until the next."""
    job.leave(together=together, reason=reason)
    let_go()
