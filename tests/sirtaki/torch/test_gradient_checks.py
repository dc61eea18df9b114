"""What can be said of one rank's gradients without other ranks."""

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


def report(control: ControlPlane, caplog: pytest.LogCaptureFixture, *gradients: torch.Tensor) -> str:
    check = NanCheck(control)
    for number, gradient in enumerate(gradients):
        check.look(f"layer{number}", gradient)
    with caplog.at_level(logging.ERROR, logger="sirtaki"):
        check.finish([], [])
    return caplog.text


def test_a_sum_that_overflows_is_no_finding(control: ControlPlane, caplog: pytest.LogCaptureFixture) -> None:
    assert report(control, caplog, torch.full((4,), 6e4, dtype=torch.float16), torch.zeros(0)) == ""


def test_infinities_that_cancel_are_found(control: ControlPlane, caplog: pytest.LogCaptureFixture) -> None:
    gradient = torch.tensor([float("inf"), 1.0, float("-inf"), float("nan")])
    text = report(control, caplog, torch.ones(2), gradient)
    assert "rank 0: layer1 (1 NaN and 2 infinite of 4 elements)" in text


def test_sparse_gradients_are_looked_at(control: ControlPlane, caplog: pytest.LogCaptureFixture) -> None:
    values = torch.tensor([[1.0, float("nan")]])
    gradient = torch.sparse_coo_tensor(torch.tensor([[3]]), values, (9, 2), check_invariants=True)
    assert "layer0 (1 NaN of 2 elements)" in report(control, caplog, gradient)


def test_gradients_that_came_without_a_hook_are_looked_at(
    control: ControlPlane, caplog: pytest.LogCaptureFixture
) -> None:
    check = NanCheck(control)
    late, never = torch.zeros(1), torch.zeros(1)
    late.grad = torch.tensor([float("nan")])
    with caplog.at_level(logging.ERROR, logger="sirtaki"):
        check.finish([1, 1], [("late", late), ("never", never)])
    assert "iteration 0" in caplog.text
    assert "late (1 NaN of 1 elements)" in caplog.text
