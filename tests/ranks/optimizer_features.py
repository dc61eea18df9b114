"""What a DistributedOptimizer offers besides ordinary training: sparse gradients, groups, process sets, join."""

import copy
import io
import pickle

import pytest
import torch
from conformance.training import (
    assert_same_parameters,
    assert_same_training,
    batch,
    main,
)
from torch import nn

import sirtaki.torch as hvd
from sirtaki.errors import NotInitializedError


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def parameters_have_names() -> None:
    model = nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    assert optimizer._parameter_names == {model.weight: "weight", model.bias: "bias"}
    later = nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [later]})
    assert optimizer._parameter_names[later] == "group.1.0"


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)).double()


def mean_square(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
    return model(batch(rank, iteration, 5, 24)).square().mean()


def groups_of_parameters() -> None:
    assert_same_training(mlp(), mean_square, groups=2)
    assert_same_training(mlp(), mean_square, groups=100)
    model = mlp()
    first = list(model[0].parameters())
    assert_same_training(model, mean_square, groups=[first, [model[4].bias, model[2].weight]])
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedOptimizer(plain_sgd(mlp()), num_groups=2)


def a_group_leaves_as_one() -> None:
    model = mlp()
    optimizer = hvd.DistributedOptimizer(plain_sgd(model), groups=[[model[4].bias, model[0].weight]])
    if hvd.size() == 1:
        return
    for _ in range(3):
        optimizer.zero_grad()
        mean_square(model, hvd.rank(), 0).backward()
        optimizer.step()
    arrived: list[bool] = []
    model[2].weight.register_post_accumulate_grad_hook(
        lambda _: arrived.append(optimizer._gradients.reducers[0].tuned.synchroniser._arrivals.indices != [])
    )
    optimizer.zero_grad()
    mean_square(model, hvd.rank(), 0).backward()
    # The last layer's weight has come before the middle one; its bias waits for the first layer's weight.
    names = optimizer._gradients.reducers[0].tuned.synchroniser._names
    order = [names[index] for index in optimizer._gradients.reducers[0].tuned.synchroniser._arrivals.indices]
    assert order.index("parameter.5") > order.index("parameter.2")
    assert abs(order.index("parameter.5") - order.index("parameter.0")) == 1
    optimizer.step()


def adasum_of_two(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The textbook formula."""
    product = float(a.flatten() @ b.flatten())
    return (1 - product / (2 * float(a.norm() ** 2))) * a + (1 - product / (2 * float(b.norm() ** 2))) * b


def adasum_combines_updates() -> None:
    if hvd.size() & (hvd.size() - 1):
        with pytest.raises(NotImplementedError):
            hvd.DistributedOptimizer(plain_sgd(mlp()), op=hvd.Adasum)
        return
    model = mlp()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), op=hvd.Adasum)
    replicas = [mlp() for _ in range(hvd.size())]
    theirs = [torch.optim.Adam(replica.parameters(), lr=0.01) for replica in replicas]
    for iteration in range(4):
        optimizer.zero_grad()
        mean_square(model, hvd.rank(), iteration).backward()
        optimizer.step()
        starts = [param.detach().clone() for param in replicas[0].parameters()]
        for rank, (replica, each) in enumerate(zip(replicas, theirs, strict=True)):
            each.zero_grad()
            mean_square(replica, rank, iteration).backward()
            each.step()
        for number, start in enumerate(starts):
            params = [list(replica.parameters())[number] for replica in replicas]
            updates = [param.detach() - start for param in params]
            while len(updates) > 1:
                updates = [adasum_of_two(a, b) for a, b in zip(updates[::2], updates[1::2], strict=True)]
            for param in params:
                param.data.copy_(start + updates[0])
        assert_same_parameters(model, replicas[0], 1e-9)
    optimizer.synchronize()
    if hvd.size() > 1:
        with pytest.raises(AssertionError, match="Skipping synchronization"), optimizer.skip_synchronize():
            pass


def a_process_set_trains_by_itself() -> None:
    if hvd.size() < 3:
        return
    evens = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    model = mlp()
    alone = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(plain_sgd(model), process_set=evens)
    reference = plain_sgd(alone)
    members = evens.ranks if evens.included() else [hvd.rank()]
    for iteration in range(8):
        optimizer.zero_grad()
        mean_square(model, hvd.rank(), iteration).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        reference.zero_grad()
        total = sum((mean_square(alone, rank, iteration) for rank in members), torch.zeros(()))
        (total / len(members)).backward()
        reference.step()
        assert_same_parameters(model, alone, 1e-12)
    # All ranks together afterwards, and two sets at the same time.
    odds = hvd.add_process_set(list(range(1, hvd.size(), 2)))
    mine = evens if evens.included() else odds
    both = hvd.DistributedOptimizer(plain_sgd(model), process_set=mine)
    mean_square(model, hvd.rank(), 0).backward()
    if evens.included():
        optimizer.step()
    both.step()
    hvd.barrier()
    assert_same_training(mlp(), mean_square)
    assert hvd.remove_process_set(evens)
    removed = mine is evens
    if removed:
        with pytest.raises(NotInitializedError, match=r"closed when its process set was removed; make a new one"):
            both.step()
    mean_square(model, hvd.rank(), 0).backward()  # hooks are gone where the set is, the others train on
    if not removed:
        both.step()
    assert_same_training(mlp(), mean_square)
    unopened = hvd.ProcessSet([0])
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.DistributedOptimizer(plain_sgd(mlp()), process_set=unopened)


def copies_and_pickles_are_plain_optimizers() -> None:
    model = mlp()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.03))
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    mean_square(model, hvd.rank(), 0).backward()
    optimizer.step()
    restored = pickle.loads(pickle.dumps(optimizer))
    assert type(restored) is torch.optim.Adam
    assert restored.param_groups[0]["lr"] == 0.03
    assert type(copy.deepcopy(optimizer)) is torch.optim.Adam
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    again = mlp()
    again.load_state_dict(loaded["model"])
    other = hvd.DistributedOptimizer(torch.optim.Adam(again.parameters(), lr=0.5))
    other.load_state_dict(loaded["optimizer"])
    for net, each in ((model, optimizer), (again, other)):
        each.zero_grad()
        mean_square(net, hvd.rank(), 1).backward()
        each.step()
    assert_same_parameters(model, again, 0.0)


def mistakes_are_named() -> None:
    model = mlp()
    plain = plain_sgd(model)
    named = list(model.named_parameters())
    for message, options in {
        "must be > 0": {"backward_passes_per_step": 0},
        "gradient_predivide_factor not supported": {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        "must be unique": {"named_parameters": [*named, named[0]]},
        "sequence of tuples": {"named_parameters": model.parameters()},
        "were not named": {"named_parameters": named[1:]},
        "op=Average": {"op": hvd.Max},
        "groups should be": {"groups": -1},
        "list of list": {"groups": [model[0].weight]},
        "only appear once": {"groups": [[model[0].weight], [model[0].weight]]},
    }.items():
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(plain, **options)
    optimizer = hvd.DistributedOptimizer(plain)
    with pytest.raises(ValueError, match="must be > 0"):
        optimizer.set_backward_passes_per_step(0)
    if hvd.size() == 1:
        return
    mean_square(model, 0, 0).backward(inputs=list(model[0].parameters()))
    with pytest.raises(AssertionError, match="race condition"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
        mean_square(model, 0, 0).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(hvd.HorovodInternalError, match="disagree about the model"):
        hvd.DistributedOptimizer(plain_sgd(nn.Linear(3, 3 + (hvd.rank() == 1))))
    with pytest.raises(hvd.HorovodInternalError, match="disagree about the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3 + hvd.rank()))]})
    optimizer.zero_grad()
    mean_square(model, 0, 0).backward()
    with pytest.raises(NotInitializedError, match="closed when its parameters changed, which failed; make a new one"):
        optimizer.step()
    inner = (2 * torch.ones(3, requires_grad=True)).requires_grad_()
    inner.retain_grad()
    with pytest.raises(RuntimeError, match="non-leaf"):
        hvd.DistributedOptimizer(torch.optim.SGD([inner], lr=0.1))
    assert_same_training(mlp(), mean_square)


CASES = [
    parameters_have_names,
    groups_of_parameters,
    a_group_leaves_as_one,
    adasum_combines_updates,
    a_process_set_trains_by_itself,
    copies_and_pickles_are_plain_optimizers,
    mistakes_are_named,
]

if __name__ == "__main__":
    main(CASES)
