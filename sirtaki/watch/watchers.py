"""Who watches this process's job. Where nobody does, an iteration costs one look at an empty list."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable

from .events import GenerationBegun, Watcher

logger = logging.getLogger(__name__)

watching: list[Watcher] = []
"""All of them; read it only."""

_generation: GenerationBegun | None = None


def add(watcher: Watcher) -> None:
    """From now on, until the job ends, it is told of everything in this process; also before `hvd.init()`."""
    if not watching:
        atexit.register(end, for_good=True)  # for scripts that do not call `shutdown()`; a second time finds nobody
    watching.append(watcher)
    if _generation is not None:
        tell(lambda: watcher.generation(_generation), watcher)


def remove(watcher: Watcher) -> None:
    """It is told of nothing more. Harmless if it was not there."""
    if watcher in watching:
        watching.remove(watcher)


def tell_all(say: Callable[[Watcher], None]) -> None:
    """Tells each; one that raises is removed."""
    for watcher in tuple(watching):
        tell(lambda watcher=watcher: say(watcher), watcher)  # type: ignore[misc]  # mypy infers no defaults


def tell(say: Callable[[], None], watcher: Watcher) -> None:
    """Tells one."""
    try:
        say()
    except Exception:
        remove(watcher)
        logger.warning("%s has failed and watches no more", type(watcher).__name__, exc_info=True)


def begin(event: GenerationBegun) -> None:
    """The ranks are together; who comes later is told so, too."""
    global _generation
    _generation = event
    tell_all(lambda watcher: watcher.generation(event))


def end(*, for_good: bool) -> None:
    """They are not together any more; `for_good`: the job has ended, and nobody watches."""
    global _generation
    _generation = None
    if for_good:
        tell_all(lambda watcher: watcher.close())
        watching.clear()
