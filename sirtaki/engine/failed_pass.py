"""A backward pass that has raised: what has come in its iteration does not count."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .hooked_parameters import HookedParameters


class FailedPass:
    """What it has left in `.grad`.

    Attributes:
        number: of the pass, see `Participant.failed_in`; of the last one, if several have raised in this iteration.
    """

    def __init__(self, parameters: HookedParameters) -> None:
        """Takes `.grad` out of the flat buffers: what is on its way must not come into what the script does with it."""
        self.number = 0
        parameters.reductions.detach()
        self._parameters = parameters
        self._left = [(param, param.grad, _version(param.grad)) for _, param in parameters.named]

    @property
    def touched(self) -> bool:
        """The script has changed or dropped some of it since."""
        return any(param.grad is not left or _version(left) != version for param, left, version in self._left)

    def drop(self, finish: Callable[[], None]) -> None:
        """Collective: ends the iteration by `finish`, without the gradients, and leaves `.grad` as it is."""
        self._parameters.reductions.detach()
        kept = [(param, param.grad) for param, _, _ in self._left]
        for param, _ in kept:
            param.grad = None
        finish()
        for param, gradient in kept:
            param.grad = gradient


def _version(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else gradient._version
