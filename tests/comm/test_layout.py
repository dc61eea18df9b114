"""Offsets, sizes and reordering of gradients in their flat buffer."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.comm.plan import GradientLayout
from sirtaki.errors import PlanError

sizes = st.lists(st.integers(0, 10**9), max_size=30).map(tuple)


@given(sizes=sizes, itemsize_bytes=st.sampled_from([1, 2, 4, 8]))
def test_gradients_lie_one_behind_the_other(sizes: tuple[int, ...], itemsize_bytes: int) -> None:
    layout = GradientLayout(sizes=sizes, itemsize_bytes=itemsize_bytes)
    assert layout.offsets[0] == 0
    assert tuple(stop - start for start, stop in pairwise(layout.offsets)) == sizes
    assert layout.numel == sum(sizes)
    assert layout.total_bytes == layout.numel * itemsize_bytes


@given(sizes=sizes, data=st.data())
def test_reordering_moves_sizes_and_names_together_and_can_be_undone(
    sizes: tuple[int, ...], data: st.DataObject
) -> None:
    names = tuple(f"p{i}" for i in range(len(sizes)))
    layout = GradientLayout(sizes=sizes, names=names, dtype="float16", itemsize_bytes=2, device="cuda")
    order = data.draw(st.permutations(range(len(sizes))))
    moved = layout.reordered(order)
    assert moved.sizes == tuple(sizes[i] for i in order)
    assert moved.names == tuple(names[i] for i in order)
    back = [order.index(i) for i in range(len(sizes))]
    assert moved.reordered(back) == layout


@pytest.mark.parametrize("order", [(), (0, 1), (0, 1, 1), (0, 1, 3), (0, 1, 2, 2)])
def test_an_order_must_name_each_gradient_once(order: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="name each of them once"):
        GradientLayout(sizes=(1, 2, 3)).reordered(order)


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(PlanError, match="negative"):
        GradientLayout(sizes=(3, -1))
    with pytest.raises(PlanError, match="itemsize_bytes"):
        GradientLayout(sizes=(3,), itemsize_bytes=0)
    with pytest.raises(PlanError, match="1 names for 2 gradients"):
        GradientLayout(sizes=(1, 2), names=("a",))


def test_a_range_is_told_by_the_names_of_its_gradients() -> None:
    layout = GradientLayout(sizes=(10, 0, 5, 3), names=("a", "b", "c", "d"))
    assert layout.describe(0, 4) == "a"
    assert layout.describe(0, 18) == "a … d (4)"
    assert layout.describe(10, 15) == "c"
    assert layout.describe(12, 16) == "c … d (2)"
