"""Ranks that are Ray actors: their resources, placement, environment variables, and code.

If the user's function raises an error, the actor's process continues to run. The error must therefore be reported to
all ranks. (In other jobs, a failed script ends its process, and other ranks detect this.)
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sirtaki.engine.generations import AgentClient, register
from sirtaki.engine.launchers import HOROVOD_NAMES, TORCH_NAMES
from sirtaki.errors import require
from sirtaki.machine import LOOPBACK, host_identity, own_addresses, serve_store
from sirtaki.run.as_horovod import SHIM, is_installed
from sirtaki.run.elastic.job_members import COOLDOWN_S, Policy
from sirtaki.run.launch import KEEP_FREED_MEMORY, rank_environ

from . import ray_logger


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """Settings of `RayExecutor`.

    Attributes:
        timeout_s: maximum seconds that ranks wait for each other in `init()`, and that an elastic job waits until a
            rank's process has started.
        placement_group_timeout_s: maximum seconds to wait until Ray has reserved resources.
        interfaces: comma-separated network interfaces that connect the hosts. "" for any.
    """

    timeout_s: float = 120.0
    placement_group_timeout_s: float = 100.0
    interfaces: str = ""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "placement_group_timeout_s"):
            require(getattr(self, name) > 0, name, "a positive number of seconds", getattr(self, name))


def interface_names(nics: str | Iterable[str] | None) -> str:
    """Return interface names, given as text (`"eth0,eth1"`) or as a collection, as one comma-separated text."""
    if nics is None:
        return ""
    return nics if isinstance(nics, str) else ",".join(sorted(nics))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Resources that Ray must reserve for one rank.

    Attributes:
        cpus, gpus: number of CPUs and of GPUs of a rank. Fractions are allowed.
    """

    cpus: float = 1
    gpus: float = 0

    def __post_init__(self) -> None:
        valid = self.cpus >= 0 and self.gpus >= 0 and (self.cpus or self.gpus)
        found = f"{self.cpus:g} CPUs, {self.gpus:g} GPUs"
        require(valid, "cpus_per_worker and gpus_per_worker", "a positive number of CPUs or GPUs", found)

    def bundle(self, ranks: int = 1) -> dict[str, float]:
        """Return the resources that `ranks` ranks need together, in the format of a Ray bundle."""
        wanted = {"CPU": self.cpus * ranks, "GPU": self.gpus * ranks}
        return {name: amount for name, amount in wanted.items() if amount}

    def fitting(self, resources: Mapping[str, float]) -> int:
        """Return how many ranks fit on a node with these resources."""
        return min(int(resources.get(name, 0) // amount) for name, amount in self.bundle().items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Number and placement of ranks.

    Attributes:
        ranks: number of ranks of the job. If `hosts` is set: number of ranks on each host.
        hosts: number of different hosts. None for as few hosts as possible.
        demand: number of CPUs and GPUs of each rank.
        uses_current_group: place the ranks in the placement group of this process, if it has one.
    """

    ranks: int
    hosts: int | None = None
    demand: Demand = Demand()
    uses_current_group: bool = True

    def __post_init__(self) -> None:
        require(self.ranks >= 1, "num_workers or num_workers_per_host", "at least 1", self.ranks)
        require(self.hosts is None or self.hosts >= 1, "num_hosts", "at least 1", self.hosts)

    @property
    def size(self) -> int:
        """Return the number of ranks of the job."""
        return self.ranks * (self.hosts or 1)

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Return the resource bundles that Ray must reserve: one per host, or one per rank."""
        if self.hosts is None:
            return [self.demand.bundle() for _ in range(self.ranks)]
        return [self.demand.bundle(self.ranks) for _ in range(self.hosts)]


def elastic_policy(
    start: int | None,
    least: int,
    most: int | None,
    *,
    reset_limit: int | None = None,
    cooldown_s: tuple[float, float] | None = None,
    timeout_s: float = 600.0,
) -> Policy:
    """Return the membership policy of an elastic job: its numbers of ranks, and limits of restarts.

    Args:
        start: initial number of ranks. None for `least`.
        least: minimum number of ranks.
        most: maximum number of ranks. None for no limit.
        reset_limit: maximum number of elastic restarts. None for no limit.
        cooldown_s: shortest and longest seconds for which a host is excluded after repeated failures.
        timeout_s: maximum seconds to wait for enough ranks.

    Raises:
        ConfigError: numbers contradict each other.
    """
    start = least if start is None else start
    rule = "1 <= min_workers <= num_workers <= max_workers"
    found = f"min_workers={least}, num_workers={start}, max_workers={most}"
    require(1 <= least <= start <= (most or start), "the number of ranks", rule, found)
    valid = cooldown_s is None or 0 <= cooldown_s[0] <= cooldown_s[1]
    require(valid, "cooldown_range", "seconds (shortest, longest)", cooldown_s)
    return Policy(
        start_ranks=start,
        min_ranks=least,
        max_ranks=most,
        timeout_s=timeout_s,
        reset_limit=reset_limit,
        cooldown_s=COOLDOWN_S if cooldown_s is None else cooldown_s,
    )


_CARRIED = ("SIRTAKI_", "HOROVOD_", "NCCL_", "GLOO_")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorPlace:
    """Where Ray has placed an actor.

    Attributes:
        host: id of the host. It is equal for actors that share memory and the loopback interface.
        address: network address of the actor's Ray node.
        gpus: ids of the GPUs that Ray has assigned to the actor.
    """

    host: tuple[str, ...]
    address: str
    gpus: tuple[str, ...] = ()


def in_rank_order(places: Sequence[ActorPlace]) -> list[int]:
    """Return the indices of `places` in rank order: ranks of a host are adjacent, hosts are in order of appearance."""
    first: dict[tuple[str, ...], int] = {}
    for number, place in enumerate(places):
        first.setdefault(place.host, number)
    # `sorted` is stable, so that the order within a host is kept.
    return sorted(range(len(places)), key=lambda number: first[places[number].host])


def place_variables(places: Sequence[ActorPlace]) -> list[dict[str, str]]:
    """Return each rank's environment variables: those that horovodrun and torchrun set, and the visible GPUs.

    Ranks see all GPUs of the job on their host, so that `cuda.set_device(hvd.local_rank())` works.

    Args:
        places: placements of the actors, in rank order.
    """
    ranks_of = Counter(place.host for place in places)
    gpus_of: dict[tuple[str, ...], list[str]] = {}
    for place in places:
        there = gpus_of.setdefault(place.host, [])
        there += [gpu for gpu in place.gpus if gpu not in there]
    hosts = list(ranks_of)
    seen: Counter[tuple[str, ...]] = Counter()
    found = []
    for rank, place in enumerate(places):
        local_rank = seen[place.host]
        seen[place.host] += 1
        beside = [host for host in hosts if ranks_of[host] > local_rank]
        numbers = {"RANK": rank, "SIZE": len(places), "LOCAL_RANK": local_rank, "LOCAL_SIZE": ranks_of[place.host]}
        variables = {names[each]: str(numbers[each]) for names in (HOROVOD_NAMES, TORCH_NAMES) for each in numbers}
        variables["HOROVOD_CROSS_RANK"] = str(beside.index(place.host))
        variables["HOROVOD_CROSS_SIZE"] = str(len(beside))
        variables["HOROVOD_HOSTNAME"] = place.address
        if gpus_of[place.host]:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus_of[place.host])
        found.append(variables)
    return found


def actor_environ(
    environ: Mapping[str, str],
    added: Mapping[str, str],
    demand: Demand,
    settings: RaySettings,
) -> dict[str, str]:
    """Return the environment variables of an actor's process, in addition to Ray's.

    Args:
        environ: environment of this process. The result contains Sirtaki's and Horovod's settings from it.
        added: variables that the user has set for the ranks. They override `environ`.
        demand: number of CPUs and GPUs of a rank.
        settings: time limits and network interfaces.
    """
    interfaces = settings.interfaces
    own = {name: value for name, value in rank_environ(environ, {}).items() if name.startswith(_CARRIED)}
    own.pop("SIRTAKI_SECRET", None)  # Remove the secret: Ray's dashboard shows the environment.
    named = dict.fromkeys(("SIRTAKI_GLOO_IFACE", "NCCL_SOCKET_IFNAME"), interfaces) if interfaces else {}
    shim = os.pathsep.join([str(SHIM), *filter(None, [environ.get("PYTHONPATH")])])
    return {
        **({"PYTHONPATH": shim} if is_installed() else {}),
        **KEEP_FREED_MEMORY,
        "OMP_NUM_THREADS": str(max(1, int(demand.cpus))),
        "SIRTAKI_START_TIMEOUT_S": f"{settings.timeout_s:g}",
        **own,
        **named,
        **added,
        "SIRTAKI_CONTROL": "mesh",
    }


_T = TypeVar("_T")


def call_reporting_errors(fn: Callable[[], _T]) -> _T:
    """Call `fn`. If it raises an error, leave the job, so that all ranks fail with this error as the reason."""
    try:
        return fn()
    except BaseException as err:
        leave_job(f"a rank raised {type(err).__name__}: {err}")
        raise


def leave_job(reason: str) -> None:
    """Leave the job on this rank. Not collective. Does nothing without a job.

    Args:
        reason: reason to report to all ranks.
    """
    # Without sirtaki.torch, init() was not called. Importing it only to check would take seconds.
    if "sirtaki.torch" not in sys.modules:
        return
    from sirtaki.engine import job
    from sirtaki.torch.basics import detach_all

    job.leave(together=False, reason=reason)
    detach_all()


class Rank:
    """Actor of a rank. Ray prints the class name in front of the rank's output."""

    def __init__(self) -> None:
        self._store: Any = None  # On rank 0: TCPStore at which the ranks of the job meet.
        self._executable: Any = None  # The rank's object of the user's class.

    def place(self) -> ActorPlace:
        """Return where Ray has placed this actor."""
        import ray

        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return ActorPlace(
            host=host_identity(), address=ray.util.get_node_ip_address(), gpus=tuple(str(gpu) for gpu in gpus)
        )

    def prepare(self, variables: Mapping[str, str]) -> None:
        """Set environment variables. Call before any code of the user runs."""
        os.environ.update(variables)

    def open_store(self, *, one_host: bool, interfaces: str) -> tuple[str, int]:
        """Open the TCPStore at which the ranks of the job meet, at a free port. Return its host and port.

        Called on rank 0 only.
        """
        import ray

        addresses = own_addresses(interfaces) if interfaces else [ray.util.get_node_ip_address()]
        host = LOOPBACK if one_host else addresses[0]
        # `multi_tenant`, because `init()` opens the store at this port again, and perhaps the user's
        # `init_process_group()`, too.
        self._store = serve_store(host, timeout=datetime.timedelta(seconds=300), multi_tenant=True)
        return host, self._store.port

    def make_executable(self, make: Callable[[], Any]) -> None:
        """Create this rank's object by `make`. `execute` passes the object to the user's functions."""
        self._executable = call_reporting_errors(make)

    def execute(self, call: int, fn: Callable[[Any], Any], log: Any = None) -> Any:
        """Call the user's function with this rank's object, or with None if there is no object.

        Args:
            call: serial number of the call, equal on all ranks.
            fn: function of the user.
            log: Ray queue for values that are passed to `ray_logger.log`. None if nothing receives them.
        """
        ray_logger.configure(log)
        # Use a separate rendezvous for each call, so that a rank that missed a call can take part in the next.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(call)
        return call_reporting_errors(lambda: fn(self._executable))


@dataclass(frozen=True, slots=True)
class RankDismissed:
    """Result of `ElasticRank.train` on a rank that the elastic job does not need any more."""


class ElasticRank:
    """Actor of one rank of an elastic job. Ray prints the class name in front of the rank's output."""

    def train(
        self,
        reach: Callable[[], socket.socket],
        host: str,
        interface: str | None,
        fn: Callable[[], Any],
        log: Any = None,
    ) -> Any:
        """Connect to the executor, and call `fn` as a rank of the elastic job.

        Args:
            reach: function that opens an authenticated connection to the executor's process.
            host: name of this rank's host in the job.
            interface: network interface that connects the hosts. None for any.
            fn: function of the user.
            log: Ray queue for values that are passed to `ray_logger.log`. None if nothing receives them.

        Returns:
            The result of `fn`. `RankDismissed` if the job does not need this rank any more.
        """
        from sirtaki.engine import job

        sock = reach()
        register(lambda: AgentClient(sock, interface=interface))
        os.environ |= {"HOROVOD_ELASTIC": "1", "HOROVOD_HOSTNAME": host}
        ray_logger.configure(log)
        try:
            result = fn()
        except SystemExit as err:
            if err.code:
                leave_job(f"a rank ended with exit code {err.code}")
                raise RuntimeError(
                    f"the training function exited on this rank with code {err.code}, which counts as a failure"
                ) from err
            return RankDismissed()
        except BaseException as err:
            leave_job(f"a rank raised {type(err).__name__}: {err}")
            raise
        job.finish()
        return result
