"""A random training program: a model, its optimizers, and the actions of a script in order.

Programs are plain data. `rank_worker.py` runs a program on a rank, and `reference.py` computes the expected values.
Programs that have found a fault are kept as JSON. Parameters have the names of `named_parameters()`. Ranks and
optimizers are numbers. An empty tuple of ranks means all ranks.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

# ── The program ──────────────────────────────────────────────────────────────────────────────────────────────────────


class BlockKind(Enum):
    """Kind of a block of the model."""

    LINEAR = "linear"
    WIDE = "wide"  # weights larger than the smallest unit
    CONVOLUTION = "convolution"
    NORM = "norm"
    TRANSPOSED = "transposed"  # a weight that is not contiguous
    SMALL = "small"  # a scalar parameter, and an empty one
    SINGLE = "single"  # float32 parameters among float64 ones
    EMBEDDING = "embedding"
    SPARSE = "sparse"  # an embedding with sparse gradients
    TIED = "tied"  # two modules that share a weight


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
        rule: key of `replica.RULES`.
        lossy: key of `replica.LOSSY`; "" = no lossy compression.
        plan_seed: seed of random plans that change every few iterations; None = no tuning.
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
        """Return the options that must be equal for optimizers with a common parameter."""
        wire = self.fp16, self.lossy
        return (self.op, self.passes, self.predivide, *wire, self.sparse_as_dense, self.process_set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One action of a script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward(Action):
    """A forward and a backward pass on a batch of each rank.

    Attributes:
        skipped: blocks that the forward pass skips on the ranks `on`.
        inputs: `backward(inputs=…)`; empty = all parameters.
        checkpoint: kind of activation checkpointing: "", "reentrant" or "plain".
        nested: a backward pass within this one: key of `replica.NESTED`; "" = none.
        compiled: compiled part: "", each of the "blocks", the "model", the "loss" or the whole "step".
        penalty: whether the loss contains a gradient, so that there is a double backward.
        slopes: whether it contains gradients of the pass's dense parameters.
        retain: `retain_graph=True`.
        again: a second backward pass of the retained loss.
        fails_at: block at which the backward pass raises an exception that the script catches.
        scale: factor on the loss.
        apart: within `no_sync()`; only in programs over DistributedDataParallel.
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
    """`optimizer.step()`, optionally with a closure that zeroes gradients and runs a backward pass.

    Attributes:
        closure: the backward pass of the closure.
        compiled: whether `step` is compiled.
    """

    optimizer: int
    skip_synchronize: bool = False
    compiled: bool = False
    closure: Backward | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronize(Action):
    """Call of `optimizer.synchronize()`."""

    optimizer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroGrad(Action):
    """Call of `optimizer.zero_grad()`, or of the model's without an optimizer."""

    optimizer: int | None = None
    set_to_none: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit(Action):
    """Change of gradients. `how` is a key of `replica.EDITS`."""

    how: str
    parameters: tuple[str, ...]
    on: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook(Action):
    """Registration of a user's hook that changes gradients.

    Attributes:
        at: "tensor" (`register_hook`), "accumulated" (`register_post_accumulate_grad_hook`), or, for the blocks of the
            parameters, "module" (`register_full_backward_hook`) or "module_pre" (`register_full_backward_pre_hook`).
        how: key of `replica.EDITS` for "accumulated", otherwise of `replica.CHANGES`.
        on: ranks that register the hook.
    """

    at: str
    how: str
    parameters: tuple[str, ...]
    on: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unhook(Action):
    """Removal of all hooks on parameters, and on their blocks."""

    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork(Action):
    """Fork of a child that reads the parameters. The script waits for it. `how` is a key of `forks.CHILDREN`.

    Attributes:
        on: ranks that fork.
    """

    how: str
    on: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TooEarly(Action):
    """In-place change of gradients before they are reduced: an error on all ranks, which the script catches.

    Attributes:
        backward: a backward pass that skips a block on a rank.
        how: key of `replica.IN_PLACE`.
        on: ranks that change gradients.
    """

    optimizer: int
    backward: Backward
    how: str
    parameters: tuple[str, ...]
    on: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(Action):
    """Comparison of gradients."""

    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aside(Action):
    """A pass that does not train: a loss, or its gradients by `torch.autograd.grad`, which are only compared.

    Attributes:
        on: ranks that run it.
        forward: whether to run the forward pass only.
    """

    on: tuple[int, ...] = ()
    forward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep(Action):
    """Keeping of an optimizer's dense gradients. The script then drops `.grad` by `zero_grad()`.

    Attributes:
        how: key of `replica.KEEPS`.
    """

    optimizer: int
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall(Action):
    """Comparison of kept gradients, which Sirtaki must not have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside(Action):
    """Read of parameters outside of their modules. `how` is a key of `replica.READERS`."""

    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequireGrad(Action):
    """Freezing or unfreezing of parameters."""

    parameters: tuple[str, ...]
    wanted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AddGroup(Action):
    """Call of `optimizer.add_param_group()`."""

    optimizer: int
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrap(Action):
    """Replacement of an optimizer by a new one, of the same parameters or by `spec`."""

    optimizer: int
    spec: OptimizerSpec | None = None
    keep_state: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes(Action):
    """Call of `optimizer.set_backward_passes_per_step()`."""

    optimizer: int
    passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Save(Action):
    """Saving of the states of model and optimizers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Action):
    """Loading of the last saved states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convert(Action):
    """Change of the model's dtype, memory format or storage. `to` is a key of `replica.CONVERSIONS`."""

    to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Nudge(Action):
    """In-place clamping of parameters, as in a Wasserstein critic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast(Action):
    """Call of `broadcast_parameters()`, or with an optimizer `broadcast_optimizer_state()`. Drops gradients."""

    root: int
    optimizer: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Eager(Action):
    """An eager operation. `what` is a key of `replica.OPERATIONS`.

    Attributes:
        later: start it only; the next `Wait` waits for it.
    """

    what: str
    later: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait(Action):
    """Wait for all started eager operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch(Action):
    """Training on uneven data: `zero_grad(), backward(), step()` for each batch, then `join()` and a broadcast.

    Attributes:
        batches: number of batches by rank.
        order: optimizers that are stepped for the first batch, the second one and so on, cyclically.
    """

    batches: tuple[int, ...]
    order: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A training program that all ranks run.

    Attributes:
        ranks: world size.
        blocks: blocks of the model, in sequence.
        frozen: parameters that do not require gradients initially.
        hooks: hooks that are registered before optimizers or model are wrapped.
        environment: settings of the job, in lower case and without `SIRTAKI_`.
        defaults: modes and defaults of the process at the start and during training. Keys of `replica.DEFAULTS`.
        backend: backend of `torch.compile`.
        attached: options of DistributedDataParallel, attached by `ddp.attach`, with plain optimizers. With the option
            "replicate", `replicate()` wraps the model. None = each optimizer is a DistributedOptimizer.
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
        """Return the names of all parameters of the model."""
        return tuple(f"{number}.{name}" for number, kind in enumerate(self.blocks) for name in PARAMETERS[kind])

    def kind_of(self, parameter: str) -> BlockKind:
        """Return the kind of the block that has a parameter."""
        return self.blocks[int(parameter.split(".")[0])]

    def to_json(self) -> str:
        """Return the program as JSON, without fields that have their defaults."""
        return json.dumps(_plain(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the program of `to_json`."""
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
    action: Action = globals()[data["do"]](**fields)  # a subclass of Action in this module
    return action


def _tuples(data: dict[str, Any]) -> dict[str, Any]:
    def deep(value: Any) -> Any:
        return tuple(deep(item) for item in value) if isinstance(value, list | tuple) else value

    return {key: deep(value) for key, value in data.items()}
