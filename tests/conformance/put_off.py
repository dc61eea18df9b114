"""Checks that training with deferred updates equals training where `step()` waits."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import sirtaki.torch as hvd
from sirtaki.torch.overlap import PutOffUpdates

Loss = Callable[[nn.Module, int], torch.Tensor]
"""Function (model, step) that returns this rank's loss."""
After = Callable[[nn.Module, torch.optim.Optimizer, int], None]
"""Action of the script after a step."""

STEPS = int(os.environ.get("SIRTAKI_TEST_STEPS", "24"))
CHECKED_EVERY = 8


@contextmanager
def counted_put_off() -> Iterator[list[bool]]:
    """Yield a list that gets, for each step in the body, whether its update was deferred."""
    was, results = PutOffUpdates.step, []

    def step(self: PutOffUpdates) -> bool:
        results.append(was(self))
        return results[-1]

    PutOffUpdates.step = step  # type: ignore[method-assign]
    try:
        yield results
    finally:
        PutOffUpdates.step = was  # type: ignore[method-assign]


def numbers(step: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7919 * step + hvd.rank())
    return torch.randn(*shape, generator=generator, device="cpu").to(torch.get_default_device())


def words(step: int, *shape: int, count: int = 50) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7919 * step + hvd.rank())
    return torch.randint(count, shape, generator=generator, device="cpu").to(torch.get_default_device())


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


def plain_step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    pass


def assert_same(
    model: nn.Module,
    loss: Loss,
    make: Callable[[Any], torch.optim.Optimizer] = adam,
    *,
    steps: int = STEPS,
    after: After = nothing,
    step: Callable[..., None] = plain_step,
    puts_off: bool = True,
    **options: Any,
) -> torch.optim.Optimizer:
    """Train copies with and without deferred updates. Compare only now and then, because reads wait. Collective."""
    trained = []
    with counted_put_off() as results:
        for overlaps in (False, True):
            copied = copy.deepcopy(model)
            optimizer = hvd.DistributedOptimizer(
                make(copied.parameters()),
                named_parameters=list(copied.named_parameters()),
                overlap_forward=overlaps,
                **options,
            )
            seen = []
            for number in range(steps):
                torch.manual_seed(number)
                step(optimizer, lambda now=number, own=copied: loss(own, now))
                after(copied, optimizer, number)
                if number % CHECKED_EVERY == CHECKED_EVERY - 1:
                    seen.append(copy.deepcopy(copied.state_dict()))
            seen.append(copy.deepcopy(copied.state_dict()))
            trained.append((seen, copy.deepcopy(optimizer.state_dict())))
            if not overlaps:
                optimizer.close()
    (wanted, wanted_state), (found, found_state) = trained
    for place, (one, other) in enumerate(zip(wanted, found, strict=True)):
        for name, value in one.items():
            assert same(value, other[name]), f"{name} differs at look {place}"
    assert_equal_states(wanted_state, found_state)
    assert any(results) is puts_off, results
    return optimizer


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors are equal: bit-identical for two ranks, otherwise up to the rounding by other units."""
    if (hvd.size() <= 2 and one.device.type == "cpu") or not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=1e-8, atol=1e-10, equal_nan=True)


def assert_equal_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, state in one["state"].items():
        for name, value in state.items():
            assert same(torch.as_tensor(value), torch.as_tensor(other["state"][number][name])), name
