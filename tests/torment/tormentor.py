"""Plays programs on ranks and in one process, and compares all that a user may look at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .program import BlockKind, Convert, OptimizerSpec, Program, Rewrap
from .ranks import BrokenError, Ranks
from .reference import Entry, Reference

TOLERANCE = {"double": 1e-9, "float": 1e-4, "half": 0.1, "bfloat16": 0.3, "fp16": 0.05}


class WrongError(AssertionError):
    """A program gives something else on ranks than in one process, or does not come to its end."""


def torment(program: Program, ranks: Ranks) -> Reference:
    """Plays what is legitimate of a program.

    Raises:
        WrongError: with the program as JSON, so that it can be kept.
    """
    return replay(Reference(program), ranks)


def replay(reference: Reference, ranks: Ranks) -> Reference:
    """Plays a program whose reference is known."""
    played = reference.played
    try:
        found = ranks.play(played)
    except BrokenError as err:
        raise WrongError(f"{err}\nin\n{played.to_json()}") from None
    difference = compare(reference.trace, found, tolerance_of(played))
    if difference:
        raise WrongError(f"{difference}\nin\n{played.to_json()}")
    return reference


def tolerance_of(program: Program) -> float:
    """How far values may be off, relative to 1 or to their tensor's largest: what its coarsest dtype rounds to."""
    kinds = {"double"} | {action.to for action in program.actions if isinstance(action, Convert)}
    if BlockKind.SINGLE in program.blocks:
        kinds.add("float")
    specs: list[OptimizerSpec | None] = [*program.optimizers]
    specs += [action.spec for action in program.actions if isinstance(action, Rewrap)]
    if any(spec is not None and spec.fp16 for spec in specs):
        kinds.add("fp16")
    return max(TOLERANCE.get(kind, 0.0) for kind in kinds)


def compare(wanted: Sequence[Sequence[Entry]], found: Sequence[Sequence[Entry]], tolerance: float) -> str:
    """The first difference, in words; empty if there is none.

    What is the same on two ranks in one process must be the same to the bit on the ranks themselves.
    """
    for rank, (mine, theirs) in enumerate(zip(wanted, found, strict=True)):
        if [entry[:2] for entry in mine] != [entry[:2] for entry in theirs]:
            return f"rank {rank} saw {[e[:2] for e in theirs]} instead of {[e[:2] for e in mine]}"
        for (number, label, values), (_, _, others) in zip(mine, theirs, strict=True):
            for name, value in values.items():
                if trouble := _differ(value, others[name], tolerance):
                    return f"rank {rank}, action {number}, {label}, {name}: {trouble}"
    for rank in range(1, len(wanted)):
        if len(wanted[rank]) != len(wanted[0]):
            continue
        for place, (number, label, values) in enumerate(wanted[rank]):
            for name, value in values.items():
                first = wanted[0][place][2].get(name)
                same = value is not None and first is not None and np.array_equal(first, value)
                ours, zeroth = found[rank][place][2][name], found[0][place][2].get(name)
                if same and not np.array_equal(_array(ours), _array(zeroth), equal_nan=True):
                    return f"ranks 0 and {rank} differ, action {number}, {label}, {name}: {zeroth} and {ours}"
    return ""


def _array(value: np.ndarray | None) -> np.ndarray:
    assert value is not None
    return value


def _differ(wanted: np.ndarray | None, found: np.ndarray | None, tolerance: float) -> str:
    if wanted is None or found is None:
        return "" if wanted is found else f"{_brief(found)} instead of {_brief(wanted)}"
    if wanted.shape != found.shape:
        return f"shape {found.shape} instead of {wanted.shape}"
    largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=1.0)  # what a sum is rounded to depends on its terms
    if np.allclose(found, wanted, rtol=tolerance, atol=tolerance * largest, equal_nan=True):
        return ""
    return f"off by {np.nanmax(np.abs(found - wanted)):.3g}: {_brief(found)} instead of {_brief(wanted)}"


def _brief(value: np.ndarray | None) -> str:
    return "None" if value is None else str(value.ravel()[:4])
