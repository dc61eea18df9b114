"""A job as others see it: watchers in this process, Prometheus on a port, `sirtaki top` through a socket."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

from sirtaki import watch
from sirtaki.settings import Settings
from sirtaki.watch import watchers
from sirtaki.watch.presence import Presence
from sirtaki.watch.totals import Totals

from .participants import Participants

if TYPE_CHECKING:
    from sirtaki.watch.prometheus import MetricsServer

logger = logging.getLogger(__name__)


class Observable(Protocol):
    """A job, as far as this module knows it."""

    settings: Settings
    job: str
    participants: Participants

    @property
    def rank(self) -> int:
        """Of this process."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...


class Observed:
    """Begins to be seen when it is made. Nothing that goes wrong here reaches training."""

    def __init__(self, job: Observable, *, local_rank: int, generation: int) -> None:
        self._job, self._generation, self._began_s = job, generation, time.time()
        self._totals: Totals | None = None
        self._server: MetricsServer | None = None
        self._presence: Presence | None = None
        settings = job.settings
        watchers.begin(watch.GenerationBegun(number=generation, rank=job.rank, size=job.size))
        if settings.metrics_port is not None:
            self._server = self._serve(settings.metrics_host, settings.metrics_port + local_rank)
        if local_rank == 0:
            try:
                self._presence = Presence(self._describe)
            except OSError as err:
                logger.debug("`sirtaki top` will not see this job: %s", err)

    def _serve(self, host: str, port: int) -> MetricsServer | None:
        from sirtaki.watch.prometheus import MetricsServer  # an HTTP server, which few jobs want

        try:
            return MetricsServer(self._count(), host=host, port=port, rank=self._job.rank, size=self._job.size)
        except (OSError, OverflowError) as err:
            logger.warning("metrics cannot be had at %s:%d: %s", host, port, err)
            return None

    def _count(self) -> Totals:
        """From now on iterations are added up."""
        if self._totals is None:
            self._totals = Totals()
            watchers.add(self._totals)
        return self._totals

    def _describe(self) -> dict[str, Any]:
        """What `sirtaki top` shows. Who asks for the first time has iterations added up from then on."""
        totals, job = self._count(), self._job
        running = [there.running for there in job.participants]
        known = [there for there in running if there is not None]
        gain = totals.gain
        return {
            "job": job.job,
            "pid": os.getpid(),
            "script": os.path.basename(sys.argv[0]) if sys.argv else "",
            "rank": job.rank,
            "ranks": job.size,
            "generation": self._generation,
            "began_s": self._began_s,
            "iteration": max((there.iteration for there in known), default=0),
            "tuning": any(there.tuning for there in known),
            "setting": "; ".join(dict.fromkeys(there.setting for there in known)),
            "trials": totals.trials,
            "gain": gain if gain == gain else None,
            **totals.now(),
        }

    def close(self, *, for_good: bool) -> None:
        """Nobody sees it any more; `for_good`: the job has ended, and not only a generation of it."""
        if self._presence is not None:
            self._presence.close()
        if self._server is not None:
            self._server.close()
        if self._totals is not None:
            watchers.remove(self._totals)
        watchers.end(for_good=for_good)
