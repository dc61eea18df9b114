"""A step's memory as JSON, both ways: a row for each block, names of operators once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sirtaki.autotune.model.graph import Phase

from .step_memory import Allocation, Holds, ModuleCall, StepMemory

DIGITS = 9
"""Of seconds."""


def to_json(memory: StepMemory) -> dict[str, Any]:
    """A JSON-ready dict; `from_json` is its inverse."""
    names: dict[str, int] = {}
    return {
        "iteration": memory.iteration,
        "begin_s": memory.begin_s,
        "end_s": memory.end_s,
        "devices": list(memory.devices),
        "batch": memory.batch,
        "allocations": [
            [
                one.device,
                one.n_bytes,
                one.holds.value,
                one.phase.value,
                _rounded(one.begin_s),
                _rounded(one.end_s),
                _rounded(one.added_s),
                one.call,
                names.setdefault(one.operator, len(names)),
            ]
            for one in memory.allocations
        ],
        "calls": [
            [
                one.module,
                one.parent,
                _rounded(one.begin_s),
                _rounded(one.end_s),
                _rounded(one.backward_begin_s),
                _rounded(one.backward_end_s),
                list(one.inputs),
                list(one.outputs),
            ]
            for one in memory.calls
        ],
        "operators": list(names),
    }


def from_json(data: Mapping[str, Any]) -> StepMemory:
    """What `to_json` described.

    Raises:
        KeyError, IndexError, TypeError, ValueError: it is something else.
    """
    return StepMemory(
        iteration=data["iteration"],
        begin_s=data["begin_s"],
        end_s=data["end_s"],
        devices=tuple(data["devices"]),
        batch=data["batch"],
        allocations=tuple(
            Allocation(
                device=device,
                n_bytes=n_bytes,
                holds=Holds(holds),
                phase=Phase(phase),
                begin_s=begin_s,
                end_s=end_s,
                added_s=added_s,
                call=call,
                operator=data["operators"][operator],
            )
            for device, n_bytes, holds, phase, begin_s, end_s, added_s, call, operator in data["allocations"]
        ),
        calls=tuple(
            ModuleCall(
                module=module,
                parent=parent,
                begin_s=begin_s,
                end_s=end_s,
                backward_begin_s=backward_begin_s,
                backward_end_s=backward_end_s,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
            )
            for module, parent, begin_s, end_s, backward_begin_s, backward_end_s, inputs, outputs in data["calls"]
        ),
    )


def _rounded(moment_s: float | None) -> float | None:
    return None if moment_s is None else round(moment_s, DIGITS)
