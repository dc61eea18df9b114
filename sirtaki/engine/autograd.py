"""Functions that need private names of PyTorch's autograd engine. No other module of Sirtaki uses these names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node

NO_PASS = -1


def current_pass() -> int:
    """Return the id of the backward pass that this thread runs, unique in this process. `NO_PASS` outside of a pass."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Return whether this thread runs a backward pass.

    Also returns True in forward hooks that run while activation checkpointing recomputes activations.
    """
    return current_pass() != NO_PASS


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call `callback` when this thread's current backward pass ends. It is not called if the pass raises an error."""
    Variable._execution_engine.queue_callback(callback)


def accumulates(leaf: Node) -> bool:
    """Return whether the backward pass that this thread runs adds a gradient to the `.grad` of a leaf tensor.

    Args:
        leaf: AccumulateGrad node of the leaf tensor. It must be in the autograd graph of this backward pass.
    """
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:
        # PyTorch raises RuntimeError if the backward pass is a `torch.autograd.grad()` with respect to this leaf.
        return False
