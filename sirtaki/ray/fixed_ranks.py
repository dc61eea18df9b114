"""Ranks as actors whose number stays: placed, put in order, made known to each other, called, ended."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sirtaki.errors import CommError, LaunchError

from .placement import RaySettings, Shape, actor_environ, in_rank_order, place_variables
from .ranks import Executable, Rank
from .ray_logger import heard_by

GRACE_S = 10.0
"""How long the others may take to notice that a rank has failed."""


class Unanswered(Exception):
    """Ranks have failed.

    Attributes:
        cause: as Ray raises it.
        stuck: whether some of the others go on nevertheless.
    """

    def __init__(self, cause: BaseException, *, stuck: bool) -> None:
        super().__init__(str(cause))
        self.cause, self.stuck = cause, stuck


def wait_for_all(references: Sequence[Any], *, meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
    """Blocks until all have answered, or soon after one has failed.

    Args:
        references: of results, by rank.
        meanwhile: called now and then.

    Returns:
        The results, by rank.

    Raises:
        Unanswered: a rank has failed.
    """
    pending, failed_s = list(references), float("inf")
    found: dict[Any, Any] = {}
    errors: list[BaseException] = []
    while pending and time.monotonic() < failed_s + GRACE_S:
        done, pending = ray.wait(pending, timeout=0.2)
        for reference in done:
            try:
                found[reference] = ray.get(reference)
            except Exception as err:  # as many kinds as users have, and Ray's own
                errors.append(err)
                failed_s = min(failed_s, time.monotonic())
        meanwhile()
    if errors:
        raise Unanswered(cause_of(errors), stuck=bool(pending))
    return [found[reference] for reference in references]


def cause_of(errors: Sequence[BaseException]) -> BaseException:
    """That which says more than that another rank has failed; of several, the first."""
    return next((err for err in errors if not isinstance(err, CommError)), errors[0])


class FixedRanks:
    """Those of one executor, from its start to its shutdown."""

    def __init__(self, settings: RaySettings, shape: Shape, variables: Mapping[str, str]) -> None:
        """Blocks until all are there.

        Args:
            settings: of the executor.
            shape: how many and where.
            variables: of the environment, from the user.

        Raises:
            LaunchError: Ray has no room for them.
        """
        self._calls, self._lost = itertools.count(1), ""
        self._group, self._owns_group = _room(settings, shape)
        self.actors: list[Any] = []  # Any: Ray's handles, by rank
        try:
            self.actors = self._start(settings, shape, variables)
        except BaseException:
            self.close()
            raise

    def _start(self, settings: RaySettings, shape: Shape, variables: Mapping[str, str]) -> list[Any]:
        environ = actor_environ(
            os.environ,
            variables,
            cpus=shape.demand.cpus,
            timeout_s=settings.timeout_s,
            interfaces=settings.interfaces,
        )
        kind = ray.remote(Rank)
        bundles = (
            range(shape.size) if shape.hosts is None else [n for n in range(shape.hosts) for _ in range(shape.ranks)]
        )
        started = [
            kind.options(
                num_cpus=shape.demand.cpus,
                num_gpus=shape.demand.gpus,
                runtime_env={"env_vars": environ},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=bundle if self._owns_group else -1
                ),
            ).remote()
            for bundle in bundles
        ]
        self.actors = started
        places = self._wait([actor.place.remote() for actor in started])
        order = in_rank_order(places)
        actors, places = [started[number] for number in order], [places[number] for number in order]
        one_host = len({place.host for place in places}) == 1
        host, port = ray.get(actors[0].open_store.remote(one_host=one_host, interfaces=settings.interfaces))
        meeting = {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "SIRTAKI_SECRET": variables.get("SIRTAKI_SECRET")
            or os.environ.get("SIRTAKI_SECRET")
            or secrets.token_hex(32),
        }
        told = place_variables(places)
        ray.get([actor.prepare.remote({**own, **meeting}) for actor, own in zip(actors, told, strict=True)])
        return actors

    def make_executables(self, executable: Executable) -> None:
        """Makes one on each rank; collective where the class's `__init__` is."""
        self._wait([actor.make_executable.remote(executable) for actor in self.actors])

    def execute(self, fn: Callable[[Any], Any], listeners: Sequence[Callable[[Any], object]]) -> list[Any]:
        """Calls `fn(executable)` on each rank.

        Args:
            fn: of the user.
            listeners: called here with what rank 0 gives to `ray_logger.log`.

        Returns:
            The results, by rank.

        Raises:
            Exception: what the function has raised on a rank; of several, the one that the others failed of.
        """
        self._check()
        call = next(self._calls)
        sent = ray.put(fn)
        with heard_by(listeners) as log:
            references = [actor.execute.remote(call, sent, log.queue) for actor in self.actors]
            return self._wait(references, log.deliver)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Calls `fn(executable)` on rank 0; it must not communicate."""
        self._check()
        return self._wait([self.actors[0].execute.remote(next(self._calls), fn)])[0]

    def run_remote(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Calls `fn(*args, **kwargs)` on each rank, and returns Ray's references to the results at once."""
        self._check()
        call = next(self._calls)
        sent = ray.put((fn, tuple(args), dict(kwargs)))
        return [actor.run.remote(call, sent) for actor in self.actors]

    def close(self) -> None:
        """Ends all actors; again is harmless."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
        if self._owns_group:
            ray.util.remove_placement_group(self._group)
            self._owns_group = False

    def _check(self) -> None:
        if self._lost or not self.actors:
            raise LaunchError(
                f"the ranks have been ended{f' after a failure ({self._lost})' if self._lost else ''}; call shutdown() "
                "and start()"
            )

    def _wait(self, references: Sequence[Any], meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
        try:
            return wait_for_all(references, meanwhile=meanwhile)
        except Unanswered as err:
            cause = err.cause
            if err.stuck or isinstance(cause, ray.exceptions.RayActorError):
                self._lost = (str(cause).strip().splitlines() or [type(cause).__name__])[-1]
                self.close()
        except BaseException:  # Ctrl-C: what runs on the ranks is not waited for
            self._lost = "it was interrupted"
            self.close()
            raise
        raise cause


def _room(settings: RaySettings, shape: Shape) -> tuple[Any, bool]:
    """A placement group that has room, and whether it is this executor's own."""
    current = ray.util.get_current_placement_group() if shape.uses_current_group else None
    if current is not None:
        return current, False
    strategy = "PACK" if shape.hosts is None else "STRICT_SPREAD"
    group = ray.util.placement_group(shape.bundles, strategy=strategy)
    if not group.wait(settings.placement_group_timeout_s):
        ray.util.remove_placement_group(group)
        raise LaunchError(
            f"Ray has no room for {' + '.join(map(str, shape.bundles[:4]))}{' + …' if len(shape.bundles) > 4 else ''} "
            f"({strategy}) within {settings.placement_group_timeout_s:g} s; it has {ray.available_resources()} free of "
            f"{ray.cluster_resources()}; ask for less, or for more time with placement_group_timeout_s"
        )
    return group, True
