"""State of one iteration of gradient reduction."""

from __future__ import annotations

from enum import Enum


class IterationState(Enum):
    """State of one iteration of gradient reduction on this rank. A unit is a bucket of gradients.

    The usual states are COLLECTING → LAUNCHED → REDUCED → COLLECTING of the next iteration. If `step()` returns without
    waiting for the reduction, LAUNCHED becomes DEFERRED. If a backward pass raises, any state becomes FAILED.
    """

    COLLECTING = "waiting for gradients; complete units are launched"
    LAUNCHED = "all units are launched; reading a gradient waits for its units"
    DEFERRED = "step() has returned; reading a parameter waits for its units and updates it"
    REDUCED = "every .grad holds the reduced gradient"
    FAILED = "a backward pass has raised"


class LaunchMode(Enum):
    """Rule for launching the units (buckets) of one iteration, chosen when the first gradient is ready.

    IN_ORDER becomes COUNTED, for the rest of the iteration, at the first gradient out of the expected order.
    """

    IN_ORDER = "launch after fixed numbers of gradients, which are ready in the expected order"
    COUNTED = "count gradients one by one, and launch a unit when all of its gradients are ready"
    NEGOTIATED = "launch gradients that are ready on all ranks; while the order is profiled on the host"
    AT_END = "launch at the end of backward; while the order is profiled on a GPU, or if several optimizers use the GPU"
