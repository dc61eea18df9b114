"""What belongs to a reducer ends with it, as far as it was made."""

from types import SimpleNamespace
from typing import Any

from sirtaki.engine.reducer_end import let_go

KEY = (0, 3)


def job(log: list[object]) -> Any:
    return SimpleNamespace(
        joining=SimpleNamespace(forget=lambda key: log.append(("joining", key))),
        watchdog=SimpleNamespace(forget=lambda *who: log.append(("watchdog", who))),
    )


def test_joins_the_watchdog_and_the_hooks_forget_it() -> None:
    log: list[object] = []
    watch: Any = SimpleNamespace(current_wait="wait", progress="progress")
    parameters, carrier = (SimpleNamespace(close=lambda what=what: log.append(what)) for what in ("hooks", "lanes"))
    let_go(job(log), KEY, watch, parameters, carrier)  # type: ignore[arg-type]
    assert log == [("joining", KEY), ("watchdog", ("wait", "progress")), "hooks", "lanes"]


def test_one_that_was_never_watched_nor_hooked_ends_too() -> None:
    log: list[object] = []
    let_go(job(log), KEY, None, None, None)
    assert log == [("joining", KEY)]
