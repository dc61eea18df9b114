"""Send values from rank 0 to the callbacks of the executor: `ray_logger.log({"loss": 0.1})`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_queue: Any = None


def log(values: Any) -> None:
    """Pass values to the executor's callbacks. Does nothing on ranks above 0, or without callbacks.

    Args:
        values: any picklable object, usually numbers by name.
    """
    if _queue is not None and os.environ.get("HOROVOD_RANK") == "0":
        _queue.put(values)


def configure(queue: Any) -> None:
    """Set the queue that `log` writes to. None to disable it."""
    global _queue
    _queue = queue


class Log:
    """Receiving end of the log.

    Attributes:
        queue: queue for `configure`. None without listeners.
    """

    def __init__(self, queue: Any, listeners: Sequence[Callable[[Any], object]]) -> None:
        self.queue, self._listeners = queue, listeners

    def deliver(self) -> None:
        """Call the listeners with all received values."""
        while self.queue is not None and not self.queue.empty():
            values = self.queue.get()
            for listener in self._listeners:
                listener(values)


@contextlib.contextmanager
def receiving_log(listeners: Sequence[Callable[[Any], object]]) -> Iterator[Log]:
    """Receive values within the context, if there is a listener."""
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
