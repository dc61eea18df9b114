"""Checks of one rank's gradients."""

import logging
from collections.abc import Iterator

import pytest
import torch

from sirtaki.comm.control.mpi import load_mpi, world
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.engine.reducing.checks import NanCheck


@pytest.fixture(scope="module")
def control() -> ControlPlane:
    return ControlPlane(world(load_mpi().COMM_SELF))


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Also where a test of this process has taken Sirtaki's log away from the root logger."""
    logger = logging.getLogger("sirtaki.engine.reducing.checks")
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)


def test_non_finite_gradients_are_named_with_their_share(
    control: ControlPlane, caplog: pytest.LogCaptureFixture
) -> None:
    nan, inf, check = float("nan"), float("inf"), NanCheck(control)
    check.inspect("overflows in its sum", torch.full((4,), 6e4, dtype=torch.float16))
    check.inspect("empty", torch.zeros(0))
    with caplog.at_level(logging.ERROR, logger="sirtaki"):
        check.finish([], [])
        assert caplog.text == ""
        check.inspect("cancels", torch.tensor([inf, 1.0, -inf, nan]))
        places, values = torch.tensor([[3]]), torch.tensor([[1.0, nan]])
        check.inspect("sparse", torch.sparse_coo_tensor(places, values, (9, 2), check_invariants=True))
        late, never = torch.zeros(1), torch.zeros(1)  # which came without a hook
        late.grad = torch.tensor([nan])
        check.finish([1, 1], [("late", late), ("never", never)])
    assert "iteration 1" in caplog.text
    found = "cancels (1 NaN and 2 infinite of 4 elements), sparse (1 NaN of 2 elements), late (1 NaN of 1 elements)"
    assert f"rank 0: {found}" in caplog.text
