"""Models, losses, whole steps and backward passes compiled by `torch.compile`. Started by test_compiled.py.

Each case trains with each of Sirtaki's interfaces and compares with one process. It also checks that Dynamo has
compiled neither Sirtaki nor functions that Sirtaki calls.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from conformance.training import batch, main
from rank_jobs import cases
from torch import nn
from torch._dynamo import convert_frame
from torch._dynamo import utils as dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

import sirtaki
import sirtaki.torch as hvd
import sirtaki.torch.distributed
from sirtaki.torch import ddp

STEPS = 4
OURS = Path(sirtaki.__file__).parent
TORCH = Path(torch.__file__).parent
STANDARD = Path(contextlib.__file__).parent
INLINED = {"call": OURS / "uncompiled.py"}
"""Files that Dynamo may inline: hooks on modules, which do nothing in a compiled graph."""

INLINED_IN_BACKWARD = INLINED | {"hook": OURS / "engine" / "reducing" / "gradient_hooks.py"}

Train = Callable[[torch.Tensor], object]
Ways = dict[str, Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.second(torch.tanh(self.first(inputs)))


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 12), Block(), Block(), nn.Linear(12, 3)).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _by_optimizer(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, hvd.DistributedOptimizer(sgd(model), model.named_parameters())


def _attached(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = DistributedDataParallel(model)
    ddp.attach(wrapped)
    return wrapped, sgd(model)


def _by_backend(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return DistributedDataParallel(model, process_group=dist.new_group(backend="sirtaki")), sgd(model)


def _sharded(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from sirtaki.torch import fsdp

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (model[1], model[2]):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fsdp.attach(model)
    return model, sgd(model)


WAYS: Ways = {"optimizer": _by_optimizer, "attach": _attached, "backend": _by_backend}
ALL_WAYS: Ways = {**WAYS, "fsdp": _sharded} if TorchVersion(torch.__version__) >= "2.7" else WAYS


class Compiled:
    """Frames that Dynamo has compiled, failed to compile, or inlined since this object was created."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        dynamo.clear_compilation_metrics()
        self.frames, self.inlined = set[tuple[str, str]](), set[tuple[str, str]]()
        self._handle = convert_frame.register_bytecode_hook(self._frame)

    def _frame(self, code: CodeType, _: CodeType) -> None:
        self.frames.add((code.co_filename, code.co_name))

    def backend(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if hasattr(dynamo, "get_traced_code"):
            self.inlined |= {(code.co_filename, code.co_name) for code in dynamo.get_traced_code() or ()}
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def check(self, inlined: dict[str, Path] = INLINED) -> None:
        self._handle.remove()
        tried = {(each.co_filename, each.co_name) for each in dynamo.get_compilation_metrics() if each.co_filename}
        assert self.frames, "nothing was compiled"
        foreign = [each for each in self.frames | tried if not self._is_expected(Path(each[0]))]
        assert not foreign, foreign
        ours = [(file, name) for file, name in self.inlined if OURS in Path(file).parents]
        assert all(Path(file) == inlined.get(name) for file, name in ours), ours

    @staticmethod
    def _is_expected(file: Path) -> bool:
        """Return whether Dynamo may compile a file: this program, PyTorch, compiled autograd, or helpers of PyTorch."""
        near = {TORCH, STANDARD} & set(file.parents) and ("site-packages" not in file.parts or TORCH in file.parents)
        return file == Path(__file__) or str(file).startswith("<") or bool(near)


def _trains_alike(
    make: Callable[[nn.Module, torch.optim.Optimizer, Compiled], Train],
    ways: Ways,
    *,
    prepare: Callable[[nn.Module, Compiled], object] = lambda model, compiled: None,
    inlined: dict[str, Path] = INLINED,
    steps: bool = True,
    backward: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> None:
    """Train a compiled model with each interface, and compare with one process.

    `make` returns the function that computes gradients of a batch; with `steps` it also steps. `prepare` changes the
    model before it is wrapped.
    """
    warnings.simplefilter("ignore")  # because PyTorch warns when it compiles
    for way, wrap in ways.items():
        compiled, model, alone = Compiled(), network(), network()
        prepare(model, compiled)
        wrapped, optimizer = wrap(model)
        reference = sgd(alone)
        train = make(wrapped, optimizer, compiled)
        for step in range(STEPS):
            with backward():
                train(batch(dist.get_rank(), step, 5, 6))
            losses = [alone(batch(rank, step, 5, 6)).square().mean() for rank in range(dist.get_world_size())]
            torch.stack(losses).mean().backward()
            if steps:
                for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
                    _same(found.grad, wanted.grad, f"{way}, gradients of step {step}")
                optimizer.step()
                optimizer.zero_grad()
            reference.step()
            reference.zero_grad()
            for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
                _same(found.detach(), wanted.detach(), f"{way}, after step {step}")
        compiled.check(inlined)


def _same(found: Any, wanted: torch.Tensor, when: str) -> None:
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11, msg=lambda text: f"{when}: {text}")


def _loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().mean()


def a_step_with_its_backward_pass() -> None:
    def make(model: nn.Module, _: torch.optim.Optimizer, compiled: Compiled) -> Train:
        def step(inputs: torch.Tensor) -> torch.Tensor:
            loss = _loss(model, inputs)
            loss.backward()
            return loss.detach()

        return torch.compile(step, backend=compiled.backend)

    _trains_alike(make, ALL_WAYS)


def a_backward_pass() -> None:
    """Train by compiled autograd, which runs no callback at the end of a pass. PyTorch rejects it with DDP."""

    def make(model: nn.Module, _: torch.optim.Optimizer, compiled: Compiled) -> Train:
        nonlocal backend
        backend = compiled.backend
        return lambda inputs: _loss(model, inputs).backward()

    backend: Any = None

    @contextlib.contextmanager
    def backward() -> Iterator[None]:
        from torch._dynamo import compiled_autograd

        enable = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable
        with enable(torch.compile(backend=backend)):
            yield

    _trains_alike(make, {"optimizer": _by_optimizer}, inlined=INLINED_IN_BACKWARD, backward=backward)


def a_loss_in_one_graph() -> None:
    def make(model: nn.Module, _: torch.optim.Optimizer, compiled: Compiled) -> Train:
        loss = torch.compile(lambda inputs: _loss(model, inputs), backend=compiled.backend, fullgraph=True)
        return lambda inputs: loss(inputs).backward()

    _trains_alike(make, {"optimizer": _by_optimizer})


CASES = cases(globals())


def a_loss() -> None:
    def make(model: nn.Module, _: torch.optim.Optimizer, compiled: Compiled) -> Train:
        loss = torch.compile(lambda inputs: _loss(model, inputs), backend=compiled.backend)
        return lambda inputs: loss(inputs).backward()

    _trains_alike(make, ALL_WAYS)


def a_wrapped_model() -> None:
    def make(model: nn.Module, _: torch.optim.Optimizer, compiled: Compiled) -> Train:
        forward = torch.compile(model, backend=compiled.backend)
        return lambda inputs: _loss(forward, inputs).backward()

    _trains_alike(make, ALL_WAYS)


def a_model_in_one_graph() -> None:
    def prepare(model: nn.Module, compiled: Compiled) -> None:
        model.compile(backend=compiled.backend, fullgraph=True)

    _trains_alike(lambda model, *_: lambda inputs: _loss(model, inputs).backward(), ALL_WAYS, prepare=prepare)


def each_block_by_itself() -> None:
    def prepare(model: nn.Module, compiled: Compiled) -> None:
        for block in (model[1], model[2]):
            block.compile(backend=compiled.backend, fullgraph=True)

    _trains_alike(lambda model, *_: lambda inputs: _loss(model, inputs).backward(), ALL_WAYS, prepare=prepare)


def a_step_of_the_optimizer() -> None:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer, compiled: Compiled) -> Train:
        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        update = torch.compile(update, backend=compiled.backend)
        forward = torch.compile(model, backend=compiled.backend)

        def train(inputs: torch.Tensor) -> None:
            _loss(forward, inputs).backward()
            update()

        return train

    _trains_alike(make, ALL_WAYS, steps=False)


def a_step_with_all_that_belongs_to_it() -> None:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer, compiled: Compiled) -> Train:
        def step(inputs: torch.Tensor) -> torch.Tensor:
            loss = _loss(model, inputs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return hvd.allreduce(loss.detach())

        return torch.compile(step, backend=compiled.backend)

    _trains_alike(make, ALL_WAYS, steps=False)


MORE = cases(globals())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ddp.attach(DistributedDataParallel(network()))  # the first attach initialises the job
    main([*CASES, *MORE])
    dist.destroy_process_group()
