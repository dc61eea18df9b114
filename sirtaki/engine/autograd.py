"""Functions that need private names of PyTorch's autograd engine. No other module of Sirtaki uses these names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node


def in_backward() -> bool:
    """Return whether this thread runs a backward pass.

    Also returns True in forward hooks that run while activation checkpointing recomputes activations.
    """
    return torch._C._current_graph_task_id() != -1


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call `callback` when this thread's current backward pass ends. It is not called if the pass raises an error."""
    Variable._execution_engine.queue_callback(callback)


def accumulates(leaf: Node) -> bool:
    """Return whether the backward pass that this thread runs adds a gradient to the leaf's `.grad`.

    Args:
        leaf: the AccumulateGrad node of a leaf from which the pass's outputs were computed.
    """
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # raised if the pass is torch.autograd.grad() with respect to this leaf
        return False
