"""Horovod's `RayExecutor`: functions on ranks that are actors of Ray's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray

from sirtaki.errors import ConfigError, LaunchError
from sirtaki.run.elastic.job_members import Policy

from .elastic_ranks import ElasticRanks
from .fixed_ranks import FixedRanks
from .placement import Demand, RaySettings, Shape, elastic_policy, interface_names
from .ranks import Executable


class RayExecutor:
    """Starts ranks as actors, and calls functions on them. Its methods and their arguments have Horovod's names."""

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 120.0,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100.0,
        nics: str | Iterable[str] | None = None,
    ) -> RaySettings:
        """What the executor is given; no ssh is used, so two arguments have no effect.

        Args:
            timeout_s: how long ranks wait for each other in `init()`.
            ssh_identity_file: no effect.
            ssh_str: no effect.
            placement_group_timeout_s: how long to wait for Ray to find room.
            nics: names of the network interfaces that join the hosts; None = any.

        Raises:
            ConfigError: a time is not positive.
        """
        del ssh_identity_file, ssh_str
        return RaySettings(
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
            interfaces=interface_names(nics),
        )

    def __init__(
        self,
        settings: RaySettings | None = None,
        num_workers: int | None = None,
        *,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: tuple[float, float] | None = None,
        elastic_timeout: float = 600.0,
        override_discovery: bool = True,
    ) -> None:
        """Starts nothing.

        Args:
            settings: of `create_settings`; None = its defaults.
            num_workers: how many ranks, wherever Ray has room, on as few hosts as it can. Where ranks come and go:
                how many to begin with; None = `min_workers`.
            num_hosts: instead, on so many hosts.
            num_workers_per_host: ranks on each of them.
            cpus_per_worker: of a rank; also its `OMP_NUM_THREADS`, unless that is set.
            use_gpu: each rank has one, or what `gpus_per_worker` says.
            gpus_per_worker: of a rank.
            use_current_placement_group: if this process runs in a placement group, the ranks do, too; no effect where
                ranks come and go.
            min_workers: ranks come and go, and at least so many go on; None = they stay.
            max_workers: at most so many; None = as many as Ray's nodes hold.
            reset_limit: how many generations may follow the first one; None = any number.
            cooldown_range: shortest and longest time in seconds that a host is left out where ranks keep failing.
            elastic_timeout: how long to wait for enough ranks, in seconds.
            override_discovery: no effect: hosts are always Ray's nodes.

        Raises:
            ConfigError: arguments that contradict each other.
        """
        del override_discovery
        if gpus_per_worker and not use_gpu:
            raise ConfigError(f"gpus_per_worker={gpus_per_worker} without use_gpu=True")
        self.settings = settings or RaySettings()
        demand = Demand(cpus=cpus_per_worker, gpus=(gpus_per_worker or 1) if use_gpu else 0)
        self._demand = demand
        self._shape: Shape | None = None
        self._policy: Policy | None = None
        self._executable: Executable | None = None
        self._ranks: FixedRanks | ElasticRanks | None = None
        if min_workers is not None:
            if num_hosts is not None:
                raise ConfigError("num_hosts is for ranks that stay; leave out min_workers")
            self._policy = elastic_policy(
                num_workers,
                min_workers,
                max_workers,
                reset_limit=reset_limit,
                cooldown_s=cooldown_range,
                timeout_s=elastic_timeout,
            )
        elif max_workers is not None or reset_limit is not None or cooldown_range is not None:
            raise ConfigError(
                "max_workers, reset_limit and cooldown_range are for ranks that come and go: min_workers="
            )
        elif (num_workers is None) == (num_hosts is None):
            raise ConfigError("give either num_workers or num_hosts (with num_workers_per_host)")
        else:
            self._shape = Shape(
                ranks=num_workers_per_host if num_workers is None else num_workers,
                hosts=num_hosts,
                demand=demand,
                uses_current_group=use_current_placement_group,
            )

    @property
    def workers(self) -> list[Any]:
        """Ray's handles of the actors that are ranks now, by rank."""
        return self._started.actors

    @property
    def _started(self) -> FixedRanks | ElasticRanks:
        if self._ranks is None:
            raise LaunchError("this executor has no ranks; call start() first")
        return self._ranks

    def _staying(self, what: str) -> FixedRanks:
        started = self._started
        if isinstance(started, ElasticRanks):
            raise ConfigError(f"{what} is for ranks that stay; where they come and go use run() or execute()")
        return started

    def start(
        self,
        executable_cls: type[Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Blocks until the ranks are there; Ray is started on this machine if it has not been.

        Where ranks come and go only room is asked for: each call has ranks of its own.

        Args:
            executable_cls: of which each rank makes an object, which `execute` gives to its function.
            executable_args: for it.
            executable_kwargs: for it.
            extra_env_vars: for the ranks; they begin with them.

        Raises:
            LaunchError: Ray has no room, or the ranks are there already.
            Exception: what the class has raised on a rank.
        """
        if self._ranks is not None:
            raise LaunchError("the ranks are there already; call shutdown() first")
        variables = extra_env_vars or {}
        self._executable = None
        if executable_cls is not None:
            self._executable = Executable(executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {}))
        if not ray.is_initialized():
            ray.init()
        if self._policy is not None:
            self._ranks = ElasticRanks(self.settings, self._policy, self._demand, variables)
            return
        assert self._shape is not None
        self._ranks = FixedRanks(self.settings, self._shape, variables)
        if self._executable is not None:
            try:
                self._ranks.make_executables(self._executable)
            except BaseException:
                self.shutdown()
                raise

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], object]] | None = None
    ) -> list[Any]:
        """Calls `fn(executable)` on each rank, and waits.

        Args:
            fn: of the rank's object; of None, if `start` was given no class.
            callbacks: called here with what rank 0 gives to `ray_logger.log`.

        Returns:
            The results, by rank; where ranks come and go, of those that were left.

        Raises:
            Exception: what the function has raised on a rank, of its own class.
            LaunchError: where ranks come and go, too few were left.
        """
        started = self._started
        if isinstance(started, ElasticRanks):
            executable = self._executable
            return started.call(lambda: fn(None if executable is None else executable.make()), callbacks or ())
        return started.execute(fn, callbacks or ())

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], object]] | None = None,
    ) -> list[Any]:
        """As `execute`, of `fn(*args, **kwargs)`."""
        given, named = tuple(args or ()), dict(kwargs or {})
        return self.execute(lambda _: fn(*given, **named), callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """As `run`, but does not wait.

        Returns:
            References for `ray.get`, by rank.
        """
        return self._staying("run_remote()").run_remote(fn, args or (), kwargs or {})

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Calls `fn(executable)` on rank 0 alone, so it must not communicate; its result."""
        return self._staying("execute_single()").execute_single(fn)

    def shutdown(self) -> None:
        """Ends the ranks, whatever they do; again is harmless. `start` may follow."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
