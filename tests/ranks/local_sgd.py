"""LocalSGD and DiLoCo on ranks equal a simulation of all ranks in one process. Started by test_local_sgd.py."""

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from conformance.training import assert_equal_on_all_ranks, batch, main, raises
from rank_jobs import cases
from torch import nn

import sirtaki.torch as hvd
from sirtaki.errors import ConfigError, MismatchError

EVERY, LR = 6, 0.05


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    parts = [nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)]
    return nn.Sequential(*parts).double()


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    (model(batch(rank, step, 8, 5)) - batch(rank, step + 1000, 8, 3)).square().mean().backward()
    optimizer.step()


class Simulation:
    """Simulation of all ranks in one process: one model per rank, and merges as in the papers, in float64.

    `outer` creates the outer optimizer of a list of tensors; None = averages.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[nn.Module],
        *,
        delay: int = 0,
        blend: float = 0.0,
        outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None = None,
    ) -> None:
        self.models = [copy.deepcopy(model) for _ in range(hvd.size())]
        self.optimizers = [inner(there) for there in self.models]
        names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        self._params = [[names[id(param)] for param in part.parameters()] for part in parts]
        self._buffers = [[names[id(b)] for b in part.buffers() if b.is_floating_point()] for part in parts]
        self._origin = {name: param.detach().clone() for name, param in model.named_parameters()}
        self._outer = None if outer is None else outer(list(self._origin.values()))
        self._delay, self._blend, self._interval = delay, blend, EVERY // len(parts)
        self._sent: tuple[int, list[dict[str, torch.Tensor]]] | None = None
        self._steps = self._turn = 0

    def tensors(self, rank: int) -> dict[str, torch.Tensor]:
        model = self.models[rank]
        return dict((*model.named_parameters(), *model.named_buffers()))

    @torch.no_grad()
    def send(self) -> None:
        wanted = (*self._params[self._turn], *self._buffers[self._turn])
        copies = [{name: self.tensors(rank)[name].clone() for name in wanted} for rank in range(len(self.models))]
        self._sent, self._steps = (self._turn, copies), 0
        self._turn = (self._turn + 1) % len(self._params)

    @torch.no_grad()
    def merge(self) -> None:
        assert self._sent is not None
        (part, sent), self._sent = self._sent, None
        averages = {name: sum(copy[name] for copy in sent) / len(sent) for name in sent[0]}
        if self._outer is not None:
            for name in self._params[part]:
                self._origin[name].grad = self._origin[name] - averages[name]
            self._outer.step()
            self._outer.zero_grad()
        for rank in range(len(self.models)):
            for name, tensor in self.tensors(rank).items():
                if name in self._params[part] and self._outer is not None:
                    tensor.copy_((1 - self._blend) * self._origin[name] + self._blend * tensor)
                elif name in averages:
                    tensor.copy_(averages[name] + tensor - sent[rank][name])

    def step(self, number: int) -> None:
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            train(model, optimizer, rank, number)
        self._steps += 1
        if self._sent is not None and self._steps >= self._delay:
            self.merge()
        if self._steps >= self._interval:
            self.send()
            if self._delay == 0:
                self.merge()

    def end(self) -> None:
        if self._sent is not None:
            self.merge()
        for _ in self._params:
            self.send()
            self.merge()
        if self._outer is not None:
            for rank in range(len(self.models)):
                for name, origin in self._origin.items():
                    self.tensors(rank)[name].data.copy_(origin)


def assert_same(model: nn.Module, simulation: Simulation, when: str, tolerance: float = 1e-12) -> None:
    wanted = simulation.tensors(hvd.rank())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        torch.testing.assert_close(
            tensor, wanted[name], rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n} {when}: {text}"
        )


def play(context: Any, model: nn.Module, optimizer: torch.optim.Optimizer, simulation: Simulation, steps: int) -> None:
    with context:
        for number in range(steps):
            train(model, optimizer, hvd.rank(), number)
            simulation.step(number)
            assert_same(model, simulation, f"after step {number + 1}")
    simulation.end()
    assert_same(model, simulation, "in the end")
    assert_equal_on_all_ranks(model)


def local_sgd_averages_as_simulated() -> None:
    for count, delay in ((1, 0), (1, 4), (2, 0), (2, 1), (2, 3), (3, 2)):
        model = make_model()
        parts = {1: [model], 2: [model[:2], model[2:]], 3: [model[0], model[1], model[3]]}[count]
        optimizer = inner(model)
        simulation = Simulation(model, parts, delay=delay)
        context = hvd.LocalSGD(model, optimizer, EVERY, fragments=parts, delay=delay)
        play(context, model, optimizer, simulation, 2 * EVERY + 4)


def nesterov(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.7, nesterov=True)


def diloco_updates_as_simulated() -> None:
    for count, delay, blend in ((1, 0, 0.0), (1, 3, 0.5), (2, 1, 0.25), (2, 3, 0.0)):
        model = make_model()
        parts = [model] if count == 1 else [model[:2], model[2:]]
        optimizer = inner(model)
        simulation = Simulation(model, parts, delay=delay, blend=blend, outer=nesterov)
        context = hvd.DiLoCo(model, optimizer, EVERY, fragments=parts, delay=delay, blend=blend)
        play(context, model, optimizer, simulation, 3 * EVERY + 1)


def any_optimizer_may_be_the_outer_one() -> None:
    model = make_model()
    optimizer, outer = inner(model), torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    simulation = Simulation(model, [model], outer=lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-3))
    play(hvd.DiLoCo(model, optimizer, EVERY, outer=outer), model, optimizer, simulation, 2 * EVERY + 1)


class OfAllDtypes(nn.Module):
    """Parameters of several dtypes, including an empty one, a transposed view, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128):
            self.register_parameter(f"of_{str(dtype)[6:]}", nn.Parameter(torch.randn(3, 5).to(dtype)))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.strided = nn.Parameter(torch.randn(4, 6).t())
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def loss(self, rank: int, step: int) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for place, param in enumerate(there for there in self.parameters() if there.requires_grad):
            target = batch(rank, 100 * step + place, *param.shape)
            total = total + (param - target).abs().square().sum().double()
        return total


def every_dtype_is_averaged() -> None:
    for kind in (hvd.LocalSGD, hvd.DiLoCo):
        model = OfAllDtypes()
        trained = [param for param in model.parameters() if param.requires_grad]
        exact = [p.detach().to(torch.complex128 if p.is_complex() else torch.float64).clone() for p in trained]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        with kind(model, optimizer, sync_every=2) as context:
            for step in range(2):
                optimizer.zero_grad()
                model.loss(hvd.rank(), step).backward()
                optimizer.step()
        # The same in doubles: steps of SGD on a quadratic, then the average, or Nesterov's first step from there.
        for place, (param, start) in enumerate(zip(trained, exact, strict=True)):
            ends = []
            for rank in range(hvd.size()):
                end = start.clone()
                for step in range(2):
                    end -= 0.2 * (end - batch(rank, 100 * step + place, *param.shape))
                ends.append(end)
            wanted = sum(ends) / len(ends)
            if kind is hvd.DiLoCo:
                wanted = start - 0.7 * 1.7 * (start - wanted)
            tolerance = {torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float64: 1e-12, torch.complex128: 1e-12}
            limit = tolerance.get(param.dtype, 1e-5)
            torch.testing.assert_close(param.detach().to(wanted.dtype), wanted, rtol=limit, atol=limit)
        assert_equal_on_all_ranks(model)
        assert torch.equal(model.table, torch.arange(4.0))
        assert context.sync_every == 2


def ranks_may_have_different_numbers_of_batches() -> None:
    every, counts = 3, [3 * rank + 2 for rank in range(hvd.size())]
    for fragments, delay in ((1, 0), (2, 1), (3, 1), (6, 1)):
        model = make_model()
        models = [copy.deepcopy(model) for _ in counts]
        optimizers = [inner(there) for there in models]
        optimizer = inner(model)
        with hvd.LocalSGD(model, optimizer, every if fragments in (1, 3) else 6, fragments=fragments, delay=delay):
            for number in range(counts[hvd.rank()]):
                train(model, optimizer, hvd.rank(), number)
        assert_equal_on_all_ranks(model)
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                assert torch.equal(hvd.broadcast(buffer, 0, name=f"{fragments}.{name}"), buffer), name
        if fragments > 1:
            continue
        for begin in range(0, max(counts), every):
            trained = [rank for rank, count in enumerate(counts) if count > begin]
            for rank in trained:
                for number in range(begin, min(begin + every, counts[rank])):
                    train(models[rank], optimizers[rank], rank, number)
            states = [copy.deepcopy(models[rank].state_dict()) for rank in trained]
            for there in models:
                for name, tensor in there.state_dict().items():
                    if tensor.is_floating_point():
                        tensor.copy_(sum(state[name] for state in states) / len(states))
        for name, param in models[0].named_parameters():
            torch.testing.assert_close(dict(model.named_parameters())[name], param, rtol=1e-12, atol=1e-12)


def training_goes_on_from_a_saved_state() -> None:
    for kind, saved_after in ((hvd.LocalSGD, 4), (hvd.DiLoCo, 7), (hvd.DiLoCo, 11)):

        def made(kind: Any = kind) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
            model = make_model()
            optimizer = inner(model)
            # Sent in step 6 and merged in step 9. With a state of step 7, the fragment is sent again after step 8.
            return model, optimizer, kind(model, optimizer, EVERY, delay=0 if kind is hvd.LocalSGD else 3)

        def run(model: nn.Module, optimizer: torch.optim.Optimizer, context: Any, steps: range) -> Any:
            with context:
                for number in steps:
                    train(model, optimizer, hvd.rank(), number)
                return copy.deepcopy([each.state_dict() for each in (model, optimizer, context)])

        steps = 3 * EVERY + 2
        whole, again = made(), made()
        run(*whole, range(steps))
        for each, state in zip(again, run(*made(), range(saved_after)), strict=True):
            each.load_state_dict(state)
        run(*again, range(saved_after, steps))
        limit = 0.3 if (kind, saved_after) == (hvd.DiLoCo, 7) else 1e-12
        for model, _, _ in (whole, again):
            assert_equal_on_all_ranks(model)
        for name, tensor in whole[0].state_dict().items():
            torch.testing.assert_close(again[0].state_dict()[name], tensor, rtol=limit, atol=limit)


def a_tuned_interval_is_the_same_everywhere_and_follows_the_network() -> None:
    torch.manual_seed(1)
    model = nn.Linear(1 << 10, 1 << 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(torch.ones(1, 1 << 10)).sum().backward()
    with hvd.LocalSGD(model, optimizer, sync_every=None) as context:
        before = 0
        for pause_s in (0.0, 0.01):
            for _ in range(400):
                optimizer.step()
                time.sleep(pause_s)
            said = hvd.allgather(torch.tensor([[context.sync_every, context.delay]]))
            assert (said == said[0]).all(), said
            assert 8 <= context.sync_every <= 500
            if pause_s:  # on an idle machine, a fragment of 1 MB takes few of these steps
                assert context.sync_every <= max(40, before // 2), (context.sync_every, before)
            before = context.sync_every
    assert_equal_on_all_ranks(model)


def what_a_rank_learns_while_a_fragment_travels_is_kept() -> None:
    weight = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
    with torch.no_grad():
        weight.weight.zero_()
    with hvd.LocalSGD(weight, optimizer, 4, delay=2):
        for _ in range(6):
            weight.weight.grad = torch.full((1, 1), -float(hvd.rank() + 1))
            optimizer.step()
        mean = (hvd.size() + 1) / 2
        assert weight.weight.item() == 4 * mean + 2 * (hvd.rank() + 1)
    assert weight.weight.item() == 6 * mean


def sets_of_ranks_train_apart_and_beside_a_distributed_optimizer() -> None:
    size = hvd.size()
    if size < 4:
        return
    nodes = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    across = [hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])]
    node, pair = nodes[hvd.rank() // 2], across[hvd.rank() % 2]
    weight = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        weight.weight.zero_()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weight.parameters(), lr=1.0), process_set=node)
    with hvd.LocalSGD(weight, optimizer, 2, process_set=pair):
        for step in range(4):
            optimizer.zero_grad()
            (-float(hvd.rank() + 1) * weight.weight).sum().backward()
            optimizer.step()
            wanted = (step + 1) * (2.5 if step % 2 else {0: 1.5, 1: 3.5}[hvd.rank() // 2])
            if step % 2 == 0:
                wanted = step * 2.5 + {0: 1.5, 1: 3.5}[hvd.rank() // 2]
            assert weight.weight.item() == wanted, (step, weight.weight.item(), wanted)
    optimizer.close()
    for there in (*nodes, *across):
        hvd.remove_process_set(there)


def mistakes_are_told() -> None:
    model = make_model()
    optimizer = inner(model)
    if hvd.size() > 1:
        distributed = hvd.DistributedOptimizer(inner(model))
        raises(ConfigError, "has no effect", hvd.LocalSGD(model, optimizer).__enter__)
        distributed.close()
        raises(ConfigError, "a plain optimizer", lambda: hvd.LocalSGD(model, distributed))
        with torch.no_grad():
            model[0].weight.add_(hvd.rank())
        for kind in (hvd.LocalSGD, hvd.DiLoCo):
            raises(ConfigError, "ranks 0 and 1 begin with different", kind(model, optimizer).__enter__)
        other = nn.Linear(3 + hvd.rank(), 1)
        raises(MismatchError, "disagree", hvd.LocalSGD(other, inner(other)).__enter__)
        hvd.broadcast_parameters(model.state_dict(), 0)
    context = hvd.DiLoCo(model, optimizer, 1)
    raises(ConfigError, "around the training loop", context.synchronize)
    with suppress(KeyError), context:
        train(model, optimizer, hvd.rank(), 0)
        raises(ConfigError, "is in use", context.__enter__)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        raises(ConfigError, "create a new object", lambda: train(model, optimizer, hvd.rank(), 1))
        raise KeyError("the script's own")
    # A block that has raised may be entered again, with fragments in flight.
    optimizer = inner(model)
    context = hvd.LocalSGD(model, optimizer, 4, delay=3)
    hvd.broadcast_parameters(model.state_dict(), 0)
    for _ in range(2):
        with suppress(KeyError), context:
            for number in range(5):
                train(model, optimizer, hvd.rank(), number)
            raise KeyError("while a fragment is on its way")
    with context:
        train(model, optimizer, hvd.rank(), 5)
    assert_equal_on_all_ranks(model)


CASES = cases(globals())

if __name__ == "__main__":
    main(CASES)
