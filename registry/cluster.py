"""Topology of a job: placement of ranks on hosts and devices, and speed of the links between ranks.

A job describes its topology once, before it captures its model's graph. Host names are not stored, so two clusters with
the same structure have equal topologies.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from sirtaki.errors import RegistryError, require
from sirtaki.fields import Label
from sirtaki.measures import counted

from .graph import canonical_json, digest

MAX_RANKS = 65_536

Log2 = Annotated[int, Meta(ge=-64, le=64)]
Index = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Ranks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]


class LinkClass(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Bandwidth and latency of a link, rounded to powers of two so that measurement noise rarely changes them.

    Attributes:
        bandwidth_log2: log2 of bytes per second; None = unknown.
        latency_log2: log2 of nanoseconds; None = unknown.
    """

    bandwidth_log2: Log2 | None = None
    latency_log2: Log2 | None = None

    @property
    def is_known(self) -> bool:
        """Return whether the bandwidth or the latency is known."""
        return self != _UNKNOWN

    @classmethod
    def of(cls, *, bandwidth_bytes_per_s: float | None = None, latency_s: float | None = None) -> LinkClass:
        """Round a measured or nominal speed of a link to powers of two.

        Raises:
            RegistryError: a speed is not positive and finite.
        """
        for value in (bandwidth_bytes_per_s, latency_s):
            valid = value is None or 0 < value < math.inf
            require(valid, "a link's bandwidth or latency", "a positive, finite number", value, RegistryError)
        return cls(
            bandwidth_log2=None if bandwidth_bytes_per_s is None else round(math.log2(bandwidth_bytes_per_s)),
            latency_log2=None if latency_s is None else round(math.log2(latency_s * 1e9)),
        )

    def octaves_from(self, other: LinkClass) -> int:
        """Return the distance of two speeds in factors of two, summed over bandwidth and latency.

        Unknown values add 0.
        """
        pairs = ((self.bandwidth_log2, other.bandwidth_log2), (self.latency_log2, other.latency_log2))
        return sum(abs(own - others) for own, others in pairs if own is not None and others is not None)

    def __str__(self) -> str:
        bandwidth = "?" if self.bandwidth_log2 is None else f"2^{self.bandwidth_log2} B/s"
        latency = "?" if self.latency_log2 is None else f"2^{self.latency_log2} ns"
        return f"{bandwidth}, {latency}"


_UNKNOWN = LinkClass()


class RankLocation(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Host and device on which one rank runs.

    Attributes:
        host: index of the host, counted from 0 in order of appearance.
        device: kind of the device, such as "cpu" or "NVIDIA H100".
        device_index: index of the device on its host. Ranks with equal indices share the device. None = not shared.
    """

    host: int
    device: Label
    device_index: Index | None


class ClusterShape(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Summary of a topology: the number of hosts of each kind. It lists no ranks, so that it is small and quick to
    compare.

    Attributes:
        hosts: (description of a host, number of ranks on it, number of such hosts), sorted.
        network: rounded bandwidth and latency of the link between hosts, as text.
    """

    hosts: tuple[tuple[str, Ranks, Ranks], ...]
    network: str

    def describe(self) -> str:
        """Return the hosts in words, such as `2 × c5.xlarge, 4 cores`."""
        kinds: Counter[str] = Counter()
        for detail, _, count in self.hosts:
            try:
                (kind, *_), _ = json.JSONDecoder().raw_decode(detail)  # Parse the format that `Topology.shape` writes.
            except ValueError:
                kind = ""
            kinds[str(kind)] += count
        return "; ".join(f"{count} × {kind or 'unknown kind'}" for kind, count in kinds.items())


class Topology(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranks grouped by host and device.

    Attributes:
        places: location of each rank, `(world_size,)`.
        host_kinds: kind of each host, such as an instance type, `(n_hosts,)`; "" = unknown.
        local_link: rounded bandwidth and latency between ranks of one host.
        network_link: rounded bandwidth and latency between hosts.

    Raises:
        RegistryError: the number of ranks is out of range, or the host indices do not match `host_kinds`.
    """

    places: tuple[RankLocation, ...]
    host_kinds: tuple[Label, ...]
    local_link: LinkClass
    network_link: LinkClass

    def __post_init__(self) -> None:
        n_ranks = len(self.places)
        require(1 <= n_ranks <= MAX_RANKS, "number of ranks", f"1 to {MAX_RANKS}", n_ranks, RegistryError)
        hosts = sorted({place.host for place in self.places})
        rule = f"hosts 0 to {len(self.host_kinds) - 1}, each with a rank"
        require(hosts == [*range(len(self.host_kinds))], "topology", rule, hosts, RegistryError)

    @classmethod
    def from_ranks(
        cls,
        host_names: Sequence[str],
        *,
        devices: Sequence[str] | None = None,
        host_kinds: Mapping[str, str] | None = None,
    ) -> Topology:
        """Build the topology of ranks on named hosts.

        Args:
            host_names: host name of each rank, `(world_size,)`.
            devices: kind of device of each rank, `(world_size,)`; None = "cpu".
            host_kinds: kind of each host, by name.
        """
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
        """Return the number of ranks."""
        return len(self.places)

    @property
    def n_hosts(self) -> int:
        """Return the number of hosts."""
        return len(self.host_kinds)

    def _hosts(self) -> list[str]:
        """Return a text for each host: its kind, and (kind of device, ranks per device, number of such devices)."""
        devices: list[Counter[tuple[str, int]]] = [Counter() for _ in self.host_kinds]
        for rank, place in enumerate(self.places):
            # The rank does not share its device: give the device a unique index.
            alone = -1 - rank
            index = alone if place.device_index is None else place.device_index
            devices[place.host][(place.device, index)] += 1
        texts = []
        for kind, numbered in zip(self.host_kinds, devices, strict=True):
            shares = Counter((device, ranks) for (device, _), ranks in numbered.items())
            texts.append(canonical_json([kind, sorted([*share, count] for share, count in shares.items())]))
        return texts

    def fingerprint(self) -> str:
        """Return a digest of the topology. Equal topologies have equal digests.

        The digest depends neither on host names nor on the order of hosts and ranks.
        """
        return digest(str(self.local_link), str(self.network_link), *sorted(self._hosts()))[:32]

    def shape(self) -> ClusterShape:
        """Return a summary of the topology, in which equal hosts are counted together."""
        ranks = Counter(place.host for place in self.places)
        hosts = Counter((f"{text} {self.local_link}", ranks[index]) for index, text in enumerate(self._hosts()))
        return ClusterShape(
            hosts=tuple(sorted((detail, size, count) for (detail, size), count in hosts.items())),
            network=str(self.network_link),
        )

    def describe(self) -> str:
        """Return a text such as `8 ranks on 2 hosts`."""
        return f"{counted(self.world_size, 'rank')} on {counted(self.n_hosts, 'host')}"
