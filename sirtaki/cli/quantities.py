"""Numbers as commands read and print them."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def positive(text: str) -> float:
    """An option's value.

    Raises:
        ArgumentTypeError: it is no number above 0, or it is infinite.
    """
    try:
        value = float(text)
    except ValueError as err:
        raise ArgumentTypeError(f"{text!r} is no number") from err
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"it must be positive, not {text}")
    return value


def ms(seconds: float) -> str:
    """`198.2 ms`."""
    return f"{1e3 * seconds:.4g} ms"


def memory_bytes(text: str) -> int:
    """An option's value such as `6G`, `512M`, `1.5GiB`, or a number of bytes; K, M, G and T are powers of 1024.

    Raises:
        ArgumentTypeError: it is something else, or nothing.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    n_bytes = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if not n_bytes:
        raise ArgumentTypeError(f"{text!r} is no amount of memory: give one such as 6G or 512M")
    return n_bytes
