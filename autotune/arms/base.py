"""The one interface of search techniques, planners and the bandit itself."""

from collections.abc import Sequence
from typing import Protocol

from ..trial import Proposal, Trial


class Arm(Protocol):
    """Proposes knobs and learns from trials. No threads, files, process groups or clocks of its own."""

    name: str

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Up to `n` proposals; learns nothing. Empty = nothing to propose (now)."""
        ...

    def tell(self, trials: Sequence[Trial]) -> None:
        """Learns from finished trials, whoever asked for them; proposes nothing."""
        ...
