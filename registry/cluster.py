"""The cluster of a job: which ranks share a host and a device, and how fast the links between them are.

A job describes its cluster once, before anything is known about its model. Host names are not kept: two clusters that
are built alike are the same cluster.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from sirtaki.errors import RegistryError
from sirtaki.fields import Label

from .graph import canonical_json, digest

MAX_RANKS = 65_536

Log2 = Annotated[int, Meta(ge=-64, le=64)]
Index = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Ranks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]


class LinkClass(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Speed of a link in powers of two, so that noise between two measurements rarely changes it.

    Attributes:
        bandwidth_log2: log2 of bytes a second, rounded; None = unknown.
        latency_log2: log2 of nanoseconds, rounded; None = unknown.
    """

    bandwidth_log2: Log2 | None = None
    latency_log2: Log2 | None = None

    @property
    def is_known(self) -> bool:
        """Return whether anything is known of it."""
        return self != _UNKNOWN

    @classmethod
    def of(cls, *, bandwidth_bytes_per_s: float | None = None, latency_s: float | None = None) -> LinkClass:
        """The class of a measured or nominal speed.

        Raises:
            RegistryError: a speed is not positive and finite.
        """
        for value in (bandwidth_bytes_per_s, latency_s):
            if value is not None and not (0 < value < math.inf):
                raise RegistryError(f"bandwidth and latency must be positive and finite, not {value}")
        return cls(
            bandwidth_log2=None if bandwidth_bytes_per_s is None else round(math.log2(bandwidth_bytes_per_s)),
            latency_log2=None if latency_s is None else round(math.log2(latency_s * 1e9)),
        )

    def octaves_from(self, other: LinkClass) -> int:
        """Doublings of bandwidth and latency that lie between two links; what is unknown of either counts nothing."""
        pairs = ((self.bandwidth_log2, other.bandwidth_log2), (self.latency_log2, other.latency_log2))
        return sum(abs(mine - theirs) for mine, theirs in pairs if mine is not None and theirs is not None)

    def __str__(self) -> str:
        bandwidth = "?" if self.bandwidth_log2 is None else f"2^{self.bandwidth_log2} B/s"
        latency = "?" if self.latency_log2 is None else f"2^{self.latency_log2} ns"
        return f"{bandwidth}, {latency}"


_UNKNOWN = LinkClass()


class RankLocation(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Host and device of one rank.

    Attributes:
        host: number of its host, from 0 in the order in which hosts appear.
        device: kind of its device, such as "cpu" or "NVIDIA H100".
        device_index: which one on that host; ranks with equal numbers share it. None = not shared.
    """

    host: int
    device: Label
    device_index: Index | None


class ClusterShape(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A cluster without its ranks: what is needed to compare it with thousands of others.

    Attributes:
        hosts: what a host is like, its number of ranks, and how many such hosts there are; sorted.
        network: class of the link between hosts.
    """

    hosts: tuple[tuple[str, Ranks, Ranks], ...]
    network: str

    def describe(self) -> str:
        """Its hosts in words: `2 × c5.xlarge, 4 cores`."""
        kinds: Counter[str] = Counter()
        for detail, _, count in self.hosts:
            try:
                (kind, *_), _ = json.JSONDecoder().raw_decode(detail)  # as `Topology.shape` has written it
            except ValueError:
                kind = ""
            kinds[str(kind)] += count
        return "; ".join(f"{count} × {kind or 'unknown kind'}" for kind, count in kinds.items())


class Topology(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranks grouped by host and device.

    Attributes:
        places: `(world_size,)`, by rank.
        host_kinds: kind of each host, such as an instance type, `(n_hosts,)`; empty texts where unknown.
        local_link: between ranks of one host.
        network_link: between hosts.

    Raises:
        RegistryError: no ranks, too many, or host numbers that do not match `host_kinds`.
    """

    places: tuple[RankLocation, ...]
    host_kinds: tuple[Label, ...]
    local_link: LinkClass
    network_link: LinkClass

    def __post_init__(self) -> None:
        if not 1 <= len(self.places) <= MAX_RANKS:
            raise RegistryError(f"a topology has 1 to {MAX_RANKS} ranks, not {len(self.places)}")
        if {place.host for place in self.places} != set(range(len(self.host_kinds))):
            raise RegistryError(f"hosts must be numbered from 0 to {len(self.host_kinds) - 1} and each have a rank")

    @classmethod
    def from_ranks(
        cls,
        host_names: Sequence[str],
        *,
        devices: Sequence[str] | None = None,
        host_kinds: Mapping[str, str] | None = None,
    ) -> Topology:
        """The topology of ranks on named hosts; all sequences are `(world_size,)`, by rank. Names are not kept."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(host_names))}
        devices = devices or ["cpu"] * len(host_names)
        return cls(
            places=tuple(
                RankLocation(numbers[name], device, None) for name, device in zip(host_names, devices, strict=True)
            ),
            host_kinds=tuple((host_kinds or {}).get(name, "") for name in numbers),
            local_link=_UNKNOWN,
            network_link=_UNKNOWN,
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.places)

    @property
    def n_hosts(self) -> int:
        """Number of hosts."""
        return len(self.host_kinds)

    def _hosts(self) -> list[str]:
        """One text a host: its kind, and how many ranks share each of its devices."""
        devices: list[Counter[tuple[str, int]]] = [Counter() for _ in self.host_kinds]
        for rank, place in enumerate(self.places):
            alone = -1 - rank  # a device of its own
            index = alone if place.device_index is None else place.device_index
            devices[place.host][(place.device, index)] += 1
        texts = []
        for kind, counted in zip(self.host_kinds, devices, strict=True):
            shares = Counter((device, ranks) for (device, _), ranks in counted.items())
            texts.append(canonical_json([kind, sorted([*share, count] for share, count in shares.items())]))
        return texts

    def fingerprint(self) -> str:
        """A digest of grouping, kinds and classes; host names, their order and that of ranks do not count."""
        return digest(str(self.local_link), str(self.network_link), *sorted(self._hosts()))[:32]

    def shape(self) -> ClusterShape:
        """Hosts of a kind taken together."""
        ranks = Counter(place.host for place in self.places)
        hosts = Counter((f"{text} {self.local_link}", ranks[index]) for index, text in enumerate(self._hosts()))
        return ClusterShape(
            hosts=tuple(sorted((detail, size, count) for (detail, size), count in hosts.items())),
            network=str(self.network_link),
        )

    def describe(self) -> str:
        """The cluster in a few words: `8 ranks on 2 hosts`."""
        ranks = f"{self.world_size} rank" + ("" if self.world_size == 1 else "s")
        return f"{ranks} on {self.n_hosts} host" + ("" if self.n_hosts == 1 else "s")
