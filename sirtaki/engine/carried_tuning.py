"""What the tuner has found out in one generation of a job, for the next one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Of the gradients of one set of parameters.

    Attributes:
        knobs: what ran last, or was best until then.
        settled: the warm-up had come to its end.
        place: of each rank the first one on its host; what was measured in another place does not compare.
        trials: of a warm-up that was cut short; on the rank that decided only.
    """

    knobs: Knobs
    settled: bool
    place: tuple[int, ...]
    trials: tuple[Trial, ...] = ()


class CarriedTuning:
    """By parameters; on every rank, since any of them may be the one that decides in the next generation.

    Attributes:
        going_on: another generation follows, so that what an unfinished warm-up has found belongs here.
    """

    def __init__(self) -> None:
        """Nothing is known."""
        self.going_on = False
        self._known: dict[str, Carried] = {}

    def keep(self, key: str, carried: Carried) -> None:
        """What holds from now on."""
        self._known[key] = carried

    def of(self, key: str) -> Carried | None:
        """What is known of these parameters."""
        return self._known.get(key)


class Decides(Protocol):
    """The coordinator, as far as this module knows it."""

    def hand_over(self) -> tuple[Knobs, tuple[Trial, ...]] | None:
        """The best until now and all trials of an unfinished warm-up, which ends here; None if there are none."""
        ...


class Carrying:
    """What one user of communication brings from the generation before, and leaves to the next one.

    Attributes:
        kept: by the last warm-up or re-tune of this generation; None = there was none.
    """

    def __init__(
        self, carried: CarriedTuning | None, names: Sequence[str], params: Sequence[torch.Tensor], place: Sequence[int]
    ) -> None:
        """Keeps nothing of the parameters.

        Args:
            carried: of this process; None where ranks stay, and nothing is brought nor left.
            names: of the parameters.
            params: whose gradients are reduced.
            place: see `Carried`.
        """
        self._carried, self.place = carried, tuple(place)
        self.kept: Knobs | None = None
        self._key = "" if carried is None else key_of(names, params)

    @property
    def ranks_stay(self) -> bool:
        """There is one generation only."""
        return self._carried is None

    @property
    def before(self) -> Carried | None:
        """What the generation before has left; None = nothing."""
        return None if self._carried is None else self._carried.of(self._key)

    @property
    def going_on(self) -> bool:
        """Another generation follows."""
        return self._carried is not None and self._carried.going_on

    def leave(self, running: Knobs | None, decides: Decides | None) -> None:
        """For the next generation: what was kept, or how far an unfinished warm-up has come.

        Args:
            running: in that; None = it has not begun, and what was known before stays.
            decides: on one rank.
        """
        if self._carried is None or (running is None and self.kept is None):
            return
        found = None if self.kept is not None or decides is None else decides.hand_over()
        knobs, trials = found or (self.kept or running, ())
        assert knobs is not None
        settled = self.kept is not None
        self._carried.keep(self._key, Carried(knobs=knobs, settled=settled, place=self.place, trials=trials))


NOTHING_BROUGHT = Carrying(None, (), (), ())


def key_of(names: Sequence[str], params: Sequence[torch.Tensor]) -> str:
    """The same for the same parameters, in every generation and on every rank."""
    said = ";".join(f"{name}{tuple(param.shape)}{param.dtype}" for name, param in zip(names, params, strict=True))
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()
