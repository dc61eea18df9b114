"""Send values from rank 0 to callbacks in the executor's process: `ray_logger.log({"loss": 0.1})`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_queue: Any = None


def log(values: Any) -> None:
    """Send values from rank 0 to the callbacks of `RayExecutor.execute`. Does nothing on other ranks, or without
    callbacks.

    Args:
        values: any picklable object, usually numbers by name.
    """
    if _queue is not None and os.environ.get("HOROVOD_RANK") == "0":
        _queue.put(values)


def configure(queue: Any) -> None:
    """Set the Ray queue that `log` writes to. With None, `log` does nothing."""
    global _queue
    _queue = queue


class Log:
    """Receiver, in the executor's process, of the values that rank 0 logs by `ray_logger`.

    Attributes:
        queue: Ray queue that rank 0 must pass to `configure`. None if there are no listeners.
    """

    def __init__(self, queue: Any, listeners: Sequence[Callable[[Any], object]]) -> None:
        self.queue, self._listeners = queue, listeners

    def deliver(self) -> None:
        """Call each listener with each value received since the last call."""
        while self.queue is not None and not self.queue.empty():
            values = self.queue.get()
            for listener in self._listeners:
                listener(values)


@contextlib.contextmanager
def receiving_log(listeners: Sequence[Callable[[Any], object]]) -> Iterator[Log]:
    """Yield a `Log` that passes values to `listeners`: the values that rank 0 logs within the context.

    Without listeners, rank 0 sends nothing.
    """
    if not listeners:
        yield Log(None, ())
        return
    from ray.util.queue import Queue

    log = Log(Queue(actor_options={"num_cpus": 0}), listeners)
    try:
        yield log
        log.deliver()
    finally:
        log.queue.shutdown(force=True)
