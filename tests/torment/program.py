"""A drawn training program: a model, its optimizers, and what a script does with them, one action after the other.

Programs are plain data. `rank_worker.py` plays one on a rank, `reference.py` says what must come out, and
JSON keeps those that once found a fault. Parameters have the names that `named_parameters()` gives them; ranks and
optimizers are numbers; an empty tuple of ranks means all of them.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

# ── The program ──────────────────────────────────────────────────────────────────────────────────────────────────────


class BlockKind(Enum):
    """Of a block of the model."""

    LINEAR = "linear"
    WIDE = "wide"  # its weights are larger than the smallest unit
    CONVOLUTION = "convolution"
    NORM = "norm"
    TRANSPOSED = "transposed"  # a weight whose strides are not those of its shape
    SMALL = "small"  # a parameter without dimensions and one without elements
    SINGLE = "single"  # float32 among float64
    EMBEDDING = "embedding"
    SPARSE = "sparse"  # an embedding with sparse gradients
    TIED = "tied"  # two modules with one weight


PARAMETERS = {
    BlockKind.LINEAR: ("weight", "bias"),
    BlockKind.WIDE: ("up.weight", "down.weight"),
    BlockKind.CONVOLUTION: ("conv.weight", "conv.bias"),
    BlockKind.NORM: ("norm.weight", "norm.bias"),
    BlockKind.TRANSPOSED: ("weight",),
    BlockKind.SMALL: ("gain", "nothing"),
    BlockKind.SINGLE: ("weight", "bias"),
    BlockKind.EMBEDDING: ("table.weight",),
    BlockKind.SPARSE: ("table.weight",),
    BlockKind.TIED: ("first.weight",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """One DistributedOptimizer.

    Attributes:
        rule: a key of `replica.RULES`.
        lossy: a key of `replica.LOSSY`, "" = nothing is lost.
        plan_seed: draws a plan every few iterations (where the job tunes), None = tunes nothing.
    """

    rule: str
    parameters: tuple[str, ...]
    op: str = "average"
    passes: int = 1
    predivide: float = 1.0
    fp16: bool = False
    lossy: str = ""
    groups: int = 0
    sparse_as_dense: bool = False
    process_set: tuple[int, ...] = ()
    plan_seed: int | None = None

    @property
    def options(self) -> tuple[object, ...]:
        """What two optimizers with a parameter in common must agree on."""
        wire = self.fp16, self.lossy
        return (self.op, self.passes, self.predivide, *wire, self.sparse_as_dense, self.process_set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing that a script does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward(Action):
    """A forward and a backward pass on a batch of each rank.

    Attributes:
        skipped: blocks that the forward pass leaves out, on the ranks `on`.
        inputs: `backward(inputs=…)`; empty = all parameters.
        checkpoint: activations are computed again: "", "reentrant" or "plain".
        nested: a backward pass within this one. A key of `replica.NESTED`, "" = none.
        compiled: what is compiled: "", each of the "blocks", the "model", the "loss" or the whole "step".
        penalty: the loss holds a gradient, so that there is a double backward.
        slopes: the same of the parameters that the pass is for, where they are dense.
        retain: `retain_graph=True`.
        again: a second backward pass of the loss that was retained.
        fails_at: the backward pass raises when it comes to this block, and the script catches it.
        scale: the loss is multiplied by it.
        apart: within `no_sync()`, which only programs over DistributedDataParallel have.
    """

    skipped: tuple[int, ...] = ()
    on: tuple[int, ...] = ()
    inputs: tuple[str, ...] = ()
    checkpoint: str = ""
    nested: str = ""
    compiled: str = ""
    penalty: bool = False
    slopes: bool = False
    retain: bool = False
    again: bool = False
    fails_at: int | None = None
    scale: float = 1.0
    apart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Action):
    """`optimizer.step()`; with `closure`, which zeroes gradients and makes this backward pass.

    Attributes:
        compiled: `step` is compiled.
    """

    optimizer: int
    skip_synchronize: bool = False
    compiled: bool = False
    closure: Backward | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronize(Action):
    """`optimizer.synchronize()`."""

    optimizer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroGrad(Action):
    """`optimizer.zero_grad()`, or the model's if there is no optimizer."""

    optimizer: int | None = None
    set_to_none: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit(Action):
    """Gradients are changed. `how` is a key of `replica.EDITS`."""

    how: str
    parameters: tuple[str, ...]
    on: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook(Action):
    """Registers a hook of the user's that changes gradients.

    Attributes:
        at: "tensor" (`register_hook`), "accumulated" (`register_post_accumulate_grad_hook`), or, for the blocks of the
            parameters, "module" (`register_full_backward_hook`) or "module_pre" (`register_full_backward_pre_hook`).
        how: a key of `replica.EDITS` for "accumulated", else of `replica.CHANGES`.
        on: ranks that register the hook.
    """

    at: str
    how: str
    parameters: tuple[str, ...]
    on: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unhook(Action):
    """Removes all hooks on these parameters, and on their blocks."""

    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork(Action):
    """Forks a child that reads the parameters, and waits for it. `how` is a key of `forks.CHILDREN`.

    Attributes:
        on: ranks that fork.
    """

    how: str
    on: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TooEarly(Action):
    """Gradients are changed in place before they are reduced: an error on all ranks, which the script catches.

    Attributes:
        backward: leaves out a block on some rank.
        how: a key of `replica.IN_PLACE`.
        on: ranks that change gradients.
    """

    optimizer: int
    backward: Backward
    how: str
    parameters: tuple[str, ...]
    on: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(Action):
    """Gradients are looked at."""

    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aside(Action):
    """A pass that is none for training: a loss, or its gradients by `torch.autograd.grad`, only looked at.

    Attributes:
        on: ranks that do it.
        forward: there is no backward pass.
    """

    on: tuple[int, ...] = ()
    forward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep(Action):
    """The script keeps an optimizer's dense gradients, and lets go of `.grad` by `zero_grad()`.

    Attributes:
        how: a key of `replica.KEEPS`.
    """

    optimizer: int
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall(Action):
    """Gradients that were kept are looked at: nobody else may have written to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside(Action):
    """Parameters are read, but not by their modules. `how` is a key of `replica.READERS`."""

    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequireGrad(Action):
    """Parameters are frozen or thawed."""

    parameters: tuple[str, ...]
    wanted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AddGroup(Action):
    """`optimizer.add_param_group()`."""

    optimizer: int
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrap(Action):
    """The optimizer is dropped and a new one made: of the same parameters, or as `spec` says."""

    optimizer: int
    spec: OptimizerSpec | None = None
    keep_state: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes(Action):
    """`optimizer.set_backward_passes_per_step()`."""

    optimizer: int
    passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Save(Action):
    """The states of model and optimizers are written down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Action):
    """The states that were last written down are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convert(Action):
    """The model's dtype, memory format or storage is changed. `to` is a key of `replica.CONVERSIONS`."""

    to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Nudge(Action):
    """Parameters are clamped in place, as a Wasserstein critic's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast(Action):
    """`broadcast_parameters()` or, with an optimizer, `broadcast_optimizer_state()`, and gradients are dropped."""

    root: int
    optimizer: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Eager(Action):
    """An eager operation; `what` is a key of `eager.OPERATIONS`.

    Attributes:
        later: it is only started; the next `Wait` waits for it.
    """

    what: str
    later: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait(Action):
    """Waits for the eager operations that were started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch(Action):
    """Uneven data: `zero_grad(), backward(), step()` for each batch, then `join()` and a broadcast.

    Attributes:
        batches: of each rank.
        order: the optimizers that are stepped for the first batch, the second and so on, and again from the start.
    """

    batches: tuple[int, ...]
    order: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What every rank's script does.

    Attributes:
        ranks: world size.
        blocks: the model's, one after the other.
        frozen: parameters that want no gradient at first.
        hooks: those that are registered before the optimizers or the model are wrapped.
        environment: settings of the job, without `SIRTAKI_` and in lower case.
        defaults: modes and defaults of the process while the job begins and trains. Keys of `replica.DEFAULTS`.
        backend: of `torch.compile`.
        attached: options of DistributedDataParallel, whose gradients `ddp.attach` reduces for plain optimizers;
            "replicate" among them = the model is wrapped by `replicate()`. None = each optimizer is a
            DistributedOptimizer.
    """

    ranks: int
    blocks: tuple[BlockKind, ...]
    optimizers: tuple[OptimizerSpec, ...]
    actions: tuple[Action, ...]
    frozen: tuple[str, ...] = ()
    hooks: tuple[Hook, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    defaults: tuple[str, ...] = ()
    backend: str = "aot_eager"
    attached: tuple[str, ...] | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """All of the model's."""
        return tuple(f"{number}.{name}" for number, kind in enumerate(self.blocks) for name in PARAMETERS[kind])

    def kind_of(self, parameter: str) -> BlockKind:
        """The block that a parameter belongs to."""
        return self.blocks[int(parameter.split(".")[0])]

    def to_json(self) -> str:
        """`from_json` is its inverse; fields with their default are left out."""
        return json.dumps(_plain(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The program that `to_json` wrote."""
        data = json.loads(text)
        data["blocks"] = tuple(BlockKind(kind) for kind in data["blocks"])
        data["optimizers"] = tuple(OptimizerSpec(**_tuples(spec)) for spec in data["optimizers"])
        for name in ("actions", "hooks"):
            data[name] = tuple(_action(action) for action in data.get(name, ()))
        return cls(**_tuples(data))


def _plain(value: Any) -> Any:  # Any: JSON
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    named = {"do": type(value).__name__} if isinstance(value, Action) else {}
    fields = {
        field.name: _plain(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    }
    return named | fields


def _action(data: dict[str, Any]) -> Action:
    fields = _tuples({key: value for key, value in data.items() if key != "do"})
    for name in ("closure", "backward"):
        if fields.get(name) is not None:
            fields[name] = _action(fields[name])
    if fields.get("spec") is not None:
        fields["spec"] = OptimizerSpec(**_tuples(fields["spec"]))
    action: Action = globals()[data["do"]](**fields)  # a class of this module
    return action


def _tuples(data: dict[str, Any]) -> dict[str, Any]:
    def deep(value: Any) -> Any:
        return tuple(deep(item) for item in value) if isinstance(value, list | tuple) else value

    return {key: deep(value) for key, value in data.items()}
