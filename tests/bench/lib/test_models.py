import time

import pytest
import torch

from bench.lib.contenders import Contender
from bench.lib.models import EmulatedModel, emulated_resnet50, gpt
from bench.lib.workloads import workload


def a_model(*, compute_s: float = 0.0, value: float = 2.0) -> tuple[EmulatedModel, torch.Tensor]:
    small = workload("resnet50").scaled(0.001)
    return EmulatedModel(small, compute_s=compute_s, gradient_value=value), torch.zeros(1, requires_grad=True)


def test_gradients_become_ready_in_the_order_and_sizes_of_the_workload():
    model, batch = a_model()
    ready: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: ready.append(parameter.numel()))
    model(batch).sum().backward()
    assert tuple(ready) == workload("resnet50").scaled(0.001).layout.sizes


def test_the_whole_model_is_resnet_50():
    model, _ = emulated_resnet50(rank=0, compute_s=0.0)
    assert len(model.layers) == 161
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(25.6e6, rel=0.01)


def test_a_step_takes_at_least_the_time_that_it_emulates():
    model, batch = a_model(compute_s=0.06)
    begin_s = time.perf_counter()
    output = model(batch)
    forward_s = time.perf_counter() - begin_s
    output.sum().backward()
    assert forward_s >= 0.06 / 3
    assert time.perf_counter() - begin_s >= 0.06 - 1e-3  # less than the shortest sleep may be left over


def test_weights_show_that_gradients_were_what_was_expected():
    contender = Contender(a_model)
    for _ in range(3):
        contender.step()
    contender.check_average(2.0)


def test_weights_show_a_gradient_that_was_not_the_average():
    contender = Contender(a_model)
    contender.step()
    with pytest.raises(RuntimeError, match="were not averages"):
        contender.check_average(1.5)


def test_the_gpt_learns_and_sleeps_in_both_passes():
    model, tokens = gpt(rank=0, sequences=2, length=16, elsewhere_s=0.005)
    assert len(list(model.parameters())) == 53
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        begin_s = time.perf_counter()
        loss = model(tokens)
        assert time.perf_counter() - begin_s >= 4 * 0.005
        begin_s = time.perf_counter()
        loss.backward()
        assert time.perf_counter() - begin_s >= 4 * 0.010
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[1] < losses[0]
