"""Every optimizer of torch.optim starts alike on all ranks after broadcast_optimizer_state."""

import inspect
from typing import Any

import pytest
import torch
from conformance.training import assert_equal_on_all_ranks, batch, main
from rank_jobs import cases
from torch import nn

import sirtaki.torch as hvd

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "SparseAdam": {"lr": 0.01},
}
NO_STATE_TO_SHARE = {"LBFGS"}


def all_kinds() -> list[type[torch.optim.Optimizer]]:
    kinds = [kind for _, kind in inspect.getmembers(torch.optim, inspect.isclass)]
    return [kind for kind in kinds if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer]


def parameters_for(kind: type[torch.optim.Optimizer], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if kind is torch.optim.SparseAdam:
        return nn.Embedding(9, 4, sparse=True)
    if kind.__name__ == "Muon":
        return nn.Linear(6, 4, bias=False)  # it takes matrices only
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    for iteration in range(steps):
        optimizer.zero_grad()
        sparse = isinstance(model, nn.Embedding)
        inputs = torch.arange(9) if sparse else batch(rank, iteration, 5, 6, dtype=torch.float32)
        model(inputs).square().mean().backward()
        optimizer.step()


def every_optimizer_of_torch() -> None:
    kinds = all_kinds()
    assert {"SGD", "Adam", "AdamW", "Adagrad", "ASGD", "Rprop", "NAdam", "RAdam"} <= {kind.__name__ for kind in kinds}
    for kind in kinds:
        if kind.__name__ in NO_STATE_TO_SHARE:
            continue
        options = OPTIONS.get(kind.__name__, {"lr": 0.01})
        # Only the root has trained; the others have other parameters and options, and no state yet.
        model = parameters_for(kind, seed=hvd.rank())
        optimizer = kind(model.parameters(), **{**options, "lr": options["lr"] * (1 + hvd.rank())})
        if hvd.rank() == 1 % hvd.size():
            train(model, optimizer, hvd.rank(), steps=3)
        root = 1 % hvd.size()
        hvd.broadcast_parameters(model.state_dict(), root_rank=root)
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
        assert optimizer.param_groups[0]["lr"] == options["lr"] * (1 + root), kind.__name__
        assert optimizer.state_dict()["state"], f"{kind.__name__} has kept no state"
        assert all(param.grad is not None for param in model.parameters()), kind.__name__
        # From one state and the same data, all ranks must come to the same parameters.
        train(model, optimizer, rank=0, steps=2)
        assert_equal_on_all_ranks(model)
        distributed = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        train(model, distributed, hvd.rank(), steps=3)
        assert_equal_on_all_ranks(model)


def a_distributed_optimizer_may_be_broadcast_itself() -> None:
    torch.manual_seed(hvd.rank())
    model = nn.Linear(6, 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01 * (1 + hvd.rank())))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.01
    train(model, optimizer, hvd.rank(), steps=3)
    assert_equal_on_all_ranks(model)


def a_fresh_optimizer_moves_nothing() -> None:
    model = nn.Linear(6, 4)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.bias.requires_grad_(False)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert torch.equal(model.weight, before)
    assert torch.equal(model.weight.grad, torch.zeros_like(model.weight))
    assert model.bias.grad is None


def several_groups_and_tensors_as_options() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    optimizer = torch.optim.Adam(
        [
            {"params": model[0].parameters(), "lr": torch.tensor(0.01 * (1 + hvd.rank())), "capturable": False},
            {"params": model[1].parameters(), "betas": (0.5, 0.6 + 0.1 * hvd.rank())},
        ],
        foreach=False,
    )
    train(model, optimizer, 0, steps=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.01)
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.6)


def lbfgs_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(nn.Linear(2, 2).parameters()), root_rank=0)


def parameters_must_be_a_state_dict_or_named() -> None:
    for wrong in (nn.Linear(2, 2).parameters(), torch.zeros(3), 7):
        with pytest.raises(ValueError, match="invalid params"):
            hvd.broadcast_parameters(wrong, root_rank=0)
    named = [("weight", torch.full((3,), float(hvd.rank()))), ("nothing", None)]
    hvd.broadcast_parameters(named, root_rank=hvd.size() - 1)
    assert torch.all(named[0][1] == hvd.size() - 1)
    buffers = nn.BatchNorm1d(3)
    buffers.num_batches_tracked.fill_(hvd.rank())
    hvd.broadcast_parameters(buffers.state_dict(), root_rank=hvd.size() - 1)
    assert buffers.num_batches_tracked == hvd.size() - 1


CASES = cases(globals())

if __name__ == "__main__":
    main(CASES)
