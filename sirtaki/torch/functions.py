"""Making all ranks start alike: broadcasts of parameters, optimizer state and Python objects."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from .basics import rank
from .collectives import allgather, broadcast_, broadcast_async_, synchronize_all
from .process_sets import ProcessSet, global_process_set

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]


def broadcast_parameters(params: NamedTensors, root_rank: int) -> None:
    """Collective: overwrites tensors on every rank with the root's.

    Args:
        params: a `state_dict()` or `named_parameters()`; entries that are None or no tensors are left alone.
        root_rank: whose values are kept.

    Raises:
        ValueError: `params` is something else.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, str | torch.Tensor):
        named = list(params)
        if not all(isinstance(item, tuple) and len(item) == 2 for item in named):
            raise ValueError(f"invalid params of type: {type(params)}; give a state_dict() or named_parameters()")
    else:
        raise ValueError(f"invalid params of type: {type(params)}; give a state_dict() or named_parameters()")
    handles = [
        broadcast_async_(tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor, root_rank, str(name))
        for name, tensor in named
        if isinstance(tensor, torch.Tensor)
    ]
    synchronize_all(handles)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:  # Any: whatever pickles
    """Collective: the root's picklable object, on every rank."""
    is_root = rank() == root_rank
    data = _pickled(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = _count(data)
    broadcast_(length, root_rank, None if name is None else f"{name}.length", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    broadcast_(data, root_rank, None if name is None else f"{name}.data", process_set)
    return obj if is_root else pickle.loads(data.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:  # Any: whatever pickles
    """Collective: the picklable objects of all ranks, by rank."""
    data = _pickled(obj)
    lengths = allgather(_count(data), None if name is None else f"{name}.length")
    gathered = allgather(data, None if name is None else f"{name}.data")
    return [pickle.loads(part.numpy().tobytes()) for part in torch.split(gathered, lengths.tolist())]


def _count(data: torch.Tensor) -> torch.Tensor:
    """Return the number of elements; `(1,)` int64."""
    return torch.tensor([data.numel()], dtype=torch.int64, device="cpu")


def _pickled(obj: Any) -> torch.Tensor:
    """`(n_bytes,)` uint8."""
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorSlot:
    """Stands for a tensor in a state that travels without its tensors."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _TensorSlot:
        """That of a tensor."""
        # A moment has its parameter's strides, on which fused optimizers rely.
        strides = torch.empty_like(tensor, device="meta").stride()
        return cls(shape=tuple(tensor.shape), strides=strides, dtype=tensor.dtype, device_type=tensor.device.type)

    def empty_tensor(self) -> torch.Tensor:
        """What the tensor is received in."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device_type)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Collective: the root's optimizer state and options, on every rank.

    Afterwards every trainable parameter has a gradient, zeros where there was none, as in Horovod.

    Args:
        optimizer: any optimizer whose `state_dict()` can be loaded again.
        root_rank: whose state is kept.
        model: accepted for Horovod's sake.

    Raises:
        ValueError: the optimizer is LBFGS, whose state holds the history of one rank's data.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    state = optimizer.state_dict()
    state.pop("sirtaki_compression", None)  # of each rank its own
    state = broadcast_state(state, root_rank, "optimizer_state")
    if rank() != root_rank:
        optimizer.load_state_dict(state)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad and param.grad is None:
                zeros = torch.zeros_like(param)
                param.grad = zeros.to_sparse(1) if isinstance(optimizer, torch.optim.SparseAdam) else zeros


def broadcast_state(state: dict[str, Any], root_rank: int, name: str) -> dict[str, Any]:
    """Collective: the root's `state_dict()` on every rank, whatever theirs are like; its tensors travel as tensors."""
    skeleton = broadcast_object(tree_map_only(torch.Tensor, _TensorSlot.of, state), root_rank, name)
    received: dict[str, Any] = (
        state if rank() == root_rank else tree_map_only(_TensorSlot, _TensorSlot.empty_tensor, skeleton)
    )
    tensors = [leaf for leaf in tree_leaves(received) if isinstance(leaf, torch.Tensor)]
    synchronize_all([broadcast_async_(tensor, root_rank, f"{name}.{n}") for n, tensor in enumerate(tensors)])
    return received
