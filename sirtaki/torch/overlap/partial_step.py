"""One `step()` of any optimizer, parameter by parameter: each at its time, all as if at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


def bare_step(kind: type[torch.optim.Optimizer]) -> Callable[[Any], object]:
    """`kind.step` without the hooks that PyTorch calls around it, once for each call."""
    step = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]  # functools'


@contextlib.contextmanager
def as_at_step(device: torch.device) -> Iterator[None]:
    """Inside, a step is what it is in a script's training loop, wherever this is called: in autocast, in evaluation."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C.DisableTorchFunction())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


class PartialStep:
    """The step that an optimizer's script has asked for last."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> None:
        """`kind`: the class whose `step` updates parameters."""
        self._optimizer, self._step = optimizer, bare_step(kind)
        self._options: list[dict[str, Any]] = []
        self._group_of: dict[int, int] = {}
        self.running = False

    def begin(self) -> None:
        """A step is asked for: what its groups say now holds for all its updates, whatever is written there later."""
        self._options, self._group_of = [], {}
        for number, group in enumerate(self._optimizer.param_groups):
            self._group_of |= {id(param): number for param in group["params"]}
            self._options.append({name: _copy(value) for name, value in group.items() if name != "params"})

    def others(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The optimizer's parameters without these."""
        without = {id(param) for param in params}
        every = (param for group in self._optimizer.param_groups for param in group["params"])
        return [param for param in every if id(param) not in without]

    def update(self, params: Iterable[torch.Tensor]) -> None:
        """Updates these parameters, once each, by what is in their `.grad`."""
        members: dict[int, list[torch.Tensor]] = {}
        for param in params:
            if param.grad is not None and (number := self._group_of.get(id(param))) is not None:
                members.setdefault(number, []).append(param)
        if not members:
            return
        groups = [{**self._options[number], "params": members[number]} for number in sorted(members)]
        device = groups[0]["params"][0].device
        optimizer, whole = self._optimizer, self._optimizer.param_groups
        self.running = True
        try:
            with as_at_step(device):
                optimizer.param_groups = groups
                self._step(optimizer)
        finally:
            optimizer.param_groups = whole
            self.running = False


def _copy(value: Any) -> Any:  # Any: an optimizer's options may be anything
    return value.clone() if isinstance(value, torch.Tensor) else value
