"""Whether an optimizer updates each parameter by what belongs to that parameter alone."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from .partial_step import as_at_step, bare_step

KNOWN = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD", "SparseAdam"),
    )
    if hasattr(torch.optim, name)
)
"""PyTorch's own that do; all others are tried."""

SAMPLE = 3
"""So many parameters of a group are tried, the smallest."""


def refusal(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> str:
    """Why `overlap_forward` does not go with this optimizer, as far as its class says; empty if it may.

    Args:
        optimizer: with the groups and options.
        kind: its class.
    """
    if issubclass(kind, torch.optim.LBFGS):
        return f"{kind.__name__} looks at all parameters at once"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{kind.__name__}(differentiable=True) keeps a graph of its step"
    return ""


def refusal_by_trial(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> str:
    """The same, of an optimizer whose class is not known, by a trial on copies; gradients must be there.

    A few parameters are updated together, and once more one by one: the results must be equal to the bit, and the
    optimizer may note nothing outside of its state of each parameter.
    """
    if kind in KNOWN:
        return ""
    sample: list[list[torch.Tensor]] = []
    for group in optimizer.param_groups:
        having = [param for param in group["params"] if param.grad is not None and not param.grad.is_sparse]
        sample.append(sorted(having, key=torch.Tensor.numel)[:SAMPLE])
    every = [(number, param) for number, params in enumerate(sample) for param in params]
    if not every:
        return ""
    rng = torch.get_rng_state()
    try:
        together = _Copies(optimizer, kind, every)
        if changed := together.step():
            return f"{kind.__name__}.step() changes {changed}, which is not of one parameter"
        for place, item in enumerate(every):
            alone = _Copies(optimizer, kind, [item])
            alone.step()
            if not _equal(alone.results[0], together.results[place]):
                return f"{kind.__name__} updates a parameter by what belongs to others, too"
        if not torch.equal(rng, torch.get_rng_state()):
            return f"{kind.__name__} draws random numbers"
    except Exception as err:  # whatever an unknown optimizer does with copies
        return f"{kind.__name__} cannot be tried with a few parameters ({type(err).__name__}: {err})"
    finally:
        torch.set_rng_state(rng)
    return ""


class _Copies:
    """An optimizer of copies of some parameters, in their groups."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: type[torch.optim.Optimizer],
        chosen: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """`chosen`: (number of the group, parameter)."""
        self._kind = kind
        self._optimizer = object.__new__(kind)
        state = optimizer.state
        own = {name: value for name, value in vars(optimizer).items() if name in _attributes_of(kind, optimizer)}
        self._optimizer.__dict__.update({name: _copied(value) for name, value in own.items()})
        self._optimizer.__dict__.update(
            {name: OrderedDict() for name, value in vars(optimizer).items() if name.endswith("_hooks")}
        )
        self._optimizer.state = defaultdict(dict)
        groups: dict[int, dict[str, Any]] = {}
        self.params: list[torch.Tensor] = []
        for number, param in chosen:
            options = {name: value for name, value in optimizer.param_groups[number].items() if name != "params"}
            group = groups.setdefault(number, {**copy.deepcopy(options), "params": []})
            twin = torch.nn.Parameter(param.detach().clone())
            assert param.grad is not None
            twin.grad = param.grad.detach().clone()
            group["params"].append(twin)
            if param in state:
                self._optimizer.state[twin] = copy.deepcopy(state[param])
            self.params.append(twin)
        self._optimizer.param_groups = [groups[number] for number in sorted(groups)]

    def step(self) -> str:
        """Updates the copies; returns the name of what has changed besides them and their states."""
        before = self._notes()
        with as_at_step(self.params[0].device):
            bare_step(self._kind)(self._optimizer)
        after = self._notes()
        return next((name for name in after if name not in before or not _equal(before[name], after[name])), "")

    @property
    def results(self) -> list[Any]:
        """Of each parameter: its value and state."""
        return [(param.detach(), self._optimizer.state.get(param, {})) for param in self.params]

    def _notes(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self._optimizer).items() if name not in ("state", "param_groups")}
        notes = {f"its attribute {name}": value for name, value in own.items() if not name.endswith("_hooks")}
        for group in self._optimizer.param_groups:
            notes |= {f"its option {name}": value for name, value in group.items() if name != "params"}
        return copy.deepcopy(notes)


def _attributes_of(kind: type[torch.optim.Optimizer], optimizer: torch.optim.Optimizer) -> set[str]:
    """Those that `kind` itself has given the optimizer."""
    wrapped = getattr(optimizer, "_wrapped", optimizer)
    return {name for name in vars(wrapped) if name not in ("state", "param_groups", "step")}


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # what cannot be copied is not what an update depends on
        return value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    try:
        return bool(one == other)
    except Exception:  # what cannot be compared is not known to be equal
        return False
