"""Several optimizers over the same parameters: which of them use a reducer, and whether they find it done already."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from .participants import Progress, Stage

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane

_Reducer = TypeVar("_Reducer")
_Reducer_contra = TypeVar("_Reducer_contra", contravariant=True)


class User(Protocol[_Reducer_contra]):
    """One that uses a reducer's gradients: those of an optimizer."""

    def use_part(self, part: _Reducer_contra, *, of: _Reducer_contra) -> None:
        """Some of the parameters of a reducer that this one uses belong to `part` from now on."""
        ...

    def fail(self) -> None:
        """A backward pass has raised that computed gradients of this optimizer."""
        ...


class Sharing(Generic[_Reducer]):
    """Who uses one reducer.

    Attributes:
        active: several optimizers may use it; the same on all ranks.
        users: those optimizers of this rank that do.
        n_reduced: iterations in which gradients were reduced; a shared reducer may find nothing to reduce.
    """

    def __init__(self, control: ControlPlane, progress: Progress) -> None:
        """`control`: the ranks; `progress`: of the reducer."""
        self._control, self._progress = control, progress
        self.active = False
        self.users: weakref.WeakSet[User[_Reducer]] = weakref.WeakSet()
        self.n_reduced = 0

    def is_due(self, *, here: bool) -> bool:
        """Collective, while it is active: whether any rank has something to reduce; ends it if one user is left.

        Args:
            here: this rank has, or cannot know.
        """
        with self._progress.waits(Stage.ASK):
            anywhere, n_users = self._control.maximum(np.array([float(here), float(len(self.users))]))
        self.active = bool(n_users > 1)
        return bool(anywhere > 0)
