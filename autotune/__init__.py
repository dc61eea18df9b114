"""Decides plans. Knows no process group, no database, no file; may import `sirtaki.comm`'s plan types.

What somebody needs who writes an arm can be imported from here (docs/reference/arms.md).
"""

if __name__ != "sirtaki.autotune":  # every module would be there twice, with classes that differ
    raise ImportError("import sirtaki.autotune, not autotune: the folder at the checkout's root is the same code")

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
