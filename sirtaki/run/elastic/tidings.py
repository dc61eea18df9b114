"""What members of a generation are told of what changes while it lasts, each thing once."""

from sirtaki.engine.membership import Change

from .actions import Tell
from .roll import Roll
from .workers import Phase

_NOTHING = Change(0)


class Tidings:
    """Of the present generation."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A generation begins."""
        self._change, self._lost, self._told_lost = _NOTHING, "", ""

    def lose(self, text: str) -> None:
        """A member has died; those who wait for it are told how the first did."""
        self._lost = self._lost or text

    def news(self, roll: Roll) -> Tell | None:
        """What is to be told now; None = nothing."""
        if not roll.is_running or roll.has_succeeded:
            return None
        added = Change.ADDED if roll.newcomers else _NOTHING
        removed = Change.REMOVED if roll.is_diminished else _NOTHING
        lost = self._lost if len(roll.of_generation(*Phase)) < len(roll.members) else ""
        change = (added | removed) & ~self._change
        if not change and lost == self._told_lost:
            return None
        self._change, self._told_lost = self._change | change, lost
        members = tuple(worker.number for worker in roll.of_generation(Phase.MEMBER))
        return Tell(workers=members, change=change, lost=lost)
