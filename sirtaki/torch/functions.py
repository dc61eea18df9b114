"""Broadcasts of parameters, optimizer state and Python objects, to give all ranks the same initial state."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from sirtaki.comm.modes import outside_modes

from .basics import rank
from .collectives import allgather, broadcast_, broadcast_async_, synchronize_all
from .process_sets import ProcessSet, global_process_set

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]


def broadcast_parameters(params: NamedTensors, root_rank: int) -> None:
    """Overwrite tensors on every rank with the root's. Collective.

    Args:
        params: a `state_dict()` or `named_parameters()`. Entries that are not tensors are ignored.
        root_rank: rank whose values are copied.

    Raises:
        ValueError: `params` has another type.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, str | torch.Tensor):
        named = list(params)
        if not all(isinstance(item, tuple) and len(item) == 2 for item in named):
            raise ValueError(f"invalid params of type: {type(params)}; pass a state_dict() or named_parameters()")
    else:
        raise ValueError(f"invalid params of type: {type(params)}; pass a state_dict() or named_parameters()")
    handles = [
        broadcast_async_(tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor, root_rank, str(name))
        for name, tensor in named
        if isinstance(tensor, torch.Tensor)
    ]
    synchronize_all(handles)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:  # Any: any picklable object
    """Return the root's picklable object on every rank. Collective."""
    is_root = rank() == root_rank
    data = _pickled(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = _count(data)
    broadcast_(length, root_rank, None if name is None else f"{name}.length", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    broadcast_(data, root_rank, None if name is None else f"{name}.data", process_set)
    return obj if is_root else pickle.loads(data.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:  # Any: any picklable object
    """Return the picklable objects of all ranks, in rank order. Collective."""
    data = _pickled(obj)
    lengths = allgather(_count(data), None if name is None else f"{name}.length")
    gathered = allgather(data, None if name is None else f"{name}.data")
    return [pickle.loads(part.numpy().tobytes()) for part in torch.split(gathered, lengths.tolist())]


def _count(data: torch.Tensor) -> torch.Tensor:
    """Return the number of elements; `(1,)` int64."""
    return torch.tensor([data.numel()], dtype=torch.int64, device="cpu")


def _pickled(obj: Any) -> torch.Tensor:
    """Pickle an object into a tensor, `(n_bytes,)` uint8."""
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorSlot:
    """Placeholder of a tensor in a pickled state. The tensor is sent separately."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _TensorSlot:
        """Create the placeholder of a tensor."""
        # A moment has its parameter's strides, on which fused optimizers rely.
        strides = torch.empty_like(tensor, device="meta").stride()
        return cls(shape=tuple(tensor.shape), strides=strides, dtype=tensor.dtype, device_type=tensor.device.type)

    def empty_tensor(self) -> torch.Tensor:
        """Create the tensor to receive into."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device_type)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Copy the root's optimizer state and options to every rank. Collective.

    Afterwards each state entry has the root's values and dtype on all ranks, see `load_optimizer_state`. Every
    trainable parameter has a gradient: zeros if it had none, as in Horovod.

    Args:
        optimizer: any optimizer whose `state_dict()` can be loaded again.
        root_rank: rank whose state is copied.
        model: ignored, for compatibility with Horovod.

    Raises:
        ValueError: the optimizer is LBFGS, whose state holds the history of one rank's data.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    state = optimizer.state_dict()
    state.pop("sirtaki_compression", None)  # differs between ranks
    state = broadcast_state(state, root_rank, "optimizer_state")
    if rank() != root_rank:
        load_optimizer_state(optimizer, state)
    _fill_missing_gradients(optimizer)


@outside_modes  # because a backward pass cannot add to a gradient that was made in inference mode
def _fill_missing_gradients(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad and param.grad is None:
                zeros = torch.zeros_like(param)
                param.grad = zeros.to_sparse(1) if isinstance(optimizer, torch.optim.SparseAdam) else zeros


@outside_modes  # because an update outside of inference mode cannot write tensors that were made in it
def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a `state_dict()` into an optimizer without changing the dtype of any state entry.

    `load_state_dict` casts every floating-point tensor but `step` to the dtype of its parameter. NAdam and ASGD keep
    float32 scalars for parameters of any dtype: a rank that loads rounds them, and a rank that does not load keeps
    them, so the replicas differ from the next step on. It also replaces a string in the state by a generator's text.

    Args:
        optimizer: an optimizer with the same parameter groups.
        state: from `state_dict()`. The optimizer takes over its tensors; those made in inference mode are copied.
    """
    own: dict[str, Any] = tree_map_only(
        torch.Tensor, lambda each: each.clone() if each.is_inference() else each, dict(state)
    )
    optimizer.load_state_dict(own)
    for group, saved_group in zip(optimizer.param_groups, own["param_groups"], strict=True):
        # PyTorch keeps scalars on the host, unless the optimizer is capturable or fused; load_state_dict moves them.
        scalars_on_host = group.get("capturable") is False and not group.get("fused")
        for index, param in zip(saved_group["params"], group["params"], strict=True):
            if index in own["state"] and param in optimizer.state:
                restored = _without_cast(optimizer.state[param], own["state"][index], scalars_on_host)
                optimizer.state[param] = restored


def _without_cast(loaded: Any, saved: Any, scalars_on_host: bool) -> Any:  # Any: an entry of the optimizer state
    """Return `loaded` with the entries of `saved` where `load_state_dict` changed their dtype or device only.

    Entries that a hook or a subclass of the optimizer has changed stay as loaded.
    """
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        on_host = scalars_on_host and saved.ndim == 0 and saved.device.type == "cpu"
        device = saved.device if on_host else loaded.device
        same = loaded.dtype is saved.dtype and loaded.device == device
        was_cast = not same and loaded.shape == saved.shape and _equal(loaded, saved.to(loaded.device, loaded.dtype))
        return saved.to(device) if was_cast else loaded
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        return {
            key: _without_cast(value, saved[key], scalars_on_host) if key in saved else value
            for key, value in loaded.items()
        }
    if isinstance(loaded, list | tuple) and type(loaded) is type(saved) and len(loaded) == len(saved):
        return type(loaded)(_without_cast(*pair, scalars_on_host) for pair in zip(loaded, saved, strict=True))
    return saved if isinstance(saved, str | bytes) else loaded


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype are equal; NaN equals NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def broadcast_state(state: dict[str, Any], root_rank: int, name: str) -> dict[str, Any]:
    """Return the root's `state_dict()` on every rank, whatever their own state. Collective. Tensors are not pickled."""
    skeleton = broadcast_object(tree_map_only(torch.Tensor, _TensorSlot.of, state), root_rank, name)
    received: dict[str, Any] = (
        state if rank() == root_rank else tree_map_only(_TensorSlot, _TensorSlot.empty_tensor, skeleton)
    )
    tensors = [leaf for leaf in tree_leaves(received) if isinstance(leaf, torch.Tensor)]
    synchronize_all([broadcast_async_(tensor, root_rank, f"{name}.{n}") for n, tensor in enumerate(tensors)])
    return received
