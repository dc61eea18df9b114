"""State of one iteration of gradient reduction."""

from __future__ import annotations

from enum import Enum


class IterationState(Enum):
    """State of one iteration on this rank.

    COLLECTING → LAUNCHED → REDUCED → COLLECTING (of the next iteration) is the usual course. Without waiting for the
    reduction, `step()` leads from LAUNCHED to DEFERRED. A backward pass that raises leads from any state to FAILED.
    """

    COLLECTING = "gradients become ready; units are launched as they are complete"
    LAUNCHED = "all units are launched; whoever reads a gradient waits"
    DEFERRED = "step() has returned; whoever reads a parameter waits, and the parameter is updated then"
    REDUCED = "every .grad holds the reduced gradient"
    FAILED = "a backward pass has raised"


class LaunchMode(Enum):
    """Launch order of the units of one iteration. The first gradient of the iteration fixes it.

    IN_ORDER becomes COUNTED when a gradient does not come in the expected order.
    """

    IN_ORDER = "after fixed numbers of gradients, which come in the expected order"
    COUNTED = "a unit when its own gradients are ready, which are counted one by one"
    NEGOTIATED = "when the ranks agree that gradients are ready: the order is profiled on the host"
    AT_END = "at the end of the backward pass: the order is profiled on a GPU, or several optimizers use the GPU"
