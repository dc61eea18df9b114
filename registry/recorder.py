"""Takes the model's graph during the first training forward pass, without the user's help and without harming him.

A global module hook sees which call is the outermost; a hook on that module then sees its output, which leads to the
whole graph. Inside the call no global hook is left, and neither hook may be traced: else `torch.compile` would compile
the model once with and once without it.
"""

import logging
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from .graph import Graph
from .model_graph import CapturedGraph, capture, shapes_graph

logger = logging.getLogger(__name__)

# A model that is called in pieces, or with parameters that it does not use, never shows a graph with all of them;
# then the fullest of so many outermost calls is taken.
_MAX_CALLS = 8


class ModelGraphRecorder:
    """Watches outermost module calls until one's output depends on all parameters of interest.

    It keeps no tensor of a forward pass, takes its hooks away by itself, and nothing it does can raise into training.
    """

    def __init__(self) -> None:
        self._parameters: list[torch.Tensor] = []
        self._best: CapturedGraph | None = None
        self._fallback: Graph | None = None
        self._name = ""
        self._calls = 0
        self._handles: list[Any] = []  # torch's RemovableHandle, which older versions do not type

    def start(self, model_parameters: Iterable[torch.Tensor]) -> None:
        """Begins to watch; `model_parameters` are those whose gradients are reduced, in the model's order."""
        self.stop()
        self._best, self._name, self._calls = None, "", 0
        self._parameters = list(model_parameters)
        self._fallback = shapes_graph([tuple(parameter.shape) for parameter in reversed(self._parameters)])
        # True, and of no consequence: the hook is gone before anything is compiled.
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        self._watch()

    def stop(self) -> None:
        """Takes the hooks away and lets go of the parameters; what was found stays. Idempotent."""
        self._remove_hooks()
        self._parameters = []

    @property
    def is_watching(self) -> bool:
        """Whether hooks are installed."""
        return bool(self._handles)

    @property
    def found(self) -> bool:
        """Whether a forward pass has shown a graph."""
        return self._best is not None

    @property
    def graph(self) -> Graph | None:
        """The model's graph; the chain of its parameters, last first, if none was seen; None before `start()`."""
        return self._fallback if self._best is None else self._best.graph

    @property
    def model_name(self) -> str:
        """Class name of the module whose output was used, empty if none was."""
        return self._name

    def _watch(self) -> None:
        self._handles = [torch_module.register_module_forward_pre_hook(_untraced(self._before))]

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, module: torch.nn.Module, inputs: object) -> None:
        try:
            self._remove_hooks()
            self._handles = [module.register_forward_hook(_untraced(self._after), always_call=True)]
        except Exception:
            self._give_up(module)

    def _after(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        try:
            self._remove_hooks()
            self._look(module, output)
        except Exception:
            self._give_up(module)

    def _give_up(self, module: torch.nn.Module) -> None:
        """Whatever a module is or returns, the user's training goes on."""
        logger.debug("no graph of %s: its parameters stand in for it", type(module).__name__, exc_info=True)
        self.stop()

    def _look(self, module: torch.nn.Module, output: object) -> None:
        seen = capture(output, {id(parameter): tuple(parameter.shape) for parameter in self._parameters})
        if seen.n_reached > 0:
            self._calls += 1
        if seen.n_reached > (0 if self._best is None else self._best.n_reached):
            self._best, self._name = seen, _name_of(module)
        if seen.n_reached == len(self._parameters) or self._calls == _MAX_CALLS:
            self.stop()
        else:
            self._watch()


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    untraced: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return untraced


def _name_of(module: torch.nn.Module) -> str:
    """Class name of a model, looked up inside a compiled or wrapped one."""
    inner = getattr(module, "_orig_mod", None)
    return type(module if inner is None else inner).__name__
