"""Ranks as actors that come and go: the rules of `sirtakirun --min-np`, with Ray's nodes for hosts."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from sirtaki.errors import LaunchError
from sirtaki.run.elastic.agent_crew import new_endpoint
from sirtaki.run.elastic.driver import Driver
from sirtaki.run.elastic.job_members import HostPool, JobMembers, Policy

from .answers import cause_of
from .crew import RankStart, RayCrew
from .elastic_rank import Dismissal
from .places import actor_environ
from .ray_logger import heard_by
from .settings import Demand, RaySettings
from .slots import Slots

_LATER_S = 30.0
"""How much longer than this process a rank waits for others: this process can say who is missing."""


_NOTICE_S = 10.0
"""A wait that lasts so long is told."""


class _Sayings:
    """What the driver tells, as `ElasticOutput` does; what ranks write Ray shows."""

    def say(self, text: str) -> None:
        """A line for the user."""
        print(f"sirtaki: {text}", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Nothing more comes."""


class ElasticRanks:
    """Those of one executor, from its start to its shutdown; each call has its own."""

    def __init__(self, settings: RaySettings, policy: Policy, demand: Demand, variables: Mapping[str, str]) -> None:
        """Asks Ray for room.

        Args:
            settings: of the executor.
            policy: of each call.
            demand: of a rank.
            variables: of the environment, from the user.
        """
        self._settings, self._policy, self._demand = settings, policy, demand
        self._variables = {"HOROVOD_ELASTIC_TIMEOUT": f"{policy.timeout_s + _LATER_S:g}", **variables}
        self._slots = Slots(demand, least=policy.start_ranks, most=policy.max_ranks)
        self._crew: RayCrew | None = None
        self._members: JobMembers | None = None

    @property
    def actors(self) -> list[Any]:
        """Ray's handles of those that are members now, by rank; from any thread."""
        if self._crew is None or self._members is None:
            return []
        actors = self._crew.actors
        return [actors[worker] for worker in self._members.member_list.members if worker in actors]

    def call(self, fn: Callable[[], Any], listeners: Sequence[Callable[[Any], object]]) -> list[Any]:
        """Calls the function on each rank that is there or comes, until those that are members have returned.

        Returns:
            The results of the last members, by rank.

        Raises:
            LaunchError: too few ranks were left.
            Exception: what the function has raised on a rank, where none is left.
        """
        settings = self._settings
        environ = actor_environ(
            os.environ,
            self._variables,
            cpus=self._demand.cpus,
            timeout_s=settings.timeout_s,
            interfaces=settings.interfaces,
        )
        interface = settings.interfaces or None
        own = new_endpoint(interface)
        with heard_by(listeners) as log:
            start = RankStart(demand=self._demand, environ=environ, interface=interface, call=ray.put(fn), log=log)
            self._crew = crew = RayCrew(start, self._slots, own)
            self._members = members = JobMembers(self._policy, HostPool(self._policy, random.Random(time.time_ns())))
            exit_code = Driver(crew, members, _Sayings()).run(self._slots.ask(), self._asking(members))
        if exit_code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        if exit_code in (128 + signal.SIGTERM, 128 + signal.SIGHUP):  # no rank ends so: Ray kills
            raise SystemExit(exit_code)
        if exit_code:
            errors = crew.errors
            raise cause_of(errors) if errors else LaunchError("the job has failed; the lines above say why")
        found = [crew.results.get(worker, Dismissal()) for worker in members.member_list.members or crew.results]
        return [result for result in found if not isinstance(result, Dismissal)]

    def _asking(self, members: JobMembers) -> Callable[[], Mapping[str, int]]:
        """For discovery; tells once where a job does not begin since Ray has too little."""
        note_s = time.monotonic() + _NOTICE_S

        def ask() -> Mapping[str, int]:
            nonlocal note_s
            found, wanted = self._slots.ask(), self._policy.start_ranks
            if time.monotonic() > note_s:
                note_s = float("inf")
                if not members.member_list.generation and sum(found.values()) < wanted:
                    there = f"Ray has room for {sum(found.values())} of {wanted} ranks"
                    _Sayings().say(f"{there}; waiting up to {self._policy.timeout_s:g} s for more (elastic_timeout)")
            return found

        return ask

    def close(self) -> None:
        """Gives the room back; again is harmless."""
        self._slots.close()
