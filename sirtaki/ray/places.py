"""From where Ray has put the actors to which rank each is, and what it finds in its environment."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sirtaki.launchers import HOROVOD_NAMES, TORCH_NAMES
from sirtaki.run.as_horovod import SHIM, is_installed
from sirtaki.run.rank_command import KEEP_FREED_MEMORY, rank_environ

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
    *,
    cpus: float,
    timeout_s: float,
    interfaces: str,
) -> dict[str, str]:
    """What an actor's process begins with, beside what Ray gives it.

    Args:
        environ: of this process, whose settings the ranks get, too.
        added: by the user; they count more.
        cpus: of a rank.
        timeout_s: how long ranks wait for each other.
        interfaces: that join the hosts; "" = any.
    """
    own = {name: value for name, value in rank_environ(environ, {}).items() if name.startswith(_CARRIED)}
    own.pop("SIRTAKI_SECRET", None)  # Ray shows this environment to whoever may see its dashboard
    named = dict.fromkeys(("SIRTAKI_GLOO_IFACE", "NCCL_SOCKET_IFNAME"), interfaces) if interfaces else {}
    shim = os.pathsep.join([str(SHIM), *filter(None, [environ.get("PYTHONPATH")])])
    return {
        **({"PYTHONPATH": shim} if is_installed() else {}),
        **KEEP_FREED_MEMORY,
        "OMP_NUM_THREADS": str(max(1, int(cpus))),
        "SIRTAKI_START_TIMEOUT_S": f"{timeout_s:g}",
        **own,
        **named,
        **added,
        "SIRTAKI_CONTROL": "mesh",
    }
