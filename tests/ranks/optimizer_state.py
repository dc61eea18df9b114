"""Every optimizer of torch.optim starts equal on all ranks after broadcast_optimizer_state."""

import inspect
import itertools
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
        return nn.Linear(6, 4, bias=False)  # it accepts matrices only
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
        # Only the root has trained. Its peers have other parameters and options, and no state yet.
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
        # From one state and the same data, all ranks must get the same parameters.
        train(model, optimizer, rank=0, steps=2)
        assert_equal_on_all_ranks(model)
        distributed = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        train(model, distributed, hvd.rank(), steps=3)
        assert_equal_on_all_ranks(model)


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
FLAGS = ("capturable", "foreach", "fused", "amsgrad", "centered", "momentum", "tensor_lr")
TRAINED = ({0}, {1}, {0, 1}, set[int]())  # ranks that have a state before the broadcast


def options_of(kind: type[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    known = inspect.signature(kind).parameters
    flags = [{flag: 0.9 if flag == "momentum" else True} for flag in FLAGS if flag in known]
    return [{}, *flags, {"lr": torch.tensor(0.01, dtype=torch.float64)}]


def bits(value: Any) -> Any:
    """Return a comparable form of a value: for a tensor its dtype, device, strides and bytes."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense() if value.is_sparse else value.detach()
        content = dense.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist()
        return (str(value.dtype), str(value.device), tuple(value.stride()), content)
    if isinstance(value, dict):
        return {str(key): bits(child) for key, child in value.items() if key != "params"}
    return [bits(child) for child in value] if isinstance(value, list | tuple) else value


def state_bits(optimizer: torch.optim.Optimizer) -> Any:
    return [
        (bits(group), [bits(optimizer.state.get(param, {})) for param in group["params"]])
        for group in optimizer.param_groups
    ]


def gradients(params: list[torch.Tensor], seed: int, *, sparse: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        if param.requires_grad:
            drawn = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
            param.grad = drawn.to_sparse(1) if sparse else drawn


def states_are_equal_to_the_last_bit_and_of_the_roots_dtypes() -> None:
    compared: dict[str, int] = {}
    for kind in all_kinds():
        if kind.__name__ in NO_STATE_TO_SHARE:
            continue
        for number, (dtype, options) in enumerate(itertools.product(DTYPES, options_of(kind))):
            trained, sparse = TRAINED[number % len(TRAINED)], kind is torch.optim.SparseAdam
            drawn = parameters_for(kind, seed=hvd.rank()).parameters()
            params = [nn.Parameter(param.detach().to(dtype)) for param in drawn]
            groups: list[dict[str, Any]] = [{"params": params}]
            if len(params) > 2:  # with a frozen group, and options of single parameters
                params[-1].requires_grad_(False)
                more = {} if "lr" in options else {"lr": 0.01 * (1 + hvd.rank())}
                groups = [{"params": params[:1], **more}, {"params": params[1:-1]}, {"params": params[-1:]}]
            made = True
            try:
                optimizer = kind(groups, **options)
                for step in range(3 if hvd.rank() in trained else 0):
                    gradients(params, step + 10 * hvd.rank(), sparse=sparse)
                    optimizer.step()
            except (RuntimeError, ValueError, AssertionError, TypeError):  # PyTorch lacks this optimizer
                made = False
            if not all(hvd.allgather_object(made)):
                continue
            root = number % hvd.size()
            before = hvd.broadcast_object(state_bits(optimizer), root)
            hvd.broadcast_optimizer_state(optimizer, root_rank=root)
            assert state_bits(optimizer) == before, f"{kind.__name__} {dtype} {options} {trained}"
            compared[kind.__name__] = compared.get(kind.__name__, 0) + 1
    assert min(compared.values()) >= 5, compared
    assert len(compared) == len(all_kinds()) - len(NO_STATE_TO_SHARE)


def replicas_stay_equal_after_a_state_whose_dtype_is_not_the_parameters() -> None:
    for kind, dtype in itertools.product((torch.optim.NAdam, torch.optim.ASGD), (torch.float64, torch.bfloat16)):
        model = parameters_for(kind, seed=3).to(dtype)
        alone, wrapped = kind(model.parameters(), lr=0.01), None
        if hvd.rank() == 0:
            for step in range(5):
                gradients(list(model.parameters()), step, sparse=False)
                alone.step()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for again in range(2):  # first a plain optimizer, then the distributed one
            hvd.broadcast_optimizer_state(wrapped or alone, root_rank=0)
            wrapped = wrapped or hvd.DistributedOptimizer(alone, named_parameters=model.named_parameters())
            for step in range(20):
                wrapped.zero_grad()
                model(batch(hvd.rank(), step + 100 * again, 5, 6, dtype=dtype)).square().mean().backward()
                wrapped.step()
            assert_equal_on_all_ranks(model)


class Remembering(torch.optim.Optimizer):
    """An optimizer whose state has types that PyTorch's own do not use: strings, nested containers, and numbers."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["phase"] = "warm" if state.setdefault("count", 0) < 3 else "cold"
                state["count"] += 1
                state["history"] = [*state.get("history", [])[-2:], param.grad.double().sum()]
                state["sums"] = {"all": (param.grad.double().clone(), torch.tensor(state["count"]))}
                param.sub_(group["lr"] * param.grad)


def what_an_optimizer_of_a_script_keeps_is_equal_too() -> None:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((2, 2), 1 / 3, dtype=torch.bfloat16))]
    optimizer = Remembering(params, lr=0.1 * (1 + hvd.rank()))
    for step in range(1 + 4 * hvd.rank()):
        gradients(params, step, sparse=False)
        optimizer.step()
    root = hvd.size() - 1
    before = hvd.broadcast_object(state_bits(optimizer), root)
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    assert state_bits(optimizer) == before
    kinds = {str(key): type(value) for key, value in optimizer.state[params[1]].items()}
    assert kinds == {"phase": str, "count": int, "history": list, "sums": dict}


def an_elastic_state_keeps_the_dtypes_of_its_optimizer() -> None:
    model = nn.Linear(6, 4).double()
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
    for step in range(3):
        gradients(list(model.parameters()), step, sparse=False)
        optimizer.step()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
    committed = state_bits(optimizer)
    optimizer.step()
    state.restore()
    assert state_bits(optimizer) == committed
    state.sync()
    assert state_bits(optimizer) == committed


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
