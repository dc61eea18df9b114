"""Draws programs. What is drawn looks like training; `Reference` leaves out what is not legitimate in its place."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from . import program as actions
from .features import ALL, Feature
from .iterations import Iterations
from .program import Action, Backward, BlockKind, OptimizerSpec, Program
from .replica import IN_PLACE

DENSE_RULES = ("sgd", "momentum", "adam", "fused_adam", "adamw", "rmsprop", "adagrad")
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
    """Those in which so many ranks fill nodes of a size, and are on several where they go from node to node."""
    sizes = [(environment, int(environment.get("local_size", "1"))) for environment in ENVIRONMENTS]
    return [each for each, size in sizes if world % size == 0 and (world > size or "algorithm" not in each)]


@st.composite
def programs(
    draw: st.DrawFn, ranks: int, *, environment: dict[str, str] | None = None, features: frozenset[Feature] = ALL
) -> Program:
    """A program for `ranks` ranks that uses some of `features`."""
    return _Draw(draw, ranks, features).program(environment or {})


class _Draw(Iterations):
    """The choices of one program: its model, its optimizers, and what is done in and between iterations."""

    # ── the model and its optimizers ─────────────────────────────────────────────────────────────────────────────

    def program(self, environment: dict[str, str]) -> Program:
        self._has_sets = self.n_ranks > 2 and "algorithm" not in environment  # which some sets would not have
        gates = {
            BlockKind.SMALL: Feature.SMALL,
            BlockKind.SINGLE: Feature.SINGLE,
            BlockKind.SPARSE: Feature.SPARSE,
        }
        kinds = [kind for kind in BlockKind if kind not in gates or gates[kind] in self.features]
        blocks = tuple(self.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5)))
        bare = Program(ranks=self.n_ranks, blocks=blocks, optimizers=(), actions=())
        self.blocks, self.names = blocks, bare.parameters
        self.sparse = tuple(name for name in self.names if bare.kind_of(name) is BlockKind.SPARSE)
        tunes = self.maybe(35, Feature.PLANS)
        self._make_optimizers(tunes)
        frozen = self.some(self.names) if self.maybe(20, Feature.THAWED) else ()
        dense = [name for name in self.names if name not in self.sparse]
        hooked = self.some(dense) if dense and self.maybe(10, Feature.HOOKED) else ()
        optimizers = tuple(self.optimizers)
        made: list[Action] = []
        for _ in range(self.draw(st.integers(2, 9))):
            made += self._phase()
        # A rank that has all gradients waits for the others until they ask for them.
        made += [actions.Synchronize(optimizer=number) for number in range(len(self.optimizers))]
        tuned = {"warmup_iterations": "1000"} if tunes else {}
        return Program(
            ranks=self.n_ranks,
            blocks=blocks,
            optimizers=optimizers,
            actions=(*made, actions.Wait()),
            frozen=frozen,
            hooked=hooked,
            environment=tuple(sorted({**environment, **tuned}.items())),
        )

    def _make_optimizers(self, tunes: bool) -> None:
        count = self.one((1, 1, 1, 2, 2, 3)) if Feature.SEVERAL in self.features else 1
        owned: list[list[str]] = [[] for _ in range(count)]
        for number in range(len(self.blocks)):
            mine = [name for name in self.names if name.startswith(f"{number}.")]
            if self.maybe(8, Feature.UNWATCHED):
                mine = mine[:-1]
            place = self.one(range(count))
            owned[place] += mine
            if self.maybe(25, Feature.SHARED) and count > 1:
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
        if self.maybe(20, Feature.ACCUMULATION):
            options["passes"] = self.one((2, 3))
        if self.maybe(15, Feature.SUM):
            options["op"] = "sum"
        elif self.maybe(10):
            options["predivide"] = 2.0
        if self.maybe(6, Feature.FP16):
            options["fp16"] = True
        if self.sparse and self.maybe(25, Feature.SPARSE_AS_DENSE):
            options["sparse_as_dense"] = True
        if self._has_sets and self.maybe(10, Feature.PROCESS_SETS):
            options["process_set"] = self.one([(0, 1), (0, self.n_ranks - 1), (1, 2)])
        return options

    def _spec(self, names: list[str], options: dict[str, object], seed: int | None) -> OptimizerSpec:
        sparse = [name for name in names if name in self.sparse]
        if sparse and len(sparse) == len(names):
            adam = {"sparse_adam"} if Feature.SPARSE_ADAM in self.features else set()
            rule = self.one(("sgd", "adagrad", *adam))
        elif sparse:
            rule = self.one(("sgd", "adagrad"))
        elif self.maybe(5, Feature.LBFGS, Feature.CLOSURES) and "op" not in options:
            rule = self.one(("lbfgs", "lbfgs_search"))
        else:
            rule = self.one(DENSE_RULES)
        groups = self.one((1, 2, 5)) if self.maybe(8, Feature.GROUPED) else 0
        return OptimizerSpec(rule=rule, parameters=tuple(names), plan_seed=seed, groups=groups, **options)  # type: ignore[arg-type]

    # ── what happens ──────────────────────────────────────────────────────────────────────────────────────────────

    def _phase(self) -> list[Action]:
        if self.maybe(60):
            return self._between()
        return self.iteration()

    def _between(self) -> list[Action]:
        """What is done between two iterations."""
        number = self.one(range(len(self.optimizers)))
        choices: list[tuple[Feature | None, Callable[[], list[Action]]]] = [
            (None, lambda: [actions.Nudge()]),
            (Feature.FROZEN, lambda: [actions.RequireGrad(parameters=self.some(self.names), wanted=False)]),
            (Feature.THAWED, lambda: [actions.RequireGrad(parameters=self.names, wanted=True)]),
            (Feature.THAWED, lambda: [actions.RequireGrad(parameters=self.some(self.names), wanted=True)]),
            (Feature.GROUPS_ADDED, lambda: [actions.AddGroup(optimizer=number, parameters=self.some(self.names))]),
            (Feature.REWRAPPED, lambda: [actions.Rewrap(optimizer=number, keep_state=self.maybe(40))]),
            (Feature.REWRAPPED, lambda: [actions.Rewrap(optimizer=number, spec=self._other(number))]),
            (Feature.ACCUMULATION, lambda: [actions.Passes(optimizer=number, passes=self.one((1, 2, 3)))]),
            (Feature.SAVED, lambda: [actions.Save(), *self.iteration(), actions.Load()]),
            (Feature.SAVED, lambda: [actions.Load()]),
            (Feature.DTYPES, lambda: [actions.Convert(to=self.one(("double", "float", "half", "bfloat16")))]),
            (
                Feature.FORMATS,
                lambda: [actions.Convert(to=self.one(("channels_last", "contiguous", "data", "strides")))],
            ),
            (Feature.BROADCAST, lambda: [actions.Broadcast(root=self.one(range(self.n_ranks)))]),
            (Feature.BROADCAST, lambda: [actions.Broadcast(root=self.one(range(self.n_ranks)), optimizer=number)]),
            (Feature.EAGER, lambda: [self.eager()]),
            (Feature.TOO_EARLY, lambda: [self._too_early(number)]),
            (Feature.JOIN, lambda: [self._epoch()]),
            (None, lambda: [actions.ZeroGrad(optimizer=number), actions.Step(optimizer=number)]),
        ]
        return self.one([make for feature, make in choices if feature is None or feature in self.features])()

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
        """Another optimizer of the same or of other parameters."""
        old = self.optimizers[number]
        names = list(old.parameters) if self.maybe(60) else list(self.some(self.names))
        spec = self._spec(names, self._options(), old.plan_seed)
        self.optimizers[number] = spec
        return spec

    def _epoch(self) -> actions.Epoch:
        batches = tuple(self.draw(st.integers(0, 5)) for _ in range(self.n_ranks))
        sparse = Feature.JOIN_SPARSE in self.features
        usable = [
            number
            for number, spec in enumerate(self.optimizers)
            if sparse or not set(spec.parameters) & set(self.sparse)
        ] or [0]
        if Feature.JOIN_SEVERAL not in self.features:
            usable = usable[:1]
        pattern = self.draw(
            st.lists(st.sampled_from([self.some(usable)] + [(n,) for n in usable]), min_size=1, max_size=3)
        )
        return actions.Epoch(batches=batches if any(batches) else (1, *batches[1:]), order=tuple(pattern))
