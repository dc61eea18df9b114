"""What a backward pass that raised has left is told from what the script has done since, and survives its end."""

from types import SimpleNamespace

import pytest
import torch

from sirtaki.engine.reducing.reducer import FailedPass


@pytest.fixture
def params() -> list[torch.nn.Parameter]:
    found = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    for number, param in enumerate(found[:2]):
        param.grad = torch.full((3,), 1.0 + number)
    return found


def failed(params: list[torch.nn.Parameter]) -> FailedPass:
    """Detached gradients are clones, as where they were views of a flat buffer."""

    def detach() -> None:
        for param in params:
            param.grad = None if param.grad is None else param.grad.clone()

    named = [(f"p{number}", param) for number, param in enumerate(params)]
    return FailedPass(SimpleNamespace(named=named, reductions=SimpleNamespace(detach=detach)))  # type: ignore[arg-type]


def test_gradients_are_the_scripts_own_and_not_touched_by_leaving_the_flat_buffers(
    params: list[torch.nn.Parameter],
) -> None:
    before = [param.grad for param in params]
    left = failed(params)
    assert all(param.grad is not gradient for param, gradient in zip(params[:2], before[:2], strict=True))
    assert not left.touched


@pytest.mark.parametrize("how", ["dropped", "replaced", "written", "given"])
def test_what_the_script_does_with_them_is_noticed(params: list[torch.nn.Parameter], how: str) -> None:
    left = failed(params)
    match how:
        case "dropped":
            params[1].grad = None
        case "replaced":
            params[1].grad = torch.zeros(3)
        case "written":
            params[1].grad.zero_()  # type: ignore[union-attr]
        case "given":
            params[2].grad = torch.zeros(3)
    assert left.touched


def test_the_iteration_ends_without_them_and_leaves_what_the_script_has_there(
    params: list[torch.nn.Parameter],
) -> None:
    left = failed(params)
    params[0].grad = torch.full((3,), 7.0)
    seen = []

    def finish() -> None:
        seen.extend(param.grad for param in params)
        for param in params:
            param.grad = torch.full((3,), 99.0)

    left.drop(finish)
    assert seen == [None, None, None]
    assert [None if param.grad is None else param.grad[0].item() for param in params] == [7.0, 2.0, None]
