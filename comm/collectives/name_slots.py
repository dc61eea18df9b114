"""The names of eager operations that have come before: each has a bit, the longest unused one loses it.

All ranks make the same calls in the same order, so they give a name the same bit without talking about it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from .requests import Signature

CAPACITY = 1024
"""Names that have a bit at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    bit: int
    signature: Signature
    digest: int


class NameSlots:
    """Known names in the order of their last use."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._slots: OrderedDict[str, _Slot] = OrderedDict()
        self._by_bit: dict[int, str] = {}
        self._free = list(range(capacity))

    def slot(self, name: str) -> int | None:
        """The bit of a name, None if it has none."""
        slot = self._slots.get(name)
        return None if slot is None else slot.bit

    def digest(self, name: str) -> int | None:
        """Of the operation as it was when it was remembered."""
        slot = self._slots.get(name)
        return None if slot is None else slot.digest

    def known(self, bits: Sequence[int]) -> dict[str, Signature]:
        """Names and operations of those bits that have a name."""
        names = [self._by_bit[bit] for bit in bits if bit in self._by_bit]
        return {name: self._slots[name].signature for name in names}

    def by_all(self) -> list[int]:
        """The bits of operations that ranks which have joined submit, too."""
        return [slot.bit for slot in self._slots.values() if slot.signature.by_all]

    def remember(self, signature: Signature, digest: int) -> None:
        """Gives the name a bit, or replaces what is known of it; names that come only once are not worth one."""
        name = signature.name
        if name in self._slots:
            bit = self._slots[name].bit
        elif signature.once:
            return
        else:
            if not self._free:
                self.forget(next(iter(self._slots)))
            bit = heapq.heappop(self._free)
        self._slots[name] = _Slot(bit=bit, signature=signature, digest=digest)
        self._by_bit[bit] = name

    def touch(self, name: str) -> None:
        """The name has been used just now."""
        if name in self._slots:
            self._slots.move_to_end(name)

    def forget(self, name: str) -> None:
        """Takes the name's bit away."""
        if (slot := self._slots.pop(name, None)) is not None:
            del self._by_bit[slot.bit]
            heapq.heappush(self._free, slot.bit)
