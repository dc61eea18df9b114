"""DDP's logging data (`_get_ddp_logging_data()`) of a model whose gradients Sirtaki reduces.

This module measures the times of the forward and backward passes. A plain DDP model's reducer measures them itself, but
Sirtaki replaces this reducer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

AVERAGED = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)
"""Times of a step for which DDP's logging data also contains the mean, such as `avg_forward_compute_time`."""


@dataclass(slots=True)
class PassTimes:
    """Times at which the parts of a training step begin and end, as values of `time.time_ns()`.

    Attributes:
        forward_ns: begin of the forward pass.
        outputs_ns: end of the forward pass.
        backward_ns: begin of the backward pass and of communication.
        computed_ns: end of the backward computation.
    """

    forward_ns: int = 0
    outputs_ns: int = 0
    backward_ns: int = 0
    computed_ns: int = 0


class PassLog:
    """Times of the last training step of one DDP model, and means over all steps, in nanoseconds.

    Attributes:
        now: times of the step in progress.
    """

    def __init__(self) -> None:
        self.now = PassTimes()
        self._steps, self._last = 0, dict[str, int]()
        self._sums = dict.fromkeys(AVERAGED, 0)

    def end(self) -> None:
        """Store the times of the current training step as those of the last step.

        Call when the step's gradients are reduced.
        """
        now, end_ns = self.now, time.time_ns()
        self._steps += 1
        self._last = {
            "forward_compute_time_start": now.forward_ns,
            "forward_compute_time": now.outputs_ns - now.forward_ns,
            "backward_compute_time_start": now.backward_ns,
            "backward_compute_time_end": now.computed_ns,
            "backward_compute_time": now.computed_ns - now.backward_ns,
            "backward_comm_time_start": now.backward_ns,
            "backward_comm_time_end": end_ns,
            "backward_comm_time": end_ns - now.backward_ns,
            "backward_compute_comm_overlap_time": now.computed_ns - now.backward_ns,
        }
        for name in AVERAGED:
            self._sums[name] += self._last[name]

    def numbers(self) -> dict[str, int]:
        """Return the fields of DDP's logging data that depend on training: number of steps, times in nanoseconds."""
        if not self._steps:
            return {}
        means = {f"avg_{name}": total // self._steps for name, total in self._sums.items()}
        return {"iteration": self._steps, **self._last, **means}


class AttachedLogger:
    """Replacement of the logger of a DDP model whose gradients Sirtaki reduces.

    Returns the data of DDP's own logger at the time of `attach`, with the times that Sirtaki measures. It keeps no
    reference to DDP's logger, which would keep DDP's buckets.
    """

    # `logger` is Any, because DDP's logger is a C++ class without type declarations.
    def __init__(self, logger: Any, log: PassLog) -> None:
        known = logger._get_ddp_logging_data()
        self._strs = {**known.strs_map, "comm_hook": "sirtaki"}
        self._ints, self._log = dict(known.ints_map), log

    def set_runtime_stats_and_log(self) -> None:
        """Record the time at which a forward pass begins.

        Called by DDP before a forward pass whose gradients are reduced.
        """
        self._log.now.forward_ns = time.time_ns()

    def set_error_and_log(self, error: str) -> None:
        """Record an error, which DDP then raises."""
        self._strs["error"], self._ints["has_error"] = error, 1

    def _set_uneven_input_join(self) -> None:
        self._ints["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self._ints["static_graph"] = 1

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        """Return DDP's logging data, with the times of the steps whose gradients Sirtaki has reduced."""
        return SimpleNamespace(strs_map=dict(self._strs), ints_map={**self._ints, **self._log.numbers()})
