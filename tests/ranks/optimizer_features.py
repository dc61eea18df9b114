"""What a DistributedOptimizer offers besides ordinary training: sparse gradients, groups, process sets, join."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from conformance.training import (
    assert_equal_on_all_ranks,
    assert_same_parameters,
    assert_same_training,
    batch,
    joined,
    main,
)
from torch import nn

import sirtaki.torch as hvd
from sirtaki.errors import NotInitializedError


class Words(nn.Module):
    """An embedding with sparse gradients, of which a rank may touch nothing, before dense layers."""

    def __init__(self, *, sparse: bool, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(30, 8, sparse=sparse)
        self.head = nn.Linear(8, 5)
        self.tied = tied

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words).sum(0)
        logits = self.head(hidden)
        return (logits.square().mean() + (hidden @ self.embedding.weight.T).square().mean()) if self.tied else logits


def words_of(rank: int, iteration: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * iteration + rank)
    count = 0 if (iteration + rank) % 3 == 0 else 6  # sometimes there is nothing to look up
    return torch.randint(0, 30, (count,), generator=generator)


def word_loss(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
    words = words_of(rank, iteration)
    if not len(words):
        return model.head(torch.ones(8, dtype=torch.float64)).square().mean()
    return model(words).square().mean()


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def sparse_gradients() -> None:
    for accumulates in (False, True):

        def step(
            optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor], accumulates: bool = accumulates
        ) -> None:
            optimizer.zero_grad(set_to_none=not accumulates)
            loss().backward()
            optimizer.step()

        model = Words(sparse=True).double()
        assert_same_training(model, word_loss, make_optimizer=plain_sgd, step=step, steps=9)
        if hvd.size() > 1:
            assert model.embedding.weight.grad.is_sparse
    assert_same_training(Words(sparse=True).double(), word_loss, make_optimizer=plain_sgd, op=hvd.Sum, steps=9)
    model = Words(sparse=True).double()
    assert_same_training(model, word_loss, make_optimizer=plain_sgd, sparse_as_dense=True, steps=9)
    if hvd.size() > 1:
        assert not model.embedding.weight.grad.is_sparse


def sparse_adam_beside_a_dense_optimizer() -> None:
    model = Words(sparse=True).double()
    alone = copy.deepcopy(model)

    def two(net: Words) -> list[torch.optim.Optimizer]:
        return [torch.optim.SparseAdam(net.embedding.parameters()), torch.optim.SGD(net.head.parameters(), lr=0.1)]

    def step(optimizers: list[torch.optim.Optimizer], loss: torch.Tensor) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    ours, theirs = [hvd.DistributedOptimizer(each) for each in two(model)], two(alone)
    for iteration in range(1, 12, 3):  # iterations in which rank 0 at least looks something up
        step(ours, word_loss(model, hvd.rank(), iteration))
        step(theirs, joined(word_loss, alone, iteration))
        assert_same_parameters(model, alone, 1e-9)


def sparse_adam_whose_gradients_travel_dense() -> None:
    model = nn.Embedding(30, 8, sparse=True).double()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert_same_training(
        model,
        lambda net, rank, iteration: net(torch.tensor([rank, iteration, 3 * rank + iteration])).square().sum(),
        make_optimizer=lambda net: torch.optim.SparseAdam(net.parameters(), lr=0.01),
        sparse_as_dense=True,
    )
    assert model.weight.grad.is_sparse


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


def ranks_with_fewer_batches_join() -> None:
    for learns in (False, True):
        model = mlp()
        alone = copy.deepcopy(model)
        optimizer, reference = hvd.DistributedOptimizer(plain_sgd(model)), plain_sgd(alone)
        done = 0
        for _ in range(2):
            batches = [(1 if learns else 5) + 2 * rank for rank in range(hvd.size())]
            for iteration in range(batches[hvd.rank()]):
                optimizer.zero_grad()
                mean_square(model, hvd.rank(), done + iteration).backward()
                optimizer.step()
                total = hvd.allreduce(torch.ones(()), op=hvd.Sum, name="present")
                assert total == sum(count > iteration for count in batches)
            last = hvd.join()
            assert last == hvd.size() - 1
            hvd.broadcast_parameters(model.state_dict(), root_rank=last)
            for iteration in range(max(batches)):
                reference.zero_grad()
                present = [rank for rank, count in enumerate(batches) if count > iteration]
                losses = [mean_square(alone, rank, done + iteration) for rank in present]
                (torch.stack(losses).sum() / hvd.size()).backward()
                reference.step()
            done += max(batches)
            assert_same_parameters(model, alone, 1e-12)


def two_optimizers_and_a_rank_that_joins() -> None:
    one, other = mlp(), mlp()
    optimizers = [hvd.DistributedOptimizer(plain_sgd(each)) for each in (one, other)]
    for iteration in range(3 + hvd.rank()):
        for times, (model, optimizer) in zip((2, 1), zip((one, other), optimizers, strict=True), strict=True):
            for _ in range(times):
                optimizer.zero_grad()
                mean_square(model, hvd.rank(), iteration).backward()
                optimizer.step()
    assert hvd.join() == hvd.size() - 1
    for model in (one, other):
        hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
        assert_equal_on_all_ranks(model)


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


def parameters_that_are_added_or_thawed_later() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(24, 24), "head": nn.Linear(24, 3), "later": nn.Linear(3, 3)}).double()
    model["body"].requires_grad_(False)
    alone = copy.deepcopy(model)

    def loss(net: nn.ModuleDict, rank: int, iteration: int) -> torch.Tensor:
        return net["later"](net["head"](torch.tanh(net["body"](batch(rank, iteration, 5, 24))))).square().mean()

    def first(net: nn.ModuleDict) -> torch.optim.Optimizer:
        return torch.optim.SGD([*net["body"].parameters(), *net["head"].parameters()], lr=0.1)

    optimizer, reference = hvd.DistributedOptimizer(first(model)), first(alone)
    for iteration in range(12):
        if iteration == 4:
            for net, each in ((model, optimizer), (alone, reference)):
                each.add_param_group({"params": net["later"].parameters(), "lr": 0.01})
        if iteration == 8:
            for net in (model, alone):
                net["body"].requires_grad_(True)
        for net in (model, alone):
            net.zero_grad()
        loss(model, hvd.rank(), iteration).backward()
        optimizer.step()
        joined(loss, alone, iteration).backward()
        reference.step()
        assert_same_parameters(model, alone, 1e-12, f"after step {iteration}")
    assert optimizer.param_groups[1]["lr"] == 0.01


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
    sparse_gradients,
    sparse_adam_beside_a_dense_optimizer,
    sparse_adam_whose_gradients_travel_dense,
    parameters_have_names,
    groups_of_parameters,
    a_group_leaves_as_one,
    adasum_combines_updates,
    a_process_set_trains_by_itself,
    ranks_with_fewer_batches_join,
    two_optimizers_and_a_rank_that_joins,
    copies_and_pickles_are_plain_optimizers,
    parameters_that_are_added_or_thawed_later,
    mistakes_are_named,
]

if __name__ == "__main__":
    main(CASES)
