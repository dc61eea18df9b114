"""Room for ranks that come and go: a placement group of Ray's for each, wherever and whenever Ray has it.

So a rank's place is its own also while no process is there, an autoscaler knows what is wanted, and what Ray moves to
another node when one is lost is a new slot there.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import ray

from sirtaki.errors import LaunchError

from .settings import Demand


class Slots:
    """Of one executor; asked by several threads."""

    def __init__(self, demand: Demand, *, least: int, most: int | None) -> None:
        """Asks Ray for room.

        Args:
            demand: of a rank.
            least: slots to ask for in any case.
            most: slots to ask for; None = as many as Ray's nodes could hold if they were empty.
        """
        self._demand, self._least, self._most = demand, least, most
        self._lock, self._is_closed = threading.Lock(), False
        self._groups: dict[str, Any] = {}
        self._names: dict[str, str] = {}  # of hosts, by node
        self._taken: dict[int, str] = {}  # groups, by worker
        self.ask()

    def ask(self) -> Mapping[str, int]:
        """Slots by host, as of now; asks Ray for more where there are too few.

        Raises:
            LaunchError: Ray does not answer.
        """
        with self._lock:
            if self._is_closed:  # a question that was under way when the job ended
                return {}
            try:
                wanted = self._most or max(self._least, self._capacity())
                while len(self._groups) < wanted:
                    group = ray.util.placement_group([self._demand.bundle()])
                    self._groups[group.id.hex()] = group
                found = Counter(self._names[node] for node in self._found(self._alive()).values())
            except ray.exceptions.RayError as err:
                raise LaunchError(f"Ray does not answer: {err}") from err
            return dict(found)

    def take(self, worker: int, host: str) -> Any:
        """A group with room on that host, which is the worker's until `release`.

        Raises:
            OSError: there is none.
        """
        with self._lock:
            for group, node in self._found(self._alive()).items():
                if self._names[node] == host and group not in self._taken.values():
                    self._taken[worker] = group
                    return self._groups[group]
        raise OSError(f"Ray has no room on {host} any more")

    def release(self, worker: int) -> None:
        """Another worker may have its room."""
        with self._lock:
            self._taken.pop(worker, None)

    def has_node(self, host: str) -> bool:
        """Whether Ray counts it among the living."""
        with self._lock:
            return any(self._names[node] == host for node in self._alive())

    def close(self) -> None:
        """Gives all room back; again is harmless."""
        with self._lock:
            self._is_closed = True
            for group in self._groups.values():
                ray.util.remove_placement_group(group)
            self._groups.clear()

    def _capacity(self) -> int:
        return sum(self._demand.fitting(node["Resources"]) for node in ray.nodes() if node["Alive"])

    def _alive(self) -> set[str]:
        """Nodes that live; each has a name."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        for node in sorted(addresses.keys() - self._names.keys()):
            self._names[node] = host_name(node, addresses[node], [self._names.get(each, "") for each in addresses])
        return set(addresses)

    def _found(self, alive: Collection[str]) -> dict[str, str]:
        """Nodes, by the groups that have room there."""
        table = ray.util.placement_group_table()
        found = {}
        for group in self._groups:
            entry = table.get(group, {})
            node = entry.get("bundles_to_node_id", {}).get(0, "")
            if entry.get("state") == "CREATED" and node in alive:
                found[group] = node
        return found


def host_name(node: str, address: str, taken: Collection[str]) -> str:
    """Hosts are called by their addresses; further nodes at one address, as in tests, by their ids, too."""
    return f"{address}-{node[:6]}" if address in taken else address
