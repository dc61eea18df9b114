"""Updates are combined instead of gradients: each rank makes its own, and all move alike."""

import copy
from typing import Any

import pytest
import torch
from fakes.jobs import on_jobs

from sirtaki.engine import job
from sirtaki.torch.compression import Compression
from sirtaki.torch.lasting_optimizers import Distributed, keep
from sirtaki.torch.optimizer import wrap_adasum


def made() -> tuple[Any, torch.nn.Parameter]:
    param = torch.nn.Parameter(torch.zeros(2))
    plain = torch.optim.SGD([param], lr=1.0)
    return attached(wrap_adasum(plain, [("weight", param)], compression=Compression.none)), param


def attached(optimizer: Distributed) -> Any:
    """Attach the optimizer to the current ranks, and return it."""
    keep(optimizer, job.current())
    return optimizer


def test_updates_at_right_angles_are_added_and_parallel_ones_averaged() -> None:
    def act(rank: int) -> None:
        optimizer, param = made()
        param.grad = torch.eye(2)[rank].clone()
        optimizer.step()
        assert param.tolist() == [-1.0, -1.0]
        param.grad = torch.tensor([1.0, 0.0]) * (rank + 1)
        optimizer.step()
        assert param.tolist() == [-2.5, -1.0]

    on_jobs(2, act)


def test_it_is_the_wrapped_optimizers_own_update_that_travels_smaller_if_wanted_beside_frozen_ones() -> None:
    def act(rank: int) -> None:
        params = [torch.nn.Parameter(torch.zeros(2), requires_grad=wants) for wants in (False, True)]
        plain = torch.optim.SGD(params, lr=0.5, momentum=0.5)
        named = list(zip("ab", params, strict=True))
        optimizer = attached(wrap_adasum(plain, named, compression=Compression.fp16))
        other, second = made()
        for _ in range(2):
            params[1].grad = torch.full((2,), 1.0 + 2**-12)
            second.grad = torch.full((2,), 2.0)
            loss = optimizer.step(lambda: 7.0)
            other.step()
        assert loss == 7.0
        assert [param.tolist() for param in (*params, second)] == [[0.0] * 2, [-0.5 - 0.75] * 2, [-4.0] * 2]
        assert isinstance(optimizer, Distributed)

    on_jobs(2, act)


def test_options_that_adasum_cannot_use_are_harmless_or_rejected() -> None:
    def act(rank: int) -> None:
        optimizer, param = made()
        optimizer.synchronize()
        optimizer.set_backward_passes_per_step(3)
        with pytest.raises(ValueError, match="must be > 0"):
            optimizer.set_backward_passes_per_step(0)
        with pytest.raises(AssertionError, match="not supported when using Adasum"), optimizer.skip_synchronize():
            pass
        assert type(copy.deepcopy(optimizer)) is torch.optim.SGD
        optimizer.load_state_dict({**optimizer.state_dict()})
        assert optimizer._wrapped.param_groups is optimizer.param_groups
        assert param.tolist() == [0.0, 0.0]

    on_jobs(1, act)
