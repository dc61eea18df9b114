"""What a recording holds of memory: who held how much of a device in one iteration, and what its modules did.

One iteration of a rank, the first that torch.profiler saw. Moments are seconds of the rank's clock, like all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sirtaki.autotune.model.graph import Phase

ModuleKey = tuple[int, str]
"""(outermost module, name in it)."""


class Holds(Enum):
    """What memory is for."""

    PARAMETERS = "parameters"
    MODULE_BUFFERS = "buffers of modules"
    OPTIMIZER = "optimizer state"
    FLAT_BUFFERS = "flat buffers"  # in which gradients travel
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"  # what the forward pass leaves for the backward pass, inputs too
    OTHER = "other"  # what is gone soon, and whatever else the script holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """A block of memory.

    Attributes:
        device: `StepMemory.devices`, by place.
        n_bytes: of it.
        holds: what it is for.
        phase: of the step in which it came; OTHER if it was there before.
        begin_s: when; None = before the step.
        end_s: when it was given back; None = after the step.
        added_s: of a gradient, when autograd had added it to `.grad`.
        call: `StepMemory.calls`, by place: the module whose forward pass made it, or whose backward pass; -1 = none.
        operator: that asked for it; "" if not known.
    """

    device: int
    n_bytes: int
    holds: Holds
    phase: Phase = Phase.OTHER
    begin_s: float | None = None
    end_s: float | None = None
    added_s: float | None = None
    call: int = -1
    operator: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One module.

    Attributes:
        name: by which the outermost one knows it, such as "layers.0"; "" = it is the outermost one.
        kind: its class.
        root: the outermost one, by its place among all.
    """

    name: str
    kind: str
    root: int

    @property
    def key(self) -> ModuleKey:
        """Equal on ranks that train the same."""
        return self.root, self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One forward pass of one module.

    Attributes:
        module: `RankRecording.modules`, by place.
        parent: the call that it was made in, by place; -1 = none.
        begin_s, end_s: of it.
        backward_begin_s, backward_end_s: of the backward pass of what it did; None = there was none.
        inputs, outputs: `StepMemory.allocations`, by place.
    """

    module: int
    parent: int
    begin_s: float
    end_s: float
    backward_begin_s: float | None = None
    backward_end_s: float | None = None
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """One iteration.

    Attributes:
        iteration: its number.
        begin_s, end_s: of it.
        devices: such as "cpu" and "cuda:0".
        batch: length of the first dimension of what the first module got; 0 = not known.
        allocations: that were there at some time in it.
        calls: of modules, in their order.
    """

    iteration: int
    begin_s: float
    end_s: float
    devices: tuple[str, ...]
    batch: int
    allocations: tuple[Allocation, ...]
    calls: tuple[ModuleCall, ...]
