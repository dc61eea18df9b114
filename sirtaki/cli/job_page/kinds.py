"""What a moment of a step is spent on, as the page names and colours it."""

from __future__ import annotations

from enum import Enum

from sirtaki.autotune.model.graph import Activity, Phase
from sirtaki.replay.history import Stretch


class Kind(Enum):
    """In the order in which bars are stacked; the last one is only on streams."""

    DATA = "data loading"
    FORWARD = "forward"
    BACKWARD = "backward computation"
    COPY = "copying gradients"
    EXPOSED = "exposed communication"
    UPDATE = "update"
    COLLECTIVE = "other operations between ranks"
    OTHER = "other, gaps"
    UNIT = "hidden communication"


COLORS = {
    Kind.DATA: "#e69f00",
    Kind.FORWARD: "#0072b2",
    Kind.BACKWARD: "#56b4e9",
    Kind.COPY: "#a58a3c",
    Kind.EXPOSED: "#d1366b",
    Kind.UPDATE: "#009e73",
    Kind.COLLECTIVE: "#d55e00",
    Kind.OTHER: "#8b9096",
    Kind.UNIT: "#9a78c2",
}
"""Told apart on white and on black, and by most who see few colours."""

NOT_TOLD_APART = "forward, data loading, other (told apart only where operators are recorded)"

OF_PHASE = {
    Phase.DATA: Kind.DATA,
    Phase.FORWARD: Kind.FORWARD,
    Phase.BACKWARD: Kind.BACKWARD,
    Phase.UPDATE: Kind.UPDATE,
    Phase.OTHER: Kind.OTHER,
}


def kind_of(one: Stretch) -> Kind:
    """Of what a rank's training thread does for a while."""
    if one.waits:
        return Kind.EXPOSED if waits_for_gradients(one) else Kind.COLLECTIVE
    if one.activity is Activity.COPY:
        return Kind.COPY
    return OF_PHASE[one.phase]


def waits_for_gradients(one: Stretch) -> bool:
    """Units are waited for, perhaps among other things."""
    return any(buffer >= 0 for buffer, _, _ in one.waits)
