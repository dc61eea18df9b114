"""Checks values that come from elsewhere, one by one: types, ranges, sizes, and nothing unknown.

`path` is what a value is called in the message of the `RegistryError` that says what is wrong with it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sirtaki.errors import RegistryError

MAX_TEXT_CHARS = 1_000
HIGHEST = 1e18


def checked_fields(path: str, data: object, names: Sequence[str], *, optional: Sequence[str] = ()) -> Mapping[str, Any]:
    """An object with exactly these fields, and perhaps the optional ones."""
    if not isinstance(data, Mapping):
        raise RegistryError(f"{path}: must be an object, not {shown(data)}")
    missing = [name for name in names if name not in data]
    if missing:
        raise RegistryError(f"{path}: lacks {', '.join(missing)}")
    unknown = [name for name in data if name not in names and name not in optional]
    if unknown:
        raise RegistryError(f"{path}: has the unknown field {shown(unknown[0])}")
    return data


def checked_list(path: str, data: object, most: int) -> list[Any]:
    """A list of at most so many."""
    if not isinstance(data, list) or len(data) > most:
        raise RegistryError(f"{path}: must be a list of at most {most}, not {shown(data)}")
    return data


def checked_whole(path: str, value: object, *, low: int = 0, high: int) -> int:
    """A whole number from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:  # True is no number here
        raise RegistryError(f"{path}: must be a whole number from {low} to {high}, not {shown(value)}")
    return value


def checked_number(path: str, value: object, *, low: float = 0.0, high: float = HIGHEST) -> float:
    """A number from `low` to `high`; NaN is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:  # NaN is neither
        raise RegistryError(f"{path}: must be a number from {low:g} to {high:g}, not {shown(value)}")
    return float(value)


def checked_flag(path: str, value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise RegistryError(f"{path}: must be true or false, not {shown(value)}")
    return value


def checked_text(path: str, value: object) -> str:
    """Printable text of limited length."""
    # Unprintable characters could play tricks on a terminal, and some databases refuse them.
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS or not value.isprintable():
        raise RegistryError(
            f"{path}: must be printable text of at most {MAX_TEXT_CHARS} characters, not {shown(value)}"
        )
    return value


def checked_choice(path: str, value: object, choices: Sequence[str]) -> str:
    """One of these."""
    if value not in choices:
        raise RegistryError(f"{path}: must be one of {', '.join(choices)}, not {shown(value)}")
    return str(value)


def checked_pairs(path: str, data: object) -> tuple[tuple[str, str], ...]:
    """An object of texts, as pairs sorted by name."""
    if not isinstance(data, Mapping) or len(data) > 100:
        raise RegistryError(f"{path}: must be an object of at most 100 names and texts, not {shown(data)}")
    return tuple(
        sorted((checked_text(f"{path} (a name)", name), checked_text(f"{path}.{name}", data[name])) for name in data)
    )


def shown(value: object) -> str:
    """A value in a message, cut short: it may be megabytes, and may hold control characters."""
    if isinstance(value, list | Mapping):
        return f"{type(value).__name__} of {len(value)}"
    return ascii(value)[:80]
