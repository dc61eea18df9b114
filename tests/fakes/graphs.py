"""Graphs for the replayer: made by hand, random, and simulated by brute force in small time steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from sirtaki.autotune.model.replayer import (
    NEVER,
    Activity,
    Edge,
    Load,
    Phase,
    ReplayGraph,
    ReplayNode,
    ResourceDemand,
    SharedResource,
)


def node(lane: int, fixed_s: float = 0.0, *works: ResourceDemand, name: str = "") -> ReplayNode:
    return ReplayNode(
        lane=lane,
        activity=Activity.COMPUTE,
        phase=Phase.OTHER,
        rank=lane,
        iteration=0,
        name=name,
        fixed_s=fixed_s,
        works=works,
    )


def graph(
    nodes: Sequence[ReplayNode], edges: Sequence[Edge] = (), servers: Sequence[SharedResource] = ()
) -> ReplayGraph:
    lanes = [f"lane {number}" for number in range(1 + max(one.lane for one in nodes))]
    return ReplayGraph(nodes=nodes, edges=edges, lanes=lanes, servers=servers)


def longest_path_s(one: ReplayGraph, *, alone: bool = True) -> float:
    """Return a lower bound of any schedule: the longest path of edges, with every server available to every node."""
    end_s: list[float] = []
    before: dict[int, list[tuple[int, float]]] = {}
    for first, second, gap_s in one.edges:
        before.setdefault(second, []).append((first, gap_s))
    for place, each in enumerate(one.nodes):  # edges of random graphs lead forwards
        ready_s = max((end_s[first] + gap_s for first, gap_s in before.get(place, [])), default=0.0)
        end_s.append(ready_s + (each.alone_s if alone else each.fixed_s))
    return max(end_s)


def brute_force(one: ReplayGraph, dt_s: float) -> list[float]:
    """Return the end of each node, simulated in steps of `dt_s`. The error is a few steps per node on a path."""
    count = len(one.nodes)
    end_s = [-1.0] * count
    left_fixed_s = [each.fixed_s for each in one.nodes]
    left_work_s = [[work.seconds for work in each.works] for each in one.nodes]
    relieved: set[tuple[int, int]] = set()
    ready: list[list[int]] = [[] for _ in one.lanes]
    known: set[int] = set()
    now_s = 0.0
    while min(end_s) < 0:
        for place in range(count):
            if place in known:
                continue
            waits = [(first, gap_s) for first, second, gap_s in one.edges if second == place]
            if all(end_s[first] >= 0 and end_s[first] + gap_s <= now_s + 1e-9 for first, gap_s in waits):
                ready[one.nodes[place].lane].append(place)
                known.add(place)
        running = [queue[0] for queue in ready if queue]
        jobs, loads = [0.0] * len(one.servers), [0.0] * len(one.servers)
        for place in running:
            for load in one.nodes[place].loads:
                loads[load.server] += load.amount
            if left_fixed_s[place] <= 1e-12:
                for index, work in enumerate(one.nodes[place].works):
                    if work.relieved_by >= 0 and end_s[work.relieved_by] >= 0 and (place, index) not in relieved:
                        relieved.add((place, index))
                        left_work_s[place][index] *= work.relief
                for work, left_s in zip(one.nodes[place].works, left_work_s[place], strict=True):
                    jobs[work.server] += work.jobs if left_s > 1e-12 else 0
        now_s += dt_s
        for place in running:
            if left_fixed_s[place] > 1e-12:
                left_fixed_s[place] -= dt_s
            else:
                left = left_work_s[place]
                for index, work in enumerate(one.nodes[place].works):
                    if left[index] > 1e-12:
                        server = one.servers[work.server]
                        slowed = 1.0 if server.speed is None else server.speed(loads[work.server])
                        left[index] -= dt_s * server.share(jobs[work.server]) * slowed
            if left_fixed_s[place] <= 1e-12 and max(left_work_s[place], default=0.0) <= 1e-12:
                end_s[place] = now_s
                ready[one.nodes[place].lane].pop(0)
    return end_s


@st.composite
def drawn_graphs(draw: st.DrawFn, *, chained: bool = False, shared: bool = True, slowed: bool = False) -> ReplayGraph:
    """Draw a graph of up to twelve nodes on up to four lanes, with edges that lead forwards.

    Args:
        chained: each lane's nodes depend on each other, so that their order is fixed.
        shared: add two shared servers.
        slowed: nodes also put load on servers that do not serve them, or lose it when another node ends.
    """
    durations = st.integers(0, 12).map(lambda count: count / 4)
    servers = (
        SharedResource(name="processors", totals=(1.0, 2.0), speed=(lambda load: 1 / (1 + load)) if slowed else None),
        SharedResource(name="link", totals=(1.0, 1.5), is_link=True),
    )
    nodes: list[ReplayNode] = []
    edges: list[Edge] = []
    last: dict[int, int] = {}
    for place in range(draw(st.integers(1, 12))):
        lane = draw(st.integers(0, 3))
        works = []
        if shared:
            works = [
                ResourceDemand(server=server, seconds=draw(durations), jobs=draw(st.sampled_from((0.5, 1, 2))))
                for server in sorted(draw(st.sets(st.integers(0, 1))))
            ]
        loads: tuple[Load, ...] = ()
        if slowed:
            loads = tuple(Load(server=0, amount=amount) for amount in draw(st.sampled_from(((), (0.5,), (2.0,)))))
            works = [replace(work, relieved_by=draw(st.integers(NEVER, place - 1)), relief=0.5) for work in works]
        nodes.append(replace(node(lane, draw(durations), *works), loads=loads))
        befores = sorted(draw(st.sets(st.integers(0, place - 1), max_size=2))) if place else []
        edges += [(before, place, draw(durations)) for before in befores]
        if chained and lane in last:
            edges.append((last[lane], place, 0.0))
        last[lane] = place
    lanes = [f"lane {number}" for number in range(4)]
    return ReplayGraph(nodes=nodes, edges=edges, lanes=lanes, servers=servers)
