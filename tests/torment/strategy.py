"""Draw programs that resemble training. `Reference` skips actions that are invalid in their state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from hypothesis import strategies as st

from . import program as actions
from .forks import CHILDREN
from .program import Action, Backward, BlockKind, OptimizerSpec, Program
from .replica import (
    CALLS,
    CHANGES,
    DEFAULTS,
    EDITS,
    HOOK_EDITS,
    IN_PLACE,
    KEEPS,
    LOSSY,
    NESTED,
    OPERATIONS,
    READERS,
    SCALE,
)

# ── The choices that drawn programs are made of. What `maybe` refuses is what Hypothesis shrinks to ──────────────────

T = TypeVar("T")


class Choices:
    """Random choices for a program of `n_ranks` ranks. `compiles`: whether it may compile, which takes seconds."""

    def __init__(self, draw: st.DrawFn, n_ranks: int, *, compiles: bool) -> None:
        self.draw, self.n_ranks, self.compiles = draw, n_ranks, compiles

    def maybe(self, percent: int) -> bool:
        """Return true with a probability in per cent."""
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def one(self, choices: Sequence[T]) -> T:
        """Draw one choice."""
        return self.draw(st.sampled_from(choices))

    def some(self, choices: Sequence[T], least: int = 1) -> tuple[T, ...]:
        """Draw several choices, in order."""
        if len(choices) <= least:
            return tuple(choices)
        chosen = self.draw(st.lists(st.sampled_from(range(len(choices))), min_size=least, max_size=4, unique=True))
        return tuple(choices[place] for place in sorted(chosen))

    def ranks(self) -> tuple[int, ...]:
        """Draw some ranks."""
        return self.some(range(self.n_ranks))


# ── Draws what scripts do in one iteration: zero, backward, step, and all that is done in between ────────────────────


class Iterations(Choices):
    """Random iterations of one program.

    Attributes:
        blocks: blocks of the model.
        names: names of all parameters.
        sparse: names of parameters with sparse gradients.
        optimizers: optimizers at the current point of the program.
    """

    blocks: tuple[BlockKind, ...] = ()
    names: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()

    def __init__(self, draw: st.DrawFn, n_ranks: int, *, compiles: bool) -> None:
        super().__init__(draw, n_ranks, compiles=compiles)
        self.optimizers: list[OptimizerSpec] = []
        self.defaults: tuple[str, ...] = ()
        if self.maybe(15):
            self.defaults += self.some(tuple(DEFAULTS))[:2]
        if self.maybe(8):
            self.defaults += (self.one(tuple(CALLS)),)

    def rules(self, *names: str) -> tuple[str, ...]:
        """Return the rules that PyTorch supports under this process's defaults."""
        kept = tuple(name for name in names if name in ("sgd", "momentum", "across"))
        return kept if "meta" in self.defaults else names

    def early_hooks(self) -> tuple[actions.Hook, ...]:
        """Draw hooks that are registered before optimizers or model are wrapped."""
        return tuple(self.hook() for _ in range(self.one((1, 1, 2)))) if self.maybe(20) else ()

    def hook(self) -> actions.Hook:
        """Draw a user's hook."""
        at = self.one(("tensor", "accumulated", "accumulated", "module", "module_pre"))
        if self.compiles and at.startswith("module"):
            at = "tensor"
        how = self.one(HOOK_EDITS) if at == "accumulated" else self.one(tuple(CHANGES))
        dense = tuple(name for name in self.names if name not in self.sparse) or self.names
        return actions.Hook(at=at, how=how, parameters=self.some(dense), on=self.ranks() if self.maybe(15) else ())

    def fork(self) -> actions.Fork:
        """Draw a fork of a child that reads parameters."""
        return actions.Fork(how=self.one(tuple(CHILDREN)), on=self.ranks() if self.maybe(50) else ())

    def iteration(self) -> list[Action]:
        """Draw an iteration: zero, backward, step, and actions between them."""
        chosen = list(range(len(self.optimizers)))
        if len(chosen) > 1 and self.maybe(40):
            chosen = list(self.draw(st.permutations(self.some(chosen))))
        specs = [self.optimizers[number] for number in chosen]
        made: list[Action] = []
        if self.maybe(6):
            made += [self._keep(number) for number in chosen]
        elif not self.maybe(12):
            set_to_none = not self.maybe(30)
            made += [actions.ZeroGrad(optimizer=number, set_to_none=set_to_none) for number in chosen]
        elif self.maybe(50):
            made.append(actions.ZeroGrad(set_to_none=not self.maybe(50)))
        inputs: tuple[str, ...] = ()
        if len(chosen) < len(self.optimizers) or self.maybe(5):
            inputs = tuple(dict.fromkeys(name for spec in specs for name in spec.parameters))
        called = "inference" not in self.defaults and self.maybe(6)  # a closure's backward pass needs grad mode
        closures = [spec.rule.startswith("lbfgs") or called for spec in specs]
        if all(closures):
            return [
                *made,
                *(
                    actions.Step(optimizer=number, closure=self._pass(self.optimizers[number].parameters))
                    for number in chosen
                ),
            ]
        passes = max(spec.passes for spec in specs)
        if passes > 1 and self.maybe(20):
            passes -= 1
        scaled = self.maybe(5)
        for number in range(passes):
            made += [self.hook()] if self.maybe(4) else []
            made += self._passes(inputs, scale=SCALE if scaled else 1.0)
            if number + 1 < passes and self.maybe(10):
                made.append(self.eager())
        if scaled:
            return [*made, *self._unscale(chosen)]
        made += self._touch()
        if self.maybe(4):
            return [*made, *(actions.ZeroGrad(optimizer=number) for number in chosen)]
        for number in chosen:
            made += self._step(number)
        if self.maybe(10):
            made.append(actions.Read(parameters=self.some(self.names)))
        if self.maybe(8):
            made.append(self._outside())
        return made

    def _unscale(self, chosen: list[int]) -> list[Action]:
        """Return actions that unscale gradients before the step, and skip the step if they overflow."""
        made: list[Action] = []
        for number in chosen:
            synchronizes = self.maybe(50)
            made += [actions.Synchronize(optimizer=number)] if synchronizes else []
            names = tuple(name for name in self.optimizers[number].parameters if name not in self.sparse)
            made.append(actions.Edit(how="unscale", parameters=names))
            if self.maybe(25):
                made.append(actions.ZeroGrad(optimizer=number))
            else:
                made.append(actions.Step(optimizer=number, skip_synchronize=synchronizes))
        return made

    def _passes(self, inputs: tuple[str, ...], *, scale: float) -> list[Action]:
        """Draw the backward pass of an iteration, or several that form it, of a loss that may be scaled."""
        return [
            replace(action, scale=scale) if isinstance(action, Backward) else action
            for action in self._unscaled(inputs)
        ]

    def _unscaled(self, inputs: tuple[str, ...]) -> list[Action]:
        if self.maybe(5):
            return [Backward(retain=True, inputs=inputs), Backward(again=True, inputs=inputs)]
        if self.maybe(8) and not inputs:
            first = self.some(self.names)
            rest = tuple(name for name in self.names if name not in first)
            return [Backward(inputs=first), *([Backward(inputs=rest)] if rest else [])]
        if self.maybe(5):
            failing = Backward(
                fails_at=self.one(range(len(self.blocks))),
                checkpoint="reentrant" if self.maybe(15) else "",
            )
            forget = [actions.ZeroGrad(optimizer=number) for number in range(len(self.optimizers))]
            if self.maybe(30):
                forget = [actions.ZeroGrad()]
            return [failing, *forget, self._pass(inputs)]
        return [self._pass(inputs)]

    def _pass(self, inputs: tuple[str, ...]) -> Backward:
        checkpoint = ""
        if self.maybe(6):
            checkpoint = "plain"
        elif self.maybe(6) and not inputs:
            checkpoint = "reentrant"
        skipped: tuple[int, ...] = ()
        on: tuple[int, ...] = ()
        if self.maybe(10):
            skipped = self.some(range(len(self.blocks)))
        elif self.maybe(10):
            skipped, on = self.some(range(len(self.blocks))), self.ranks()
        return Backward(
            inputs=inputs,
            checkpoint=checkpoint,
            skipped=skipped,
            on=on,
            penalty=not self.compiles and self.maybe(5),
            slopes=not self.compiles and self.maybe(5),
            nested=self.one(tuple(NESTED)) if self.maybe(8) else "",
            compiled=self.one(("blocks", "model", "loss", "step")) if self.compiles and self.maybe(60) else "",
        )

    def _touch(self) -> list[Action]:
        """Draw actions on gradients that are ready or reduced."""
        made: list[Action] = []
        if self.maybe(15):
            made.append(self.eager())
        if self.maybe(15):
            made.append(actions.Read(parameters=self.some(self.names)))
        if self.maybe(6):
            made.append(self._aside())
        if self.maybe(3):
            made.append(self.fork())
        if self.maybe(25):
            made.append(self._edit())
        if self.maybe(5):
            made.append(self._edit())
        return made

    def _aside(self) -> actions.Aside:
        return actions.Aside(on=self.ranks() if self.maybe(40) else (), forward=self.maybe(30))

    def _keep(self, number: int) -> actions.Keep:
        return actions.Keep(optimizer=number, how=self.one(tuple(KEEPS)))

    def _outside(self) -> actions.Outside:
        return actions.Outside(how=self.one(tuple(READERS)))

    def _edit(self) -> actions.Edit:
        names = self.names if self.maybe(40) else self.some(self.names)
        names = tuple(name for name in names if name not in self.sparse) or names
        on = self.ranks() if self.maybe(15) else ()
        return actions.Edit(how=self.one(tuple(EDITS)), parameters=names, on=on)

    def _step(self, number: int) -> list[Action]:
        if not self.maybe(20):
            return [actions.Step(optimizer=number, compiled=self.compiles and self.maybe(40))]
        made: list[Action] = [actions.Synchronize(optimizer=number)]
        if self.maybe(50):
            made += self._touch()
        skip = not self.maybe(15)
        return [*made, actions.Step(optimizer=number, skip_synchronize=skip)]

    def eager(self) -> Action:
        """Draw an eager operation, or a wait for started ones."""
        if self.maybe(20):
            return actions.Wait()
        return actions.Eager(what=self.one(tuple(OPERATIONS)), later=self.maybe(50))


# ── Programs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

DENSE_RULES = ("sgd", "momentum", "adam", "fused_adam", "adamw", "rmsprop", "adagrad", "nadam", "asgd")
ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {},
    {"transport": "gloo"},
    {"transport": "mpi"},
    {"unit_bytes": "65536", "streams": "2"},
    {"local_size": "2", "streams": "3"},
    {"local_size": "2", "algorithm": "hierarchical"},
    {"unused": "none"},
    {"overlap_forward": "check"},
    {"overlap_forward": "check", "unit_bytes": "65536", "streams": "2"},
)


def environments_of(world: int) -> list[dict[str, str]]:
    """Return the environments in which `world` ranks fill nodes, and several nodes for a hierarchical algorithm."""
    sizes = [(environment, int(environment.get("local_size", "1"))) for environment in ENVIRONMENTS]
    return [each for each, size in sizes if world % size == 0 and (world > size or "algorithm" not in each)]


@st.composite
def programs(
    draw: st.DrawFn, ranks: int, *, environment: dict[str, str] | None = None, compiles: bool = False
) -> Program:
    """Return a strategy for programs of `ranks` ranks."""
    return _Draw(draw, ranks, compiles=compiles).program(environment or {})


class _Draw(Iterations):
    """Random choices of one program: model, optimizers, and actions in and between iterations."""

    # ── the model and its optimizers ─────────────────────────────────────────────────────────────────────────────

    def program(self, environment: dict[str, str]) -> Program:
        self._has_sets = self.n_ranks > 2 and "algorithm" not in environment  # some process sets do not support it
        self._compresses = "transport" in environment  # over shared memory, nothing is compressed
        blocks = tuple(self.draw(st.lists(st.sampled_from(list(BlockKind)), min_size=1, max_size=5)))
        bare = Program(ranks=self.n_ranks, blocks=blocks, optimizers=(), actions=())
        self.blocks, self.names = blocks, bare.parameters
        self.sparse = tuple(name for name in self.names if bare.kind_of(name) is BlockKind.SPARSE)
        tunes = self.maybe(35)
        self._make_optimizers(tunes)
        frozen = self.some(self.names) if self.maybe(20) else ()
        hooks, optimizers = self.early_hooks(), tuple(self.optimizers)
        made: list[Action] = []
        for _ in range(self.draw(st.integers(2, 9))):
            made += self._phase()
        # A rank with all gradients ready waits until the remaining ranks need theirs.
        made += [actions.Synchronize(optimizer=number) for number in range(len(self.optimizers))]
        tuned = {"warmup_iterations": "1000"} if tunes else {}
        return Program(
            ranks=self.n_ranks,
            blocks=blocks,
            optimizers=optimizers,
            actions=(*made, actions.Recall(), actions.Wait()),
            frozen=frozen,
            hooks=hooks,
            environment=tuple(sorted({**environment, **tuned}.items())),
            defaults=self.defaults,
            backend=self.one(("aot_eager", "eager")),
        )

    def _make_optimizers(self, tunes: bool) -> None:
        count = self.one((1, 1, 1, 2, 2, 3))
        owned: list[list[str]] = [[] for _ in range(count)]
        for number in range(len(self.blocks)):
            mine = [name for name in self.names if name.startswith(f"{number}.")]
            if self.maybe(8):
                mine = mine[:-1]
            place = self.one(range(count))
            owned[place] += mine
            if self.maybe(25) and count > 1:
                owned[(place + 1) % count] += mine
        shared = sum(map(len, owned)) > len({name for mine in owned for name in mine})
        options = self._options()
        for mine in owned:
            if mine:
                options = options if shared else self._options()
                seed = self.one(range(100)) if tunes else None
                self.optimizers.append(self._spec(mine, options, seed))
        if not self.optimizers:
            self.optimizers.append(self._spec(list(self.names), options, None))

    def _options(self) -> dict[str, object]:
        options: dict[str, object] = {}
        if self.maybe(20):
            options["passes"] = self.one((2, 3))
        if self.maybe(15):
            options["op"] = "sum"
        elif self.maybe(10):
            options["predivide"] = 2.0
        if self.maybe(6):
            options["fp16"] = True
        elif self._compresses and self.maybe(20):
            options["lossy"] = self.one(tuple(LOSSY))
        if self.sparse and self.maybe(25):
            options["sparse_as_dense"] = True
        if self._has_sets and self.maybe(10):
            options["process_set"] = self.one([(0, 1), (0, self.n_ranks - 1), (1, 2)])
        return options

    def _spec(self, names: list[str], options: dict[str, object], seed: int | None) -> OptimizerSpec:
        sparse = [name for name in names if name in self.sparse]
        if sparse and len(sparse) == len(names):
            rule = self.one(self.rules("sgd", "adagrad", "sparse_adam"))
        elif sparse:
            rule = self.one(self.rules("sgd", "adagrad"))
        elif self.maybe(5) and not {"op", "fp16"} & set(options) and not {"meta", "inference"} & set(self.defaults):
            rule = self.one(("lbfgs", "lbfgs_search"))
        else:
            rule = "across" if self.maybe(10) else self.one(self.rules(*DENSE_RULES))
        groups = self.one((1, 2, 5)) if self.maybe(8) else 0
        return OptimizerSpec(rule=rule, parameters=tuple(names), plan_seed=seed, groups=groups, **options)  # type: ignore[arg-type]

    # ── what happens ──────────────────────────────────────────────────────────────────────────────────────────────

    def _phase(self) -> list[Action]:
        if self.maybe(60):
            return self._between()
        return self.iteration()

    def _between(self) -> list[Action]:
        """Draw actions between two iterations."""
        number = self.one(range(len(self.optimizers)))
        choices: list[Callable[[], list[Action]]] = [
            lambda: [actions.Nudge()],
            lambda: [actions.RequireGrad(parameters=self.some(self.names), wanted=False)],
            lambda: [actions.RequireGrad(parameters=self.names, wanted=True)],
            lambda: [actions.RequireGrad(parameters=self.some(self.names), wanted=True)],
            lambda: [actions.AddGroup(optimizer=number, parameters=self.some(self.names))],
            lambda: [actions.Rewrap(optimizer=number, keep_state=self.maybe(40))],
            lambda: [actions.Rewrap(optimizer=number, spec=self._other(number))],
            lambda: [actions.Passes(optimizer=number, passes=self.one((1, 2, 3)))],
            lambda: [actions.Save(), *self.iteration(), actions.Load()],
            lambda: [actions.Load()],
            lambda: [actions.Convert(to=self.one(("double", "float", "half", "bfloat16")))],
            lambda: [actions.Convert(to=self.one(("channels_last", "contiguous", "data", "strides")))],
            lambda: [actions.Broadcast(root=self.one(range(self.n_ranks)))],
            lambda: [actions.Broadcast(root=self.one(range(self.n_ranks)), optimizer=number)],
            lambda: [actions.Convert(to="flat")],
            lambda: [self.hook()],
            lambda: [actions.Unhook(parameters=self.some(self.names))],
            lambda: [self.fork()],
            lambda: [self.eager()],
            lambda: [self._aside()],
            lambda: [self._keep(number), *self.iteration(), actions.Recall()],
            lambda: [self._outside()],
            lambda: [self._too_early(number)],
            lambda: [self._epoch()],
            lambda: [actions.ZeroGrad(optimizer=number), actions.Step(optimizer=number)],
        ]
        return self.one(choices)()

    def _too_early(self, number: int) -> Action:
        skipped, on = self.some(range(len(self.blocks))), self.ranks() if self.maybe(40) else ()
        dense = [name for name in self.optimizers[number].parameters if name not in self.sparse]
        return actions.TooEarly(
            optimizer=number,
            backward=Backward(skipped=skipped, on=on),
            how=self.one(IN_PLACE),
            parameters=self.some(dense) if dense else (),
            on=self.ranks() if self.maybe(40) else (),
        )

    def _other(self, number: int) -> OptimizerSpec:
        """Draw another optimizer, of the same or of other parameters."""
        old = self.optimizers[number]
        names = list(old.parameters) if self.maybe(60) else list(self.some(self.names))
        spec = self._spec(names, self._options(), old.plan_seed)
        self.optimizers[number] = spec
        return spec

    def _epoch(self) -> actions.Epoch:
        batches = tuple(self.draw(st.integers(0, 5)) for _ in range(self.n_ranks))
        usable = range(len(self.optimizers))
        pattern = self.draw(
            st.lists(st.sampled_from([self.some(usable)] + [(n,) for n in usable]), min_size=1, max_size=3)
        )
        return actions.Epoch(batches=batches if any(batches) else (1, *batches[1:]), order=tuple(pattern))
