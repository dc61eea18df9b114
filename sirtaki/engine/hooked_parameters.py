"""Parameters with hooks on them, and the reductions of their gradients: made anew whenever these parameters change."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .gradient_hooks import GradientHooks, Owner
from .reducer_resources import ReducerResources
from .reductions import Reductions
from .same_model import Named, require_same_model


class HookedParameters:
    """The parameters of a reducer, as long as they, and what is known of their gradients, stay the same.

    Attributes:
        all: with their names, frozen ones too.
        named: those that wanted a gradient when this was made.
        hooks: on these.
        reductions: of their gradients.
    """

    def __init__(
        self, named: Sequence[Named], resources: ReducerResources, *, passes: int | Sequence[int], owner: Owner
    ) -> None:
        """Collective.

        Args:
            named: all of them, the same on all ranks.
            resources: what they are reduced with.
            passes: backward passes whose gradients are added up, of all that want a gradient or of each.
            owner: see `GradientHooks`.

        Raises:
            MismatchError: on all ranks, if their parameters differ.
        """
        self.all = list(named)
        self.named = [(name, param) for name, param in named if param.requires_grad]
        self._frozen = [param for _, param in named if not param.requires_grad]
        self._resources = resources
        require_same_model(resources.control, self.named)
        self.reductions = Reductions(self.named, resources.sparse, resources.make_tuned)
        if resources.nan_check is not None:
            resources.nan_check.names = [name for name, _ in self.named]
        try:
            self.hooks = GradientHooks(
                [param for _, param in self.named],
                self.reductions.arrive,
                resources.options.groups,
                passes=passes,
                owner=owner,
                nan_check=resources.nan_check,
            )
        except RuntimeError:  # torch's, for what is no leaf
            self.reductions.close()
            raise

    def begin(self, passes: int | Sequence[int]) -> None:
        """An iteration begins: nothing has come, and `passes` backward passes are added up."""
        self.hooks.begin(passes)
        self.reductions.complete = False

    @property
    def thawed(self) -> list[torch.Tensor]:
        """Parameters that want a gradient now, and were frozen when this was made."""
        return [param for param in self._frozen if param.requires_grad]

    @property
    def empty(self) -> bool:
        """No parameter wants a gradient."""
        return not (self.named or self.thawed)

    @property
    def begun(self) -> bool:
        """Gradients have come on this rank that no finished iteration has reduced."""
        return self.reductions.pending or bool(self.hooks.counted) or bool(self.thawed)

    @property
    def can_put_off(self) -> bool:
        """Nothing in the end of this iteration needs the other ranks, once all gradients have left."""
        resources = self._resources
        asks = resources.nan_check is not None or not resources.start_check.done
        return self.reductions.can_put_off and not (asks or self.thawed)

    def put_off(self) -> None:
        """If it `can_put_off`: all gradients leave; waits for nobody."""
        self.hooks.release()
        if any(self.hooks.passes_left):
            self.reductions.note_sparse(self.hooks.passes_left)
        self.reductions.put_off()

    def finish(self, *, joined: bool, late: bool = False) -> bool:
        """Collective: blocks until all gradients are reduced; True if hooks are to be made anew after this iteration.

        Args:
            joined: this rank has no data any more and takes part with zeros.
            late: it was put off, and what was thawed since belongs to the next iteration.
        """
        resources, passes_left, thawed = self._resources, self.hooks.passes_left, [] if late else self.thawed
        if resources.nan_check is not None:
            resources.nan_check.finish(passes_left, [param.grad for _, param in self.named])
        self.hooks.release()
        if any(passes_left):
            self.reductions.note_sparse(passes_left)
        found_sparse = self.reductions.finish(resources.control, joined=joined)
        if thawed:
            resources.reduce_thawed(thawed)
        if not resources.start_check.done:  # and nothing is updated
            resources.start_check.look(resources.control, [item for item in self.all if item[1].requires_grad])
        if joined:
            for param in [*(param for _, param in self.named), *thawed]:
                param.grad = None  # the others' gradients must not add to the next ones of this rank
        return found_sparse or bool(thawed)

    def drop_accumulated(self) -> None:
        """Gradients of which some passes have come, but are not being reduced, do not count."""
        for param in self.hooks.counted:
            param.grad = None

    def close(self) -> None:
        """Not collective, once: takes the hooks away; nothing is reduced any more."""
        self.hooks.remove()
        self.reductions.close()
