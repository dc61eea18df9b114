"""The way of this process through a job whose ranks come and go: one generation after the other."""

from __future__ import annotations

import logging
import time

from sirtaki.comm.control.communicator import Communicator
from sirtaki.comm.control.mesh.rendezvous import meet
from sirtaki.errors import CommError, LaunchError
from sirtaki.settings import Settings

from . import process_end
from .agent_client import open_agent
from .carried_tuning import CarriedTuning
from .membership import Change, Dismissed, Generation, Membership, open_membership
from .surviving_membership import open_survivors

logger = logging.getLogger(__name__)


class Generations:
    """Which generation this process is in, and how it comes into the next one.

    Attributes:
        current: the one that it is in, or was in last; None = it has been in none.
        has_state: this process holds the job's state.
        tuning: what the generations before have found out.
    """

    def __init__(self, membership: Membership) -> None:
        """Keeps the membership, which is asked by the main thread only."""
        self._membership = membership
        self.current: Generation | None = None
        self.has_state = self._dismissed = False
        self.tuning = CarriedTuning()

    @property
    def number(self) -> int:
        """Of the current generation; 0 = none."""
        return 0 if self.current is None else self.current.number

    @property
    def in_step(self) -> bool:
        """All members of the current generation are at one place of the script: all at its start, or none of them."""
        return self.current is not None and len({member.is_new for member in self.current.members}) == 1

    def change(self) -> Change:
        """What has changed since the current generation began; never blocks."""
        return self._membership.change()

    def finished(self) -> None:
        """The script has come to its end in this process, which has not been dismissed."""
        if not self._dismissed:
            self._membership.finished()

    def meet_next(self, settings: Settings) -> Communicator:
        """Collective over the members of the next generation: blocks until they have met.

        A generation that loses a member before all have met is left for the one after it.

        Raises:
            Dismissed: this process is not wanted any more.
            LaunchError: there is no next generation.
        """
        while True:
            begin_s = time.monotonic()
            try:
                self.current = self._membership.join(
                    after=self.number, has_state=self.has_state, timeout_s=settings.elastic_timeout_s
                )
            except Dismissed:
                self._dismissed = True
                raise
            except CommError as err:
                raise LaunchError(f"there is no generation after {self.number} for this rank: {err}") from err
            joined_s = time.monotonic()
            try:
                ranks = meet(
                    self.current.meeting,
                    interface=settings.gloo_interface,
                    secret=settings.secret,
                    timeout_s=settings.start_timeout_s,
                    heartbeat_s=settings.heartbeat_s,
                )
            except CommError as err:
                logger.info("generation %d has ended before all had met: %s", self.number, err)
                continue
            logger.info(
                "generation %d: %d ranks; joined in %.0f ms, met in %.0f ms",
                self.number,
                ranks.size,
                1000 * (joined_s - begin_s),
                1000 * (time.monotonic() - joined_s),
            )
            return ranks


_of_process: Generations | None = None


def of_this_process(settings: Settings) -> Generations | None:
    """Where ranks come and go; None where they stay.

    Collective where mpiexec has started ranks that are to outlive others.

    Raises:
        ConfigError: an agent has started this process's parent, not this process.
        CommError: there is no usable MPI library, though mpiexec has started this process.
    """
    global _of_process
    if _of_process is None:
        membership = open_membership() or open_agent(interface=settings.gloo_interface) or open_survivors(settings)
        if membership is None:
            return None
        _of_process = Generations(membership)
        process_end.at_success(_of_process.finished)
    return _of_process
