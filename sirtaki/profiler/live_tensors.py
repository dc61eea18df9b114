"""The memory that tensors of this process hold at a moment, and what for: found by Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .step_memory import Holds

UNSEEN = 0
"""The address of all that is known by its sum only."""


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """What one or several tensors lie in."""

    device: str
    address: int
    n_bytes: int
    holds: Holds


def address_of(tensor: torch.Tensor) -> tuple[str, int] | None:
    """(device, address) of its storage; None if it has none of its own, such as a sparse or a fake one."""
    try:
        storage = tensor.untyped_storage()
        return (str(storage.device), storage.data_ptr()) if storage.nbytes() else None
    except Exception:  # classes of others may raise anything
        return None


def live_storages() -> list[LiveStorage]:
    """All of them; what is several things counts for the first of parameters, flat buffers, gradients and so on.

    Of a CUDA device also what no tensor of Python's shows, as one. Files that are mapped are left out.
    """
    tensors, modules, optimizers = list[torch.Tensor](), list[nn.Module](), list[torch.optim.Optimizer]()
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance, which may run code of proxies
        if issubclass(kind, torch.Tensor):
            tensors.append(thing)
        elif issubclass(kind, nn.Module):
            modules.append(thing)
        elif issubclass(kind, torch.optim.Optimizer):
            optimizers.append(thing)
    parameters = [one for one in tensors if issubclass(type(one), nn.Parameter)]
    gradients = [one.grad for one in parameters if one.grad is not None]
    kinds: tuple[tuple[Holds, Iterable[torch.Tensor]], ...] = (
        (Holds.PARAMETERS, parameters),
        (Holds.FLAT_BUFFERS, (one for one in gradients if _is_part(one))),
        (Holds.GRADIENTS, gradients),
        (Holds.MODULE_BUFFERS, (one for module in modules for one in _buffers(module))),
        (Holds.OPTIMIZER, (one for each in optimizers for one in _states(each))),
        (Holds.OTHER, tensors),
    )
    found: dict[tuple[str, int], LiveStorage] = {}
    for holds, some in kinds:
        for one in some:
            address = address_of(one)
            if address is None or address[0] == "meta" or address in found:
                continue
            if holds is not Holds.OTHER or not _is_mapped(one):
                found[address] = LiveStorage(*address, one.untyped_storage().nbytes(), holds)
    return [*found.values(), *_unseen(found.values())]


def _is_mapped(tensor: torch.Tensor) -> bool:
    """It lies in a file, or in memory that other ranks share, whose own it may be."""
    return getattr(tensor.untyped_storage(), "filename", None) is not None


def _is_part(tensor: torch.Tensor) -> bool:
    """Others lie in its storage, too."""
    return address_of(tensor) is not None and tensor.untyped_storage().nbytes() > tensor.nbytes


def _unseen(known: Iterable[LiveStorage]) -> Iterator[LiveStorage]:
    """What the allocators of CUDA devices have given out beyond what is known."""
    for number in range(torch.cuda.device_count()):
        device = f"cuda:{number}"
        left = torch.cuda.memory_allocated(number) - sum(one.n_bytes for one in known if one.device == device)
        if left > 0:
            yield LiveStorage(device, UNSEEN, left, Holds.OTHER)


def _buffers(module: nn.Module) -> Iterator[torch.Tensor]:
    for value in (vars(module).get("_buffers") or {}).values():
        if isinstance(value, torch.Tensor):
            yield value


def _states(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in vars(optimizer).get("state", {}).values():
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor):
                yield value
