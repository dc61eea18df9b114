"""Running a training function so that it goes on after an error that left all ranks alive."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from sirtaki.errors import MismatchError

from ..exceptions import HostsUpdatedInterrupt
from .state import State

logger = logging.getLogger(__name__)

Training = Callable[..., Any]  # of the state and whatever else the script gives


def run(func: Training) -> Training:
    """Decorates `func(state, …)`: the state is synchronised before each call, and restored before a repeated one.

    After a disagreement between ranks, which all of them survive, the state goes back to its last commit and `func` is
    called again. Other failures of communication mean that a rank is lost, and end the job.
    """
    return run_fn(func, lambda: None)


def run_fn(func: Training, reset: Callable[[], None]) -> Training:
    """Like `run`, with a function that is called before each repetition."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync = False
        while True:
            if not skip_sync:
                state.sync()
            try:
                return func(state, *args, **kwargs)
            except MismatchError as err:
                logger.warning("%s; going back to the last commit", err)
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            reset()
            state.on_reset()

    return wrapper
