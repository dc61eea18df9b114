"""Ranks that are Ray's actors: what they are to have, where Ray puts them, what they find there, and what runs in them.

An actor's process goes on when the user's function fails in it, so the other ranks must be told; a script's process
ends then, which they notice by themselves.
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
from sirtaki.errors import ConfigError
from sirtaki.machine import LOOPBACK, host_identity, own_addresses, serve_store
from sirtaki.run.as_horovod import SHIM, is_installed
from sirtaki.run.elastic.job_members import COOLDOWN_S, Policy
from sirtaki.run.launch import KEEP_FREED_MEMORY, rank_environ

from . import ray_logger


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """For `RayExecutor`.

    Attributes:
        timeout_s: how long ranks wait for each other in `init()`, and an elastic job for a rank's process.
        placement_group_timeout_s: how long to wait for Ray to find room.
        interfaces: network interfaces that join the hosts, with commas; "" = any.
    """

    timeout_s: float = 120.0
    placement_group_timeout_s: float = 100.0
    interfaces: str = ""

    def __post_init__(self) -> None:
        if min(self.timeout_s, self.placement_group_timeout_s) <= 0:
            raise ConfigError(
                f"timeout_s={self.timeout_s:g}, placement_group_timeout_s={self.placement_group_timeout_s:g}: "
                "both must be positive"
            )


def interface_names(nics: str | Iterable[str] | None) -> str:
    """`"eth0"`, `"eth0,eth1"` or any collection of names, in one word."""
    if nics is None:
        return ""
    return nics if isinstance(nics, str) else ",".join(sorted(nics))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a rank is to have.

    Attributes:
        cpus, gpus: of a rank; fractions are allowed.
    """

    cpus: float = 1
    gpus: float = 0

    def __post_init__(self) -> None:
        if self.cpus < 0 or self.gpus < 0 or not (self.cpus or self.gpus):
            raise ConfigError(f"a rank cannot have {self.cpus:g} CPUs and {self.gpus:g} GPUs")

    def bundle(self, ranks: int = 1) -> dict[str, float]:
        """What Ray reserves for so many."""
        wanted = {"CPU": self.cpus * ranks, "GPU": self.gpus * ranks}
        return {name: amount for name, amount in wanted.items() if amount}

    def fitting(self, resources: Mapping[str, float]) -> int:
        """How many ranks a node of these resources could hold."""
        return min(int(resources.get(name, 0) // amount) for name, amount in self.bundle().items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many ranks there are, and where.

    Attributes:
        ranks: of the job; of a host, where `hosts` is given.
        hosts: so many different ones; None = wherever there is room, on few hosts.
        demand: of each rank.
        uses_current_group: where this process runs in a placement group of Ray's, ranks are put into that.
    """

    ranks: int
    hosts: int | None = None
    demand: Demand = Demand()
    uses_current_group: bool = True

    def __post_init__(self) -> None:
        if self.ranks < 1 or (self.hosts is not None and self.hosts < 1):
            raise ConfigError(f"there cannot be {self.ranks} ranks on {self.hosts or 'any'} hosts")

    @property
    def size(self) -> int:
        """Ranks of the job."""
        return self.ranks * (self.hosts or 1)

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What Ray reserves together: a host's ranks, else each rank's."""
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
    """The rules for ranks that come and go.

    Args:
        start: how many to begin with; None = `least`.
        least: how many go on.
        most: how many there may be; None = any number.
        reset_limit: see `Policy`.
        cooldown_s: see `Policy`.
        timeout_s: see `Policy`.

    Raises:
        ConfigError: numbers that contradict each other.
    """
    start = least if start is None else start
    if not 1 <= least <= start <= (most or start):
        raise ConfigError(
            f"min_workers={least}, num_workers={start}, max_workers={most}: each must be at least the one before"
        )
    if cooldown_s is not None and not 0 <= cooldown_s[0] <= cooldown_s[1]:
        raise ConfigError(f"cooldown_range={cooldown_s}: the first is the shorter one")
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
    """Where an actor is.

    Attributes:
        host: equal for actors that share memory and loopback.
        address: under which Ray knows its node.
        gpus: that Ray has given it.
    """

    host: tuple[str, ...]
    address: str
    gpus: tuple[str, ...] = ()


def in_rank_order(places: Sequence[ActorPlace]) -> list[int]:
    """Positions in `places`, by rank: those of a host are neighbours, hosts come as they were found first."""
    first: dict[tuple[str, ...], int] = {}
    for number, place in enumerate(places):
        first.setdefault(place.host, number)
    return sorted(range(len(places)), key=lambda number: first[places[number].host])  # stable


def place_variables(places: Sequence[ActorPlace]) -> list[dict[str, str]]:
    """What each rank finds about its place: Horovod's and torchrun's variables, and the GPUs of its host.

    Ranks see all GPUs that the job has on their host, so that `cuda.set_device(hvd.local_rank())` is right.

    Args:
        places: by rank.
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
        told = {"RANK": rank, "SIZE": len(places), "LOCAL_RANK": local_rank, "LOCAL_SIZE": ranks_of[place.host]}
        variables = {names[each]: str(told[each]) for names in (HOROVOD_NAMES, TORCH_NAMES) for each in told}
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
    """What an actor's process begins with, beside what Ray gives it.

    Args:
        environ: of this process, whose settings the ranks get, too.
        added: by the user; they count more.
        demand: of a rank.
        settings: of the executor.
    """
    interfaces = settings.interfaces
    own = {name: value for name, value in rank_environ(environ, {}).items() if name.startswith(_CARRIED)}
    own.pop("SIRTAKI_SECRET", None)  # Ray shows this environment to whoever may see its dashboard
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


def call_telling_others(fn: Callable[[], _T]) -> _T:
    """Calls it; where it raises this rank leaves the job, and the others' collectives fail with the reason."""
    try:
        return fn()
    except BaseException as err:
        leave_job(f"a rank raised {type(err).__name__}: {err}")
        raise


def leave_job(reason: str) -> None:
    """Not collective: ends this rank's part in the job. Harmless where there is none.

    Args:
        reason: what the others are told.
    """
    if "sirtaki.torch" not in sys.modules:  # then nobody has called init(), and it takes seconds to load
        return
    from sirtaki.engine import job
    from sirtaki.torch.basics import let_go

    job.leave(together=False, reason=reason)
    let_go()


class Rank:
    """An actor, which Ray names in what it shows of its output."""

    def __init__(self) -> None:
        self._store: Any = None  # a TCPStore
        self._executable: Any = None  # of the user's class

    def place(self) -> ActorPlace:
        """Where Ray has put this process."""
        import ray

        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return ActorPlace(
            host=host_identity(), address=ray.util.get_node_ip_address(), gpus=tuple(str(gpu) for gpu in gpus)
        )

    def prepare(self, variables: Mapping[str, str]) -> None:
        """Before anything of the user's runs: sets environment variables."""
        os.environ.update(variables)

    def open_store(self, *, one_host: bool, interfaces: str) -> tuple[str, int]:
        """On rank 0: opens the store in which the ranks meet, at a port that is free, and says where it is."""
        import ray

        addresses = own_addresses(interfaces) if interfaces else [ray.util.get_node_ip_address()]
        host = LOOPBACK if one_host else addresses[0]
        # multi_tenant: `init()` opens it once more, and so may the user's `init_process_group()`
        self._store = serve_store(host, timeout=datetime.timedelta(seconds=300), multi_tenant=True)
        return host, self._store.port

    def make_executable(self, make: Callable[[], Any]) -> None:
        """Makes the user's object, which functions are given."""
        self._executable = call_telling_others(make)

    def execute(self, call: int, fn: Callable[[Any], Any], log: Any = None) -> Any:
        """Calls the function with the user's object, None if there is none.

        Args:
            call: names this one; all ranks of a call have the same number.
            fn: of the user.
            log: Ray's queue for what `ray_logger.log` is given; None = nobody listens.
        """
        ray_logger.configure(log)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(call)  # who did not come to the last meeting misses that only
        return call_telling_others(lambda: fn(self._executable))


@dataclass(frozen=True, slots=True)
class Dismissal:
    """What a rank returns that is not wanted any more."""


class ElasticRank:
    """An actor, which Ray names in what it shows of its output; used for one call."""

    def train(
        self,
        reach: Callable[[], socket.socket],
        host: str,
        interface: str | None,
        fn: Callable[[], Any],
        log: Any = None,
    ) -> Any:
        """Calls the function as a member of the job.

        Args:
            reach: connects to the executor's process.
            host: of this rank, as the job calls it.
            interface: network interface that joins the hosts; None = any.
            fn: of the user.
            log: see `ray_logger.configure`.

        Returns:
            What it returns, or `Dismissal`.
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
                raise RuntimeError(f"the function ended with exit code {err.code}") from err
            return Dismissal()
        except BaseException as err:
            leave_job(f"a rank raised {type(err).__name__}: {err}")
            raise
        job.finish()
        return result
