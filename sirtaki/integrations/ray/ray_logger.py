"""What ranks tell the process of the executor while they run: `ray_logger.log({"loss": 0.1})`, heard by `callbacks`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_queue: Any = None


def log(values: Any) -> None:
    """Give values to the executor's callbacks; nothing happens on ranks but 0, or where nobody listens.

    Args:
        values: whatever can be pickled; as a rule numbers by name.
    """
    if _queue is not None and os.environ.get("HOROVOD_RANK") == "0":
        _queue.put(values)


def configure(queue: Any) -> None:
    """From now on `log` writes there; None = nowhere."""
    global _queue
    _queue = queue


class Log:
    """The end at which ranks are heard.

    Attributes:
        queue: for `configure`; None = nobody listens.
    """

    def __init__(self, queue: Any, listeners: Sequence[Callable[[Any], object]]) -> None:
        self.queue, self._listeners = queue, listeners

    def deliver(self) -> None:
        """Calls the listeners with all that has come."""
        while self.queue is not None and not self.queue.empty():
            values = self.queue.get()
            for listener in self._listeners:
                listener(values)


@contextlib.contextmanager
def heard_by(listeners: Sequence[Callable[[Any], object]]) -> Iterator[Log]:
    """Within it ranks are heard, if there is a listener."""
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
