"""The end of an iteration that is put off: `step()` returns, and gradients are waited for when somebody needs them.

Only an iteration whose end needs no message may be put off: all units have left on this rank, the other ranks' leave
when they come to their `step()`, and so whoever waits for one waits for nothing that another rank does after that.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from sirtaki.errors import CommError

from .participants import Participant, Stage

if TYPE_CHECKING:
    from .hooked_parameters import HookedParameters
    from .job import Job


NEVER_CAME = (
    "the update of this parameter was put off by overlap_forward, and its ranks parted before its gradient had come; "
    "call optimizer.finish() or hvd.shutdown() first"
)


class Keeper(Protocol):
    """Keeps everybody from what is not there yet: gradients that are under way, parameters that wait for them."""

    def keep(self) -> bool:
        """All gradients have left in the backward pass; True if it keeps them, so that nobody waits there."""
        ...

    def settle(self) -> None:
        """Blocks until nothing is put off any more."""
        ...

    def close(self) -> None:
        """Nothing will be put off any more; not collective."""
        ...


class Reducer(Participant, Protocol):
    """Whose iterations end; see `GradientReducer`."""

    @property
    def hooked(self) -> HookedParameters | None:
        """See there."""
        ...

    @property
    def shared(self) -> bool:
        """See there."""
        ...


class LateEnd:
    """Of the iterations of one reducer.

    Attributes:
        put_off: the current iteration has been stepped, and has not ended.
    """

    def __init__(self, job: Job, reducer: Reducer) -> None:
        """Nothing is put off before there is a keeper."""
        self._job, self._reducer = job, weakref.ref(reducer)
        self._keeper: weakref.ref[Keeper] | None = None
        self.put_off = False

    def use(self, keeper: Keeper) -> None:
        """From now on iterations may be put off, and it is `keeper` who keeps them; a weak reference."""
        self._keeper = weakref.ref(keeper)

    def _parameters(self) -> HookedParameters:
        reducer = self._reducer()
        assert reducer is not None  # whose part this is
        assert reducer.hooked is not None
        return reducer.hooked

    @property
    def possible(self) -> bool:
        """The current iteration may be put off."""
        reducer = self._reducer()
        if reducer is None or reducer.hooked is None or reducer.hooked.empty:
            return False
        return not reducer.shared and reducer.failed_in is None and reducer.hooked.can_put_off

    def kept(self) -> bool:
        """All gradients have left in the backward pass: True if nobody need wait there."""
        keeper = None if self._keeper is None else self._keeper()
        return keeper is not None and not self.put_off and self.possible and keeper.keep()

    def settle(self) -> None:
        """Blocks until nothing is put off any more; not collective."""
        keeper = None if self._keeper is None else self._keeper()
        if keeper is not None:
            keeper.settle()

    def close(self) -> None:
        """The reducer closes; nothing is put off. Not collective."""
        keeper = None if self._keeper is None else self._keeper()
        if keeper is not None:
            keeper.close()

    def begin(self) -> None:
        """If it is `possible`: this rank takes part in the end of the iteration and waits for nobody."""
        reducer = self._reducer()
        assert reducer is not None
        self.put_off = True
        self._job.joining.begins(reducer, Stage.FINISH)
        self._job.participants.note_finished(reducer)
        self._parameters().put_off()

    def wait_for(self, number: int) -> list[int]:
        """Blocks until the gradient of a parameter is reduced.

        Returns:
            All parameters that are with it, by number among those that want a gradient; none if this rank is needed
            elsewhere, before `step()`.

        Raises:
            CommError: the reduction failed, or the job did.
        """
        reducer = self._reducer()
        if reducer is None or reducer.hooked is None:
            raise CommError(NEVER_CAME)
        interrupted = None if self.put_off else partial(self._job.blocked.need, reducer)
        with reducer.progress.waits(Stage.FINISH if self.put_off else Stage.REDUCE):
            return self._parameters().reductions.wait_for(number, interrupted)

    def reduce(self) -> None:
        """Before `step()`: waits for all gradients, unless this rank is needed elsewhere, as `backward()` does."""
        reducer = self._reducer()
        if reducer is not None and reducer.hooked is not None:
            with reducer.progress.waits(Stage.REDUCE):
                reducer.hooked.reductions.reduce(partial(self._job.blocked.need, reducer))

    def hand_out(self, numbers: Sequence[int]) -> None:
        """What `wait_for` has returned: each `.grad` holds the reduced gradient from now on."""
        self._parameters().reductions.hand_out_some(numbers)

    def ends(self) -> bool:
        """The iteration ends; True if that was put off."""
        was, self.put_off = self.put_off, False
        return was
