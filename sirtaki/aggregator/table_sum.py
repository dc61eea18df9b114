"""The sum of float32 numbers by looking up tables, as a switch without a floating-point unit does it: Libra (sparse),
§3.5.

x + y = 2^(i + log2(1 + 2^(j - i))) with i = log2 x and j = log2 y, where the fraction is split behind its 11th bit
for the logarithm (equation 1). Seven tables of 16-bit entries, 408.5 KB. An eighth, log2(1 - 2^(j - i)), adds numbers
of different sign, of which the paper does not speak: there the relative error has no bound, as leading digits cancel.
An emulation to be measured; never a default.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from .packets import Floats

Integers = npt.NDArray[np.int64]

ONE = 1 << 16
"""Logarithms have 16 binary places here."""

_NEAREST = 1 << 11  # of the difference j - i 5 bits before and 11 behind the point are a key
_FARTHEST = 31  # beyond so many powers of two the smaller number is nothing
_SPLIT = 12  # bits of the fraction behind its 11th
_LN2 = float(np.log(2.0))
_TINY = -(1 << 30)  # log2 of nothing


class Tables:
    """The tables, by the paper's names; an index is a key, an entry has 16 bits (one that is nothing: a mark)."""

    def __init__(self) -> None:
        high = np.arange(4096)
        m = 1.0 + (high & 2047) / 2048.0  # 1.f1…f11
        with np.errstate(divide="ignore"):
            self.exponent = np.arange(256, dtype=np.int64) - 127  # epoTable
            self.log_m = np.rint(ONE * np.log2(m)).astype(np.int64)
            self.log_rest = np.rint(256 * np.log2(high * 2.0**-23)).clip(_TINY).astype(np.int64)  # log Δm, 8 places
            self.log_m_ln2 = np.rint(256 * np.log2(m * _LN2)).astype(np.int64)
            keys = np.arange(65536)
            self.small = np.rint(ONE * 2.0 ** (-keys / 256)).astype(np.int64)  # 2^(log Δm - log(m ln 2))
            theta = -keys / _NEAREST
            self.plus = np.rint(ONE * np.log2(1.0 + 2.0**theta)).astype(np.int64)  # miTable
            self.minus = np.rint(ONE * np.log2(1.0 - 2.0**theta)).clip(_TINY).astype(np.int64)  # not the paper's
            self.power = np.rint(ONE * (2.0 ** (keys / ONE) - 1.0)).astype(np.int64)  # expTable: a fraction

    @property
    def papers_bytes(self) -> int:
        """Of the seven tables, at two bytes an entry."""
        seven = (self.exponent, self.log_m, self.log_rest, self.log_m_ln2, self.small, self.plus, self.power)
        return sum(2 * table.size for table in seven)


@cache
def tables() -> Tables:
    """They are made once."""
    return Tables()


def table_sum(x: Floats, y: Floats) -> Floats:
    """The sum of x and y by tables. Subnormal numbers count as 0; NaN and infinities are added as usual."""
    x, y = np.broadcast_arrays(np.asarray(x, np.float32), np.asarray(y, np.float32))
    bits_x, bits_y = x.view(np.uint32).astype(np.int64), y.view(np.uint32).astype(np.int64)
    larger = (bits_x & 0x7FFFFFFF) >= (bits_y & 0x7FFFFFFF)
    first, second = np.where(larger, bits_x, bits_y), np.where(larger, bits_y, bits_x)
    i, j = _log2(first), _log2(second)
    found = tables()
    theta = i - j
    key = np.minimum((theta + 16) >> 5, 65535)  # 16 places → 11
    alike = (first ^ second) >> 31 == 0
    step = np.where(alike, found.plus[key], found.minus[key])
    step = np.where(theta >= _FARTHEST * ONE, 0, step)
    total = _power(i + step, first >> 31)
    total = np.where(~alike & (theta < 16), np.float32(0), total)
    nothing_x, nothing_y = _is_nothing(first), _is_nothing(second)
    values_first = first.astype(np.uint32).view(np.float32)
    total = np.where(nothing_y, np.where(nothing_x, np.float32(0), values_first), total)
    unusual = ((first >> 23) & 0xFF) == 0xFF
    if unusual.any():
        with np.errstate(invalid="ignore"):
            total[unusual] = x[unusual] + y[unusual]
    return total.astype(np.float32)


def _is_nothing(bits: Integers) -> npt.NDArray[np.bool_]:
    return np.asarray((bits >> 23) & 0xFF == 0)


def _log2(bits: Integers) -> Integers:
    """log2 of the magnitude, 16 places: equation 1."""
    found = tables()
    m, rest = (bits >> _SPLIT) & 0x7FF, bits & 0xFFF
    key = np.minimum(found.log_m_ln2[m] - found.log_rest[rest], 65535)
    correction = np.where(rest == 0, 0, found.small[key])
    return np.asarray(found.exponent[(bits >> 23) & 0xFF] * ONE + found.log_m[m] + correction)


def _power(logarithm: Integers, sign: Integers) -> npt.NDArray[np.float32]:
    """±2^logarithm; 0 where that is subnormal, infinite where it is too large."""
    exponent, fraction = (logarithm >> 16) + 127, tables().power[logarithm & 0xFFFF]
    carry = fraction >> 16
    exponent, fraction = exponent + carry, fraction & 0xFFFF
    bits = (exponent.clip(0, 255) << 23) | (fraction << 7)
    bits = np.where(exponent <= 0, 0, np.where(exponent >= 255, 0x7F800000, bits))
    return np.asarray((bits | (sign << 31)).astype(np.uint32).view(np.float32))
