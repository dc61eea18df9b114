"""AdamSGD against its equations, number by number in float64."""

import copy
from typing import Any

import pytest
import torch

from sirtaki.torch.optim import AdamSGD

OPTIONS: list[dict[str, Any]] = [
    {},
    {"decay_steps": 4},
    {"decay_steps": 7, "sgd_scale": 3.0, "betas": (0.8, 0.95), "eps": 1e-3, "momentum": 0.5, "weight_decay": 0.1},
    {"decay_steps": 1, "momentum": 0.0},
]


class Plain:
    """One number's course."""

    def __init__(self, value: complex, **options: Any) -> None:
        defaults = AdamSGD([torch.zeros(1, requires_grad=True)], **options).defaults
        self.value, self.step, self.options = value, 0, defaults
        self.momentum = self.mean = self.square = 0.0

    def update(self, gradient: float, lr: float) -> None:
        o = self.options
        self.step += 1
        part = max(0.0, 1.0 - (self.step - 1) / o["decay_steps"])
        self.value *= 1.0 - lr * o["weight_decay"]
        self.momentum = o["momentum"] * self.momentum + gradient
        first, second = o["betas"]
        self.mean = first * self.mean + (1 - first) * gradient
        self.square = second * self.square + (1 - second) * gradient**2
        adam = self.mean / (1 - first**self.step) / ((self.square / (1 - second**self.step)) ** 0.5 + o["eps"])
        self.value -= lr * (part * adam + (1 - part) * o["sgd_scale"] * self.momentum)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_each_number_takes_the_course_of_the_equations(options: dict[str, Any], foreach: bool) -> None:
    torch.manual_seed(0)
    shapes = [(3,), (2, 2), ()]
    params = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    plain = [[Plain(value, **options) for value in param.detach().flatten().tolist()] for param in params]
    optimizer = AdamSGD(params, lr=0.05, foreach=foreach, **options)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    for step in range(10):
        lr = optimizer.param_groups[0]["lr"]
        for number, (param, numbers) in enumerate(zip(params, plain, strict=True)):
            # The last one has no gradient now and then, and falls behind in its steps.
            param.grad = None if number == 2 and step % 3 == 1 else torch.randn_like(param)
            if param.grad is not None:
                for one, gradient in zip(numbers, param.grad.flatten().tolist(), strict=True):
                    one.update(gradient, lr)
        optimizer.step()
        schedule.step()
        for param, numbers in zip(params, plain, strict=True):
            wanted = torch.tensor([one.value for one in numbers], dtype=torch.float64).view(param.shape)
            torch.testing.assert_close(param.detach(), wanted, rtol=1e-12, atol=1e-12)


def test_it_resumes_from_its_state_and_trains_every_dtype() -> None:
    torch.manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        param = torch.randn(4, dtype=dtype, requires_grad=True)
        other = param.detach().clone().requires_grad_()
        first, second = AdamSGD([param], decay_steps=5), AdamSGD([other], decay_steps=5)
        for step in range(6):
            if step == 3:
                second = AdamSGD([other], lr=9.0)
                second.load_state_dict(copy.deepcopy(first.state_dict()))
            for one, optimizer in ((param, first), (other, second)):
                optimizer.zero_grad()
                (one.abs().square().sum()).backward()
                optimizer.step(lambda: 1.0)
        assert torch.equal(param, other)
        assert torch.isfinite(torch.view_as_real(param) if dtype.is_complex else param).all()


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"decay_steps": 0}, {"betas": (1.0, 0.9)}, {"momentum": 1.0}])
def test_values_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"invalid {next(iter(wrong))}="):
        AdamSGD([torch.zeros(1, requires_grad=True)], **wrong)


def test_sparse_gradients_are_refused() -> None:
    embedding = torch.nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        AdamSGD(embedding.parameters()).step()
