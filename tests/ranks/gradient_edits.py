"""Edits of gradients between `backward()` and `step()`, compared with one process in float64.

Started by test_gradient_edits.py. Each case trains on every rank, with this rank's rows of a batch, and compares each
step with a model that gets the whole batch.
"""

import copy
import itertools
import logging
from collections.abc import Callable

import pytest
import torch
from conformance.training import main
from rank_jobs import cases
from torch.utils.checkpoint import checkpoint

import sirtaki.torch as hvd
from sirtaki.errors import GradientError

STEPS = 6


def make_model(*, unused: bool = False) -> torch.nn.Sequential:
    torch.manual_seed(3)
    layers: list[torch.nn.Module] = [
        torch.nn.Linear(6, 8),
        torch.nn.Tanh(),
        torch.nn.Linear(8, 8),
        torch.nn.Linear(8, 2),
    ]
    model = torch.nn.Sequential(*layers).double()
    if unused:
        model.register_parameter("spare", torch.nn.Parameter(torch.ones(3, dtype=torch.float64)))
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(4 * hvd.size(), 6, generator=generator, dtype=torch.float64),
        torch.randn(4 * hvd.size(), 2, generator=generator, dtype=torch.float64),
    )


def loss_of(model: torch.nn.Module, inputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return 40 * torch.nn.functional.mse_loss(model(inputs), wanted)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)


def own_rows() -> slice:
    """Return this rank's rows of a batch."""
    return slice(4 * hvd.rank(), 4 * hvd.rank() + 4)


def both_sides(
    *, unused: bool = False, make: Callable[[torch.nn.Module], torch.optim.Optimizer] = sgd
) -> tuple[torch.nn.Sequential, torch.optim.Optimizer, torch.nn.Sequential, torch.optim.Optimizer]:
    """Return a model that all ranks train, with its optimizer, and an equal model that gets the whole batch."""
    model = make_model(unused=unused)
    truth = copy.deepcopy(model)
    return model, hvd.DistributedOptimizer(make(model), named_parameters=model.named_parameters()), truth, make(truth)


def compare(model: torch.nn.Module, truth: torch.nn.Module, what: str) -> None:
    for (name, param), wanted in zip(model.named_parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(
            param.double(), wanted, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{what}, {name}: {text}"
        )


def clip(model: torch.nn.Module, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def replace(model: torch.nn.Module, step: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad = param.grad.clamp(-0.1, 0.1)


def gradients_that_are_kept_stay_what_they_were() -> None:
    """Scripts keep gradients for one iteration or several (PCGrad, manual momentum), or keep views of their memory."""
    ways = (
        lambda grad: grad,
        torch.Tensor.detach,
        lambda grad: grad[:1],
        lambda grad: grad if grad.dim() > 1 else grad.data,
    )
    for unused, keep in itertools.product((False, True), ways):
        model, optimizer, truth, reference = both_sides(unused=unused)
        kept: list[tuple[int, list[torch.Tensor | None], list[torch.Tensor | None]]] = []
        for step in range(3 * STEPS):
            inputs, wanted = batch(step)
            rows = own_rows()
            for side, each, x, y in (
                (model, optimizer, inputs[rows], wanted[rows]),
                (truth, reference, inputs, wanted),
            ):
                each.zero_grad()
                loss_of(side, x, y).backward()
            if unused:
                truth.spare.grad = torch.zeros_like(truth.spare)
                optimizer.synchronize()
            if step % 3:
                kept.append((step, *([keep(param.grad) for param in side.parameters()] for side in (model, truth))))
            for before, ours, theirs in kept:
                for one, other in zip(ours, theirs, strict=True):
                    assert torch.allclose(one, other, rtol=1e-9, atol=1e-9), (before, step)
            if len(kept) > 1:  # adds the last difference of gradients to this gradient
                for side, place in ((model, 1), (truth, 2)):
                    for param, new, old in zip(side.parameters(), kept[-1][place], kept[-2][place], strict=True):
                        param.grad = param.grad + 0.1 * (new - old)  # of the first row, whose gradient was kept
            if len(kept) == 4:
                del kept[0]
            if unused:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            reference.step()
            compare(model, truth, f"kept gradients, step {step}")


def what_is_kept_of_gradients_is_copied_only_while_it_is_kept() -> None:
    model, optimizer, _, _ = both_sides()
    kept: list[torch.Tensor] = []
    for step in range(9):
        inputs, wanted = batch(step)
        optimizer.zero_grad()
        loss_of(model, inputs[own_rows()], wanted[own_rows()]).backward()
        grads = [param.grad for param in model.parameters()]
        if hvd.size() > 1:
            buffers = optimizer._gradients.reducers[0].pipeline._buffers  # type: ignore[attr-defined]
            apart = [grad.data_ptr() for grad in grads if grad.data_ptr() not in buffers.addresses]
            assert len(apart) == (2 if step == 5 else 0), (step, apart)
            assert not buffers.lent
        kept[:] = [grads[0].detach(), grads[3][:1]] if step == 4 else []
        optimizer.step()
        del grads


def reentrant_checkpoints_that_share_a_parameter_are_told_what_helps() -> None:
    if hvd.size() == 1:
        return
    model, optimizer, _, _ = both_sides()
    inputs = torch.ones(2, 8, dtype=torch.float64, requires_grad=True)
    hidden = checkpoint(model[2], checkpoint(model[2], inputs, use_reentrant=True), use_reentrant=True)
    with pytest.raises(AssertionError, match="use_reentrant=False"):
        hidden.sum().backward()
    optimizer.close()


def a_copy_that_is_trained_on_is_warned_of_once() -> None:
    model, optimizer, _, _ = both_sides()
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sirtaki").addHandler(handler)
    try:
        twin, its = copy.deepcopy((model, optimizer))
        again = copy.deepcopy(its)
        assert not isinstance(its, type(optimizer))
        for each in (its, again, its):
            loss_of(twin, *batch(0)).backward()
            each.step()
    finally:
        logging.getLogger("sirtaki").removeHandler(handler)
    assert len([text for text in told if "copy of a DistributedOptimizer" in text]) == (hvd.size() > 1), told
    assert all(mine is not its for mine, its in zip(model.parameters(), twin.parameters(), strict=True))


def a_write_beside_an_unused_parameter_is_an_error_that_says_what_to_write() -> None:
    model = make_model(unused=True)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    inputs, wanted = batch(0)
    loss_of(model, inputs, wanted).backward()
    clip(model, 0)
    with pytest.raises(GradientError, match=r"gradient of 3\.bias.*spare.*skip_synchronize"):
        optimizer.step()
    optimizer.zero_grad()
    for step in range(3):  # and the job continues
        optimizer.zero_grad()
        loss_of(model, inputs, wanted).backward()
        optimizer.synchronize()
        clip(model, step)
        with optimizer.skip_synchronize():
            optimizer.step()


def a_write_on_one_rank_is_an_error_on_all_of_them() -> None:
    model, optimizer, truth, reference = both_sides(unused=True)
    for step in range(8):  # while the order is profiled, and afterwards
        writer = step % hvd.size()
        inputs, wanted = batch(step)
        rows = own_rows()
        optimizer.zero_grad()
        loss_of(model, inputs[rows], wanted[rows]).backward()
        if hvd.rank() == writer:
            clip(model, step)
        with pytest.raises(GradientError) as caught:
            optimizer.step()
        assert ("another rank" in str(caught.value)) == (hvd.rank() != writer), caught.value
        optimizer.zero_grad()
        loss_of(model, inputs[rows], wanted[rows]).backward()
        optimizer.step()
        reference.zero_grad()
        loss_of(truth, inputs, wanted).backward()
        truth.spare.grad = torch.zeros_like(truth.spare)  # type: ignore[arg-type]
        reference.step()
        compare(model, truth, f"written on one rank, step {step}")


def a_gradient_that_is_replaced_where_others_have_reduced_theirs_is_an_error_on_all_ranks() -> None:
    """Replace `.grad` before the reduction on a rank without a gradient, and afterwards on its peers."""
    if hvd.size() == 1:
        return
    model, optimizer, truth, reference = both_sides(unused=True)
    for step in range(8):  # while the order is profiled, and afterwards
        late = step % hvd.size()
        inputs, wanted = batch(step)
        rows = own_rows()
        optimizer.zero_grad()
        loss = loss_of(model, inputs[rows], wanted[rows])
        with pytest.raises(GradientError, match="replaced") as caught:  # noqa: PT012 - in the pass, or in the step
            (loss if hvd.rank() == late else loss + model.spare.sum()).backward()
            replace(model, step)
            optimizer.step()
        assert ("another rank" in str(caught.value)) == (hvd.rank() != late), caught.value
        optimizer.zero_grad()
        reference.zero_grad()
        (loss_of(model, inputs[rows], wanted[rows]) + model.spare.sum()).backward()
        (loss_of(truth, inputs, wanted) + truth.spare.sum()).backward()
        optimizer.step()
        reference.step()
        compare(model, truth, f"replaced on rank {late} too early, step {step}")


def unused_gradients_are_zeros_or_none() -> None:
    wants_none = "SIRTAKI_UNUSED" in __import__("os").environ
    model = make_model(unused=True)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    for step in range(STEPS):
        inputs, wanted = batch(step)
        optimizer.zero_grad()
        if step == 3 and hvd.rank() == hvd.size() - 1:  # on one rank only
            (loss_of(model, inputs, wanted) + model.spare.sum()).backward()  # type: ignore[operator,union-attr]
        else:
            loss_of(model, inputs, wanted).backward()
        optimizer.step()
        grad = model.spare.grad
        if step == 3:
            torch.testing.assert_close(grad, torch.full((3,), 1 / hvd.size(), dtype=torch.float64))
        elif wants_none:
            assert grad is None
        else:
            assert isinstance(grad, torch.Tensor)
            assert not grad.any()


CASES = cases(globals())

if __name__ == "__main__":
    main(CASES)
