"""Decides plans. Knows no process group, no database, no file; may import `sirtaki.comm`'s plan types.

Everything that an arm needs can be imported from here (docs/reference/arms.md). A name is loaded when it is first used,
because the modules of the arms import torch, which `sirtaki registry` must not.
"""

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "sirtaki.autotune":  # every module would be there twice, with classes that differ
    raise ImportError("import sirtaki.autotune, not autotune: the folder at the checkout's root is the same code")

if TYPE_CHECKING:
    from sirtaki.comm.plan import Algorithm, TransportKind

    from .knobs import Cut, KnobLattice, Knobs, KnobSpace
    from .meta.bandit import default_arms
    from .meta.session import Assignment, Purpose, SessionResult, TuningSession
    from .trial import Arm, Proposal, Trial, TrialStatus

__all__ = [
    "Algorithm",
    "Arm",
    "Assignment",
    "Cut",
    "KnobLattice",
    "KnobSpace",
    "Knobs",
    "Proposal",
    "Purpose",
    "SessionResult",
    "TransportKind",
    "Trial",
    "TrialStatus",
    "TuningSession",
    "default_arms",
]

_MODULES = {
    "sirtaki.comm.plan": ("Algorithm", "TransportKind"),
    "sirtaki.autotune.knobs": ("Cut", "KnobLattice", "KnobSpace", "Knobs"),
    "sirtaki.autotune.meta.bandit": ("default_arms",),
    "sirtaki.autotune.meta.session": ("Assignment", "Purpose", "SessionResult", "TuningSession"),
    "sirtaki.autotune.trial": ("Arm", "Proposal", "Trial", "TrialStatus"),
}


def __getattr__(name: str) -> Any:
    """Load the module that defines the name."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
