"""The heat layout of Libra (sparse), §3.4."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.aggregator import HeatLayout
from sirtaki.aggregator.wire import MOST_FLOATS
from sirtaki.errors import ConfigError


def test_register_i_holds_every_mth_row_from_the_ith() -> None:
    layout = HeatLayout(rows=10, width=4, registers=3)
    held: dict[int, list[int]] = {}
    for row in range(10):
        register, slot = layout.place(row)
        held.setdefault(register, []).append(row)
        assert held[register][slot] == row
    assert held == {0: [0, 3, 6, 9], 1: [1, 4, 7], 2: [2, 5, 8]}


@given(st.integers(1, 5000), st.integers(1, 1000), st.none() | st.integers(1, 500))
def test_all_values_have_room_and_no_packet_meets_a_register_twice(
    rows: int, width: int, registers: int | None
) -> None:
    layout = HeatLayout(rows=rows, width=width, registers=registers)
    assert (layout.packets - 1) * layout.floats < rows * width <= layout.packets * layout.floats
    assert layout.floats <= MOST_FLOATS
    if layout.packet_rows:
        for first in range(0, min(rows, 200), layout.packet_rows):
            packet = range(first, min(first + layout.packet_rows, rows))
            assert len({layout.place(row)[0] for row in packet}) == len(packet)


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"width": 0}, {"registers": 0}])
def test_what_is_not_positive_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="whole numbers from 1"):
        HeatLayout(**{"rows": 1, "width": 1, **wrong})
