"""What runs in the process of each rank that may come and go."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sirtaki.engine.membership import AgentClient, Proof, register
from sirtaki.run.elastic.agent import Place, reach_driver

from . import ray_logger
from .telling import leave_job


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolment:
    """What a rank is told.

    Attributes:
        worker: names it in the job.
        host: of it, as the job calls it.
        places: where the driver listens.
        proof: with which it proves itself there.
        interface: network interface that joins the hosts; None = any.
    """

    worker: int
    host: str
    places: tuple[Place, ...]
    proof: Proof
    interface: str | None = None


@dataclass(frozen=True, slots=True)
class Dismissal:
    """What a rank returns that is not wanted any more."""


class ElasticRank:
    """An actor, which Ray names in what it shows of its output; used for one call."""

    def train(self, enrolment: Enrolment, fn: Callable[[], Any], log: Any = None) -> Any:
        """Calls the function as a member of the job.

        Args:
            enrolment: of this rank.
            fn: of the user.
            log: see `ray_logger.configure`.

        Returns:
            What it returns, or `Dismissal`.
        """
        from sirtaki.engine import process_end

        sock = reach_driver(enrolment.places, proof=enrolment.proof, number=enrolment.worker)
        register(lambda: AgentClient(sock, interface=enrolment.interface))
        os.environ |= {"HOROVOD_ELASTIC": "1", "HOROVOD_HOSTNAME": enrolment.host}
        ray_logger.configure(log)
        try:
            result = fn()
        except SystemExit as err:
            if err.code:
                leave_job(f"a rank ended with exit code {err.code}")
                raise RuntimeError(f"the function ended with exit code {err.code}") from err
            return Dismissal()
        except BaseException as err:
            leave_job(f"a rank raised {type(err).__name__}: {err}")
            raise
        process_end.finish()
        return result
