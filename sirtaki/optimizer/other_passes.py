"""Passes that other packages bring, by entry point."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points

from sirtaki.errors import ConfigError


def others(group: str, parts: Sequence[str]) -> list[object]:
    """Those of one kind, each made.

    Args:
        group: of the entry points.
        parts: that each one must have.

    Raises:
        ConfigError: one cannot be made, or lacks a part.
    """
    found: list[object] = []
    for point in entry_points(group=group):
        try:
            one: object = point.load()()
        except Exception as err:  # somebody else's code may raise anything
            raise ConfigError(f"the optimizer's pass {point.name!r} could not be built: {err!r}") from err
        missing = [part for part in parts if not hasattr(one, part)]
        if missing:
            raise ConfigError(f"the optimizer's pass {point.name!r} is none: it has no {', '.join(missing)}")
        found.append(one)
    return found
