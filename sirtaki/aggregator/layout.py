"""Which register holds which row: the heat layout of Libra (sparse), §3.4.

Rows are numbered by heat, the hottest first. Register i holds rows i, i + m, i + 2m, …, so that rows which often occur
together, hot ones, lie in different registers: a switch can touch each register once while a packet passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from sirtaki.errors import ConfigError

from .packets import MOST_FLOATS


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatLayout:
    """Rows of one width in registers.

    Attributes:
        rows: how many, ordered by heat.
        width: float32 values of a row.
        registers: m; None = one for each row of a packet, the fewest without conflicts.

    Raises:
        ConfigError: a number is not positive.
    """

    rows: int
    width: int
    registers: int | None = None

    def __post_init__(self) -> None:
        if self.rows < 1 or self.width < 1 or (self.registers is not None and self.registers < 1):
            raise ConfigError(f"{self} cannot be laid out; rows, width and registers are whole numbers from 1")

    @property
    def register_count(self) -> int:
        """The paper's m."""
        return self.registers or max(1, MOST_FLOATS // self.width)

    @property
    def packet_rows(self) -> int:
        """Rows of a packet, at most one of each register; 0 where a row takes several packets."""
        return min(MOST_FLOATS // self.width, self.register_count)

    @property
    def floats(self) -> int:
        """Values of a packet."""
        return self.packet_rows * self.width or MOST_FLOATS

    @property
    def packets(self) -> int:
        """Of a step in which all rows are summed."""
        return self.packets_for(self.rows)

    def packets_for(self, rows: int) -> int:
        """Of a step in which the first `rows` are."""
        return -(-rows * self.width // self.floats)

    def place(self, row: int) -> tuple[int, int]:
        """(register, slot in it) of a row."""
        return row % self.register_count, row // self.register_count
