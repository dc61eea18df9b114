"""Search for the fastest communication setting of a training job: arms (search methods), tuning session, models.

The package exports everything that the author of an arm needs (docs/reference/arms.md). It uses no process group,
database or file. From `sirtaki.comm`, it imports only plan types.

Each module is imported when one of its names is first accessed, because the arms import torch, and the command `sirtaki
registry` must start without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

# Reject `import autotune` without `sirtaki.`: both imports together would load each module twice, with two copies of
# each class.
if __name__ != "sirtaki.autotune":
    raise ImportError(
        "write `import sirtaki.autotune`, not `import autotune`: both load the same code, which must be loaded only "
        "once"
    )

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
    """Import the module that defines `name`, and return its value."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
