"""What a search algorithm offers: `ask` and `tell`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Protocol, runtime_checkable

from sirtaki.errors import TuningError

from ..knobs import Knobs
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


class Nobody:
    """The arm where there is none: it has nothing to propose."""

    name = "nobody"

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Nothing."""
        return ()

    def tell(self, trials: Sequence[Trial]) -> None:
        """Learns nothing."""


@runtime_checkable
class Forecaster(Protocol):
    """An arm with a surrogate can say what is left to gain; the session stops early where that is noise."""

    def expected_improvement(self) -> float | None:
        """Largest share of the best span that an untried setting is expected to save; None = cannot say yet."""
        ...


def expected_improvement(arm: Arm) -> float | None:
    """What the arm expects to be left to gain; None where it cannot say."""
    return arm.expected_improvement() if isinstance(arm, Forecaster) else None


@runtime_checkable
class Surrogate(Protocol):
    """An arm that has an opinion of what a measured setting truly takes, from its neighbours' measurements too."""

    def expected_span_s(self, knobs: Knobs) -> float | None:
        """The span that the arm believes in; None = no opinion."""
        ...


def expected_span_s(arm: Arm, knobs: Knobs) -> float | None:
    """What the arm believes that these knobs take; None where it has no opinion."""
    return arm.expected_span_s(knobs) if isinstance(arm, Surrogate) else None


@runtime_checkable
class Screen(Protocol):
    """An arm with a surrogate can say which of several candidates are worth a trial, whoever proposes them."""

    def promise(self, candidates: Sequence[Knobs]) -> Sequence[float] | None:
        """Share of the best span that each is expected to save, `(n_candidates,)`; infinite for what it has no
        opinion of. None = it cannot say yet.
        """
        ...


def promise(arm: Arm, candidates: Sequence[Knobs]) -> Sequence[float] | None:
    """What the arm thinks of each; None where it has no opinion."""
    return arm.promise(candidates) if isinstance(arm, Screen) else None


def require(arm: str, package: str, distribution: str) -> None:
    """Says at once what would be missing later.

    Raises:
        TuningError: the package is not installed.
    """
    if find_spec(package) is None:
        raise TuningError(f"the {arm} arm needs {distribution}: pip install {distribution}, or leave the arm out")


@cache
def import_late(*names: str) -> tuple[ModuleType, ...]:
    """The modules. What they import may keep the errors of imports that failed, and with these the frames that led to
    them: so they are imported on a stack of its own, and not on the user's with his model in it.
    """
    with ThreadPoolExecutor(max_workers=1) as stack:
        return tuple(stack.map(import_module, names))
