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
    """Overwrite tensors on every rank with those of the root rank. Collective.

    Args:
        params: a `state_dict()` or `named_parameters()`. Entries that are not tensors are ignored.
        root_rank: rank whose tensors are copied.

    Raises:
        ValueError: `params` is neither a dict nor a list of pairs.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    else:
        is_list = isinstance(params, Iterable) and not isinstance(params, str | torch.Tensor)
        named = list(params) if is_list else []
        if not is_list or not all(isinstance(item, tuple) and len(item) == 2 for item in named):
            raise ValueError(
                f"broadcast_parameters() got invalid params of type: {type(params)}; pass model.state_dict() or "
                "model.named_parameters()"
            )
    handles = [
        broadcast_async_(tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor, root_rank, str(name))
        for name, tensor in named
        if isinstance(tensor, torch.Tensor)
    ]
    synchronize_all(handles)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of the root rank on every rank. It must be picklable. Collective."""
    is_root = rank() == root_rank
    data = _pickled(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = _count(data)
    broadcast_(length, root_rank, None if name is None else f"{name}.length", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    broadcast_(data, root_rank, None if name is None else f"{name}.data", process_set)
    return obj if is_root else pickle.loads(data.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, in rank order. They must be picklable. Collective."""
    data = _pickled(obj)
    lengths = allgather(_count(data), None if name is None else f"{name}.length")
    gathered = allgather(data, None if name is None else f"{name}.data")
    return [pickle.loads(part.numpy().tobytes()) for part in torch.split(gathered, lengths.tolist())]


def _count(data: torch.Tensor) -> torch.Tensor:
    """Return a tensor `(1,)` int64 that contains the number of elements of `data`."""
    return torch.tensor([data.numel()], dtype=torch.int64, device="cpu")


def _pickled(obj: Any) -> torch.Tensor:
    """Pickle an object into a tensor, `(n_bytes,)` uint8."""
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorSlot:
    """Placeholder that replaces a tensor in a pickled state dict, because tensors are broadcast without pickling."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _TensorSlot:
        """Create the placeholder that replaces `tensor` in the pickled state dict."""
        # Store the strides, because fused optimizers require that an optimizer state tensor has the strides of its
        # parameter.
        strides = torch.empty_like(tensor, device="meta").stride()
        return cls(shape=tuple(tensor.shape), strides=strides, dtype=tensor.dtype, device_type=tensor.device.type)

    def empty_tensor(self) -> torch.Tensor:
        """Create an uninitialised tensor with the stored shape, dtype and strides, to receive the root's tensor."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device_type)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Copy the optimizer state and the options of the root rank to every rank. Collective.

    Afterwards each entry of the optimizer state has the values and the dtype of the root rank on all ranks. A trainable
    parameter without a gradient gets a gradient of zeros, as in Horovod.

    Args:
        optimizer: any optimizer that can load its own `state_dict()`.
        root_rank: rank whose state is copied.
        model: ignored, for compatibility with Horovod.

    Raises:
        ValueError: the optimizer is LBFGS, whose state contains the history of one rank's data.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state; do not call broadcast_optimizer_state() for LBFGS")
    state = optimizer.state_dict()
    state.pop("sirtaki_compression", None)  # Drop the error-feedback residual, because each rank keeps its own.
    state = broadcast_state(state, root_rank, "optimizer_state")
    if rank() != root_rank:
        load_optimizer_state(optimizer, state)
    _fill_missing_gradients(optimizer)


@outside_modes  # Leave inference mode, because a backward pass cannot add to a gradient that was created in it.
def _fill_missing_gradients(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad and param.grad is None:
                zeros = torch.zeros_like(param)
                param.grad = zeros.to_sparse(1) if isinstance(optimizer, torch.optim.SparseAdam) else zeros


@outside_modes  # Leave inference mode, because a later update cannot write to tensors that were created in it.
def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a `state_dict()` into an optimizer without changing the dtype of any state entry.

    PyTorch's `load_state_dict` casts every floating-point tensor except `step` to the dtype of its parameter. NAdam and
    ASGD have float32 scalars for parameters of any dtype. A rank that loads a state would round them, and a rank that
    does not load would not, so the models of the ranks would differ from the next step on. `load_state_dict` also
    replaces a string in the state by the text of a generator object.

    Args:
        optimizer: an optimizer with the same parameter groups as the one that has saved the state.
        state: result of `state_dict()`. The optimizer uses its tensors without a copy, except inference tensors.
    """
    own: dict[str, Any] = tree_map_only(
        torch.Tensor, lambda each: each.clone() if each.is_inference() else each, dict(state)
    )
    optimizer.load_state_dict(own)
    for group, saved_group in zip(optimizer.param_groups, own["param_groups"], strict=True):
        # PyTorch keeps scalars on the host unless the optimizer is capturable or fused, but `load_state_dict` moves
        # them to the parameter's device.
        scalars_on_host = group.get("capturable") is False and not group.get("fused")
        for index, param in zip(saved_group["params"], group["params"], strict=True):
            if index in own["state"] and param in optimizer.state:
                restored = _without_cast(optimizer.state[param], own["state"][index], scalars_on_host)
                optimizer.state[param] = restored


# Typed as Any, because an entry of an optimizer's state may have any type.
def _without_cast(loaded: Any, saved: Any, scalars_on_host: bool) -> Any:
    """Undo the change of dtype or device of one optimizer state entry by PyTorch's `load_state_dict`.

    Args:
        loaded: state entry after `load_state_dict`.
        saved: the same entry in the saved state.
        scalars_on_host: whether scalars must be on the CPU.

    Returns:
        `saved` where only dtype or device have changed. `loaded` where a hook or a subclass of the optimizer has
        changed the values.
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
    """Return whether two tensors with the same dtype have equal elements. NaN counts as equal to NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def broadcast_state(state: dict[str, Any], root_rank: int, name: str) -> dict[str, Any]:
    """Return the `state_dict()` of the root rank on every rank. Collective.

    Tensors are broadcast without pickling. The states of the other ranks may have other entries.

    Args:
        state: `state_dict()` of this rank.
        root_rank: rank whose state is returned.
        name: prefix of the names of the broadcasts.
    """
    skeleton = broadcast_object(tree_map_only(torch.Tensor, _TensorSlot.of, state), root_rank, name)
    received: dict[str, Any] = (
        state if rank() == root_rank else tree_map_only(_TensorSlot, _TensorSlot.empty_tensor, skeleton)
    )
    tensors = [leaf for leaf in tree_leaves(received) if isinstance(leaf, torch.Tensor)]
    synchronize_all([broadcast_async_(tensor, root_rank, f"{name}.{n}") for n, tensor in enumerate(tensors)])
    return received
