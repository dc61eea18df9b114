"""Hooks on parameters that run after the user's own hooks on the same gradient.

A user's hook may clip, replace or drop the local gradient, and must do so before the gradient is reduced. DDP and
Horovod register their hooks on a parameter's AccumulateGrad node. The hooks of the node always run after the
post-accumulate-grad hooks of the parameter. But a hook on the node costs 0.3 us more for each gradient, because PyTorch
makes a Python tensor for its argument. Therefore `register_last` registers a post-accumulate-grad hook, and keeps it
the last of the parameter's post-accumulate-grad hooks. It uses the node only if user code has registered hooks on the
parameter or its node before.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from sirtaki.errors import GradientError

logger = logging.getLogger(__name__)

Hook = Callable[[torch.Tensor], None]

STEPPED_IN_HOOK = (
    "a hook has updated {name} and set its gradient to None before the gradient was reduced. Each rank would train "
    "with its local gradients. An optimizer must not step in a hook: call step() after backward()"
)

CHANGED_IN_HOOK = (
    "a hook changes %s in the backward pass, before its gradient is reduced: parameters stay the same on all ranks "
    "only if the hook does the same on all ranks"
)


def register_last(name: str, param: torch.Tensor, hook: Hook, *, nodes_are_kept: bool) -> Callable[[], None]:
    """Register a hook that is called with `param` for each gradient, after the user's hooks on the parameter.

    User's hooks that are registered later also run before it, except hooks on the AccumulateGrad node, as under DDP.

    Args:
        name: name of the parameter, for messages.
        param: a leaf tensor; or a substitute whose `on_leaf(hook)` returns the leaf and the hook to register on it.
        hook: the hook. It must not hold a strong reference to the owner of `param`.
        nodes_are_kept: True if PyTorch itself keeps the AccumulateGrad node alive, as DDP's reducer does.

    Returns:
        A function that removes the hook.

    Raises:
        RuntimeError: the parameter is not a leaf, so that autograd computes no `.grad` for it.
    """
    leaf: Any = param  # Typed as Any, because PyTorch does not declare `_post_accumulate_grad_hooks`.
    if (on_leaf := getattr(param, "on_leaf", None)) is not None:
        leaf, hook = on_leaf(hook)
    if not leaf.is_leaf:
        raise RuntimeError(
            f"the parameter {name} is a non-leaf tensor, for which autograd computes no .grad; give the "
            "optimizer the leaf tensors from which it was computed"
        )
    guard, hooks = _UpdateGuard(name, hook), leaf._post_accumulate_grad_hooks
    if not hooks and not isinstance(hooks, _HooksInOrder) and not _is_node_kept_by_user(leaf, nodes_are_kept):
        hooks = leaf._post_accumulate_grad_hooks = _HooksInOrder()
    if isinstance(hooks, _HooksInOrder):
        return hooks.add_last(guard)
    if hooks is None:
        hooks = leaf._post_accumulate_grad_hooks = OrderedDict()
    first = RemovableHandle(hooks)
    users = list(hooks.items())
    hooks.clear()  # Change this dictionary in place, because the handles of the user's hooks refer to it.
    hooks.update([(first.id, guard.begin), *users])
    on_node = _NodeHook(leaf, guard)

    def remove() -> None:
        on_node.remove()
        first.remove()

    return remove


class _NodeHook:
    """Hook on the AccumulateGrad node of one parameter.

    When the dtype or device of the parameter changes, PyTorch makes a new node, to which the hook is moved.
    """

    def __init__(self, leaf: torch.Tensor, guard: _UpdateGuard) -> None:
        self._leaf, self._guard = leaf, guard
        self._register()
        # Register a tensor hook that moves the node hook to a new node. A tensor hook runs before PyTorch reads the
        # list of the node's hooks, so it is early enough.
        self._first: RemovableHandle = leaf.register_hook(self._move_to_current_node)  # type: ignore[no-untyped-call]  # torch's

    def remove(self) -> None:
        """Remove the hook."""
        self._first.remove()
        self._handle.remove()

    def _register(self) -> None:
        self._kind = self._leaf.dtype, self._leaf.device
        self._node = get_gradient_edge(
            self._leaf
        ).node  # Keep a reference to the AccumulateGrad node, because otherwise PyTorch frees the node with its hooks.
        self._handle = self._node.register_hook(self._on_node)

    def _move_to_current_node(self, _: torch.Tensor) -> None:
        if self._kind != (self._leaf.dtype, self._leaf.device):
            self._handle.remove()
            self._register()

    def _on_node(self, _outputs: object, _inputs: object) -> None:
        # If `begin` has not run, no gradient was accumulated into `.grad`: the parameter is frozen, or distributed
        # autograd has called this hook.
        if self._guard.begun:
            self._guard(self._leaf)


def prepare_frozen(param: torch.Tensor) -> None:
    """Prepare a frozen parameter, so that a later `register_last` needs no hook on its AccumulateGrad node.

    `register_last` registers a slower hook on the node if there is a reference to the node, because user code that
    refers to the node may have a hook on it. Once the parameter is unfrozen, autograd's graph also refers to the node,
    so that the two cases are indistinguishable.
    """
    leaf: Any = param  # Typed as Any, because PyTorch does not declare `_post_accumulate_grad_hooks`.
    if not hasattr(param, "on_leaf") and not leaf._post_accumulate_grad_hooks:
        leaf._post_accumulate_grad_hooks = _HooksInOrder()


def _is_node_kept_by_user(leaf: torch.Tensor, nodes_are_kept: bool) -> bool:
    """Return whether Python code may refer to the leaf's AccumulateGrad node, and so may have hooks on it.

    Also return True if an autograd graph refers to the node, except where PyTorch always keeps the node
    (`nodes_are_kept`).
    """
    return _count_references(leaf) > _references_without_user(nodes_are_kept)


def _count_references(leaf: torch.Tensor) -> int:
    return sys.getrefcount(get_gradient_edge(leaf).node)


@functools.cache
def _references_without_user(kept: bool) -> int:
    """Return the reference count of an AccumulateGrad node that user code does not refer to.

    It is measured, because it differs between PyTorch versions. `kept` states whether a graph refers to the node.
    """
    with torch.enable_grad():
        leaf = torch.ones((), dtype=torch.float32, device="cpu", requires_grad=True)
        graph = leaf.view_as(leaf) if kept else None
        count = _count_references(leaf)
        del graph
    return count


class _UpdateGuard:
    """Pair of hooks that run before and after the user's hooks on one parameter.

    By the parameter's version counter, they detect a user's hook that updates the parameter.
    """

    _warned = False  # True once this process has warned of hooks that update parameters.

    def __init__(self, name: str, hook: Hook) -> None:
        self._name, self.hook = name, hook
        self._version: int | None = None  # Version counter of the parameter before the user's hooks run.

    @property
    def begun(self) -> bool:
        """True between the call of `begin` and the call of this object."""
        return self._version is not None

    def begin(self, param: torch.Tensor) -> None:
        """Record the version counter of the parameter. Runs before the user's hooks."""
        self._version = param._version

    def __call__(self, param: torch.Tensor) -> None:
        """Compare the parameter's version counter with the recorded one, then call the hook.

        Runs after the user's hooks.

        Raises:
            GradientError: a user's hook has updated the parameter and set its gradient to None.
        """
        before, self._version = self._version, None
        if before is not None and before != param._version:
            if param.grad is None:
                raise GradientError(STEPPED_IN_HOOK.format(name=self._name))
            if not _UpdateGuard._warned:
                _UpdateGuard._warned = True
                logger.warning(CHANGED_IN_HOOK, self._name)
        self.hook(param)


class _HooksInOrder(OrderedDict[int, Hook]):
    """Dictionary of the post-accumulate-grad hooks of one parameter, in which Sirtaki's hooks stay the last entries.

    PyTorch calls the values in the order of the dictionary. If the user has registered no hook, the values are
    Sirtaki's hooks themselves, without the `_UpdateGuard` that otherwise calls them.
    """

    def __init__(self) -> None:
        super().__init__()
        # Maps the dictionary key of `guard.begin` (runs before the user's hooks) to the guard, and to the guard's own
        # dictionary key (runs after the user's hooks).
        self._own: dict[int, tuple[int, _UpdateGuard]] = {}

    def add_last(self, guard: _UpdateGuard) -> Callable[[], None]:
        """Add the hook of a guard as the last hook of the parameter. Return a function that removes it."""
        first, last = RemovableHandle(self).id, RemovableHandle(self).id
        self._own[first] = last, guard
        self._arrange()

        def remove() -> None:
            self._own.pop(first, None)
            for key in (first, last):
                self.pop(key, None)

        return remove

    def _arrange(self) -> None:
        own = {key for first, (last, _) in self._own.items() for key in (first, last)}
        users = [item for item in self.items() if item[0] not in own]
        self.clear()
        guards: list[tuple[int, Hook]] = [(first, guard.begin) for first, (_, guard) in self._own.items() if users]
        last = [(last, guard if users else guard.hook) for last, guard in self._own.values()]
        for key, hook in [*guards, *users, *last]:
            super().__setitem__(key, hook)

    def __setitem__(self, key: int, hook: Hook) -> None:
        super().__setitem__(key, hook)
        self._arrange()

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        self._arrange()
