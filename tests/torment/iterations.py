"""Draws what scripts do in one iteration: zero, backward, step, and all that is done in between."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from . import program as actions
from .choices import Choices
from .eager import OPERATIONS
from .features import Feature
from .program import Action, Backward, BlockKind, OptimizerSpec
from .replica import EDITS, SCALE


class Iterations(Choices):
    """Iterations of one program.

    Attributes:
        blocks: of the model.
        names: of all parameters.
        sparse: those that have sparse gradients.
        optimizers: as they are at this point of the program.
    """

    blocks: tuple[BlockKind, ...] = ()
    names: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()

    def __init__(self, draw: st.DrawFn, n_ranks: int, features: frozenset[Feature]) -> None:
        super().__init__(draw, n_ranks, features)
        self.optimizers: list[OptimizerSpec] = []

    def iteration(self) -> list[Action]:
        """Zero, backward, step, and what is done in between."""
        chosen = list(range(len(self.optimizers)))
        if len(chosen) > 1 and self.maybe(40):
            chosen = list(self.draw(st.permutations(self.some(chosen))))
        specs = [self.optimizers[number] for number in chosen]
        made: list[Action] = []
        if not self.maybe(12):
            set_to_none = not self.maybe(30)
            made += [actions.ZeroGrad(optimizer=number, set_to_none=set_to_none) for number in chosen]
        elif self.maybe(50):
            made.append(actions.ZeroGrad(set_to_none=not self.maybe(50)))
        inputs: tuple[str, ...] = ()
        if len(chosen) < len(self.optimizers) or self.maybe(5):
            inputs = tuple(dict.fromkeys(name for spec in specs for name in spec.parameters))
        closures = [spec.rule.startswith("lbfgs") or self.maybe(6, Feature.CLOSURES) for spec in specs]
        if all(closures):
            return [
                *made,
                *(
                    actions.Step(optimizer=number, closure=self._pass(self.optimizers[number].parameters))
                    for number in chosen
                ),
            ]
        passes = max(spec.passes for spec in specs)
        if passes > 1 and self.maybe(20, Feature.RAGGED):
            passes -= 1
        scaled = self.maybe(5, Feature.SCALED)
        for number in range(passes):
            made += self._passes(inputs, scale=SCALE if scaled else 1.0)
            if number + 1 < passes and self.maybe(10, Feature.EAGER_EARLY):
                made.append(self.eager())
        if scaled:
            return [*made, *self._unscale(chosen)]
        made += self._touch()
        if self.maybe(4, Feature.LEFT_OUT):
            return [*made, *(actions.ZeroGrad(optimizer=number) for number in chosen)]
        for number in chosen:
            made += self._step(number)
        if self.maybe(10, Feature.READ):
            made.append(actions.Read(parameters=self.some(self.names)))
        return made

    def _unscale(self, chosen: list[int]) -> list[Action]:
        """Gradients of a scaled loss are divided before the step, which is left out if they were too large."""
        made: list[Action] = []
        for number in chosen:
            synchronizes = self.maybe(50)
            made += [actions.Synchronize(optimizer=number)] if synchronizes else []
            names = tuple(name for name in self.optimizers[number].parameters if name not in self.sparse)
            made.append(actions.Edit(how="unscale", parameters=names))
            if self.maybe(25, Feature.LEFT_OUT):
                made.append(actions.ZeroGrad(optimizer=number))
            else:
                made.append(actions.Step(optimizer=number, skip_synchronize=synchronizes))
        return made

    def _passes(self, inputs: tuple[str, ...], *, scale: float) -> list[Action]:
        """One backward pass, or several that are one together, of a scaled loss perhaps."""
        return [
            replace(action, scale=scale) if isinstance(action, Backward) else action
            for action in self._unscaled(inputs)
        ]

    def _unscaled(self, inputs: tuple[str, ...]) -> list[Action]:
        if self.maybe(5, Feature.RETAINED):
            return [Backward(retain=True, inputs=inputs), Backward(again=True, inputs=inputs)]
        if self.maybe(8, Feature.PARTS) and not inputs:
            first = self.some(self.names)
            rest = tuple(name for name in self.names if name not in first)
            return [Backward(inputs=first), *([Backward(inputs=rest)] if rest else [])]
        if self.maybe(5, Feature.EXCEPTIONS):
            failing = Backward(
                fails_at=self.one(range(len(self.blocks))),
                checkpoint="reentrant" if self.maybe(15, Feature.REENTRANT) else "",
            )
            forget = [actions.ZeroGrad(optimizer=number) for number in range(len(self.optimizers))]
            if self.maybe(30):
                forget = [actions.ZeroGrad()]
            return [failing, *forget, self._pass(inputs)]
        return [self._pass(inputs)]

    def _pass(self, inputs: tuple[str, ...]) -> Backward:
        checkpoint = ""
        if self.maybe(6, Feature.CHECKPOINTS):
            checkpoint = "plain"
        elif self.maybe(6, Feature.REENTRANT) and not inputs:
            checkpoint = "reentrant"
        skipped: tuple[int, ...] = ()
        on: tuple[int, ...] = ()
        if self.maybe(10, Feature.UNUSED):
            skipped = self.some(range(len(self.blocks)))
        elif self.maybe(10, Feature.UNUSED_SOMEWHERE):
            skipped, on = self.some(range(len(self.blocks))), self.ranks()
        return Backward(
            inputs=inputs,
            checkpoint=checkpoint,
            skipped=skipped,
            on=on,
            penalty=self.maybe(5, Feature.PENALTY),
            compiled=self.maybe(1, Feature.COMPILED) and self.maybe(30),  # takes seconds
        )

    def _touch(self) -> list[Action]:
        """What is done to gradients that are reduced, or on their way."""
        made: list[Action] = []
        if self.maybe(15, Feature.EAGER_EARLY):
            made.append(self.eager())
        if self.maybe(15, Feature.READ):
            made.append(actions.Read(parameters=self.some(self.names)))
        if self.maybe(25):
            made.append(self._edit())
        if self.maybe(5):
            made.append(self._edit())
        return made

    def _edit(self) -> actions.Edit:
        names = self.names if self.maybe(40) else self.some(self.names)
        names = tuple(name for name in names if name not in self.sparse) or names
        on = self.ranks() if self.maybe(15, Feature.EDITED_ON_SOME) else ()
        return actions.Edit(how=self.one(tuple(EDITS)), parameters=names, on=on)

    def _step(self, number: int) -> list[Action]:
        if not self.maybe(20):
            return [actions.Step(optimizer=number)]
        made: list[Action] = [actions.Synchronize(optimizer=number)]
        if self.maybe(50):
            made += self._touch()
        skip = not self.maybe(15, Feature.SYNCHRONIZED_TWICE)
        return [*made, actions.Step(optimizer=number, skip_synchronize=skip)]

    def eager(self) -> Action:
        """An eager operation, or waiting for those that were started."""
        if self.maybe(20):
            return actions.Wait()
        return actions.Eager(what=self.one(tuple(OPERATIONS)), later=self.maybe(50))
