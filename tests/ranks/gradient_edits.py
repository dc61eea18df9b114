"""What scripts do to gradients between `backward()` and `step()`, against one process in float64.

Started by test_gradient_edits.py. Each case trains on every rank, with this rank's rows of a batch, and compares each
step with a model that saw the whole batch.
"""

import copy
from collections.abc import Callable
from functools import partial

import torch
from conformance.training import main
from fakes.backward import Raises

import sirtaki.torch as hvd
from sirtaki.errors import GradientError

STEPS = 6

Edit = Callable[[torch.nn.Module, int], None]


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
    """This rank's rows of a batch."""
    return slice(4 * hvd.rank(), 4 * hvd.rank() + 4)


def both_sides(
    *, unused: bool = False, make: Callable[[torch.nn.Module], torch.optim.Optimizer] = sgd
) -> tuple[torch.nn.Sequential, torch.optim.Optimizer, torch.nn.Sequential, torch.optim.Optimizer]:
    """A model that all ranks train, with its optimizer, and an equal one that sees the whole batch."""
    model = make_model(unused=unused)
    truth = copy.deepcopy(model)
    return model, hvd.DistributedOptimizer(make(model), named_parameters=model.named_parameters()), truth, make(truth)


def compare(model: torch.nn.Module, truth: torch.nn.Module, what: str) -> None:
    for (name, param), wanted in zip(model.named_parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(
            param.double(), wanted, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{what}, {name}: {text}"
        )


def train(
    edit: Edit,
    *,
    unused: bool = False,
    change: Callable[[torch.nn.Module, int], None] = lambda model, step: None,
    make: Callable[[torch.nn.Module], torch.optim.Optimizer] = sgd,
    set_to_none: bool = True,
    what: str,
) -> None:
    """The same steps on both sides; `change` comes before the forward pass, `edit` before the step."""
    model, optimizer, truth, reference = both_sides(unused=unused, make=make)
    for step in range(STEPS):
        inputs, wanted = batch(step)
        rows = own_rows()
        for side, each, x, y in (
            (model, optimizer, inputs[rows], wanted[rows]),
            (truth, reference, inputs, wanted),
        ):
            change(side, step)
            each.zero_grad(set_to_none=set_to_none)
            loss_of(side, x, y).backward()
            if unused and side is truth:
                assert isinstance(side.spare, torch.nn.Parameter)
                side.spare.grad = torch.zeros_like(side.spare)  # Horovod's rule
            edit(side, step)
            each.step()
        compare(model, truth, f"{what}, step {step}")


def clip(model: torch.nn.Module, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def replace(model: torch.nn.Module, step: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad = param.grad.clamp(-0.1, 0.1)


def clamp_data(model: torch.nn.Module, step: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data.clamp_(-0.1, 0.1)


def cancel_last_layer(model: torch.nn.Module, step: int) -> None:
    assert isinstance(model, torch.nn.Sequential)
    if step < 4:
        for param in model[-1].parameters():
            param.grad = None


def edits_after_a_complete_backward_pass_are_made_to_reduced_gradients() -> None:
    for set_to_none in (True, False):
        for edit in (clip, replace, clamp_data, cancel_last_layer):
            train(edit, set_to_none=set_to_none, what=f"{edit.__name__}, set_to_none={set_to_none}")


def a_gradient_that_is_set_to_none_stays_none_beside_unused_parameters() -> None:
    train(cancel_last_layer, unused=True, what="cancelled beside an unused parameter")


def a_replaced_gradient_beside_an_unused_parameter_is_the_reduced_one() -> None:
    model, optimizer, truth, reference = both_sides(unused=True)
    for step in range(STEPS):
        inputs, wanted = batch(step)
        rows = own_rows()
        optimizer.zero_grad()
        reference.zero_grad()
        loss_of(model, inputs[rows], wanted[rows]).backward()
        loss_of(truth, inputs, wanted).backward()
        truth.spare.grad = torch.zeros_like(truth.spare)  # type: ignore[arg-type]
        replace(model, step)
        optimizer.step()
        reference.step()
        compare(model, truth, f"replaced, step {step}")


def a_write_beside_an_unused_parameter_is_an_error_that_says_what_to_write() -> None:
    model = make_model(unused=True)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    inputs, wanted = batch(0)
    loss_of(model, inputs, wanted).backward()
    clip(model, 0)
    try:
        optimizer.step()
    except GradientError as err:
        assert "gradient of 3.bias" in str(err), err
        assert "spare" in str(err), err
        assert "skip_synchronize" in str(err), err
    else:
        raise AssertionError("gradients were clipped before they were reduced, and nobody noticed")
    optimizer.zero_grad()
    for step in range(3):  # and the job goes on
        optimizer.zero_grad()
        loss_of(model, inputs, wanted).backward()
        optimizer.synchronize()
        clip(model, step)
        with optimizer.skip_synchronize():
            optimizer.step()


def a_write_on_one_rank_is_an_error_on_all_of_them() -> None:
    model, optimizer, truth, reference = both_sides(unused=True)
    for step in range(8):  # while the order is profiled, and after that
        writer = step % hvd.size()
        inputs, wanted = batch(step)
        rows = own_rows()
        optimizer.zero_grad()
        loss_of(model, inputs[rows], wanted[rows]).backward()
        if hvd.rank() == writer:
            clip(model, step)
        try:
            optimizer.step()
        except GradientError as err:
            assert ("another rank" in str(err)) == (hvd.rank() != writer), err
        else:
            raise AssertionError(f"rank {writer} wrote a gradient, and rank {hvd.rank()} knows nothing of it")
        optimizer.zero_grad()
        loss_of(model, inputs[rows], wanted[rows]).backward()
        optimizer.step()
        reference.zero_grad()
        loss_of(truth, inputs, wanted).backward()
        truth.spare.grad = torch.zeros_like(truth.spare)  # type: ignore[arg-type]
        reference.step()
        compare(model, truth, f"written on one rank, step {step}")


def a_gradient_that_is_replaced_where_others_have_reduced_theirs_is_an_error_on_all_ranks() -> None:
    """One rank misses a gradient, so what it replaces comes before the reduction, and after it on the others."""
    if hvd.size() == 1:
        return
    model, optimizer, truth, reference = both_sides(unused=True)
    for step in range(8):  # while the order is profiled, and after that
        late = step % hvd.size()
        inputs, wanted = batch(step)
        rows = own_rows()
        optimizer.zero_grad()
        loss = loss_of(model, inputs[rows], wanted[rows])
        try:
            (loss if hvd.rank() == late else loss + model.spare.sum()).backward()
            replace(model, step)
            optimizer.step()
        except GradientError as err:
            assert ("another rank" in str(err)) == (hvd.rank() != late), err
            assert "replaced" in str(err), err
        else:
            raise AssertionError(f"rank {hvd.rank()} has other gradients than others, and knows nothing of it")
        optimizer.zero_grad()
        reference.zero_grad()
        (loss_of(model, inputs[rows], wanted[rows]) + model.spare.sum()).backward()
        (loss_of(truth, inputs, wanted) + truth.spare.sum()).backward()
        optimizer.step()
        reference.step()
        compare(model, truth, f"replaced on rank {late} too early, step {step}")


def a_step_may_be_left_out() -> None:
    model, optimizer, truth, reference = both_sides()
    for step in range(STEPS):
        inputs, wanted = batch(step)
        rows = own_rows()
        optimizer.zero_grad()
        reference.zero_grad()
        loss_of(model, inputs[rows], wanted[rows]).backward()
        loss_of(truth, inputs, wanted).backward()
        if step % 3 != 1:  # as GradScaler does when something has overflown
            optimizer.step()
            reference.step()
        compare(model, truth, f"left out, step {step}")


def a_changed_format_or_dtype_is_followed() -> None:
    def convolutions() -> torch.nn.Module:
        torch.manual_seed(5)
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3),
            torch.nn.ReLU(),
            torch.nn.Conv2d(8, 4, 3),
            torch.nn.Flatten(),
            torch.nn.Linear(64, 3),
        )

    def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)

    for changed, keep_grads in ((torch.channels_last, False), (torch.channels_last, True), (torch.float64, False)):
        model = convolutions()
        truth = copy.deepcopy(model)
        optimizer = hvd.DistributedOptimizer(adam(model), named_parameters=model.named_parameters())
        reference = adam(truth)
        for step in range(8):
            generator = torch.Generator().manual_seed(step)
            images = torch.randn(2 * hvd.size(), 3, 8, 8, generator=generator)
            for side, each, x in ((model, optimizer, images[2 * hvd.rank() :][:2]), (truth, reference, images)):
                if step == 4 and changed is torch.channels_last:
                    side.to(memory_format=torch.channels_last)
                elif step == 4:
                    side.double()
                    for state in each.state.values():
                        for name in ("exp_avg", "exp_avg_sq"):
                            state[name] = state[name].double()
                each.zero_grad(set_to_none=not keep_grads)
                side(x.to(next(side.parameters()).dtype)).square().mean().backward()
                each.step()
            for param, wanted in zip(model.parameters(), truth.parameters(), strict=True):
                assert param.grad is not None
                assert param.grad.stride() == param.stride()
                torch.testing.assert_close(param, wanted, rtol=1e-3, atol=1e-5)


def frozen_parameters_are_left_alone() -> None:
    def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)

    def freeze(model: torch.nn.Module, step: int) -> None:
        assert isinstance(model, torch.nn.Sequential)
        model[0].requires_grad_(step not in (2, 3))

    train(lambda model, step: None, change=freeze, make=adam, what="frozen for two steps")


def an_exception_in_mid_backward_is_forgotten_by_zero_grad() -> None:
    for first in range(3):
        model, truth = make_model(), make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
        reference = sgd(truth)
        forget = (optimizer.zero_grad, model.zero_grad, partial(model.zero_grad, set_to_none=False))
        for step in range(STEPS):
            inputs, wanted = batch(step)
            rows = own_rows()
            if step in (0, 1, 4):
                hidden = Raises.apply(model[0](inputs[rows]))  # type: ignore[no-untyped-call]
                try:
                    torch.nn.functional.mse_loss(model[3](model[2](hidden)), wanted[rows]).backward()
                except ValueError:
                    pass
                else:
                    raise AssertionError("the backward pass ought to have failed")
            forget[(step + first) % 3]()
            reference.zero_grad()
            loss_of(model, inputs[rows], wanted[rows]).backward()
            loss_of(truth, inputs, wanted).backward()
            optimizer.step()
            reference.step()
            compare(model, truth, f"after an exception, step {step}")


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


CASES = (
    edits_after_a_complete_backward_pass_are_made_to_reduced_gradients,
    a_gradient_that_is_set_to_none_stays_none_beside_unused_parameters,
    a_replaced_gradient_beside_an_unused_parameter_is_the_reduced_one,
    a_write_beside_an_unused_parameter_is_an_error_that_says_what_to_write,
    a_write_on_one_rank_is_an_error_on_all_of_them,
    a_gradient_that_is_replaced_where_others_have_reduced_theirs_is_an_error_on_all_ranks,
    a_step_may_be_left_out,
    a_changed_format_or_dtype_is_followed,
    frozen_parameters_are_left_alone,
    an_exception_in_mid_backward_is_forgotten_by_zero_grad,
    unused_gradients_are_zeros_or_none,
)

if __name__ == "__main__":
    main(CASES)
