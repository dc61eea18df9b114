"""LIBRA and LIBRA-M: groups of gradients and the GPU threads that communicate them, against contention.

LIBRA's programme (`libra_schedule`) for the routes, streams and knobs of a job. References are to the LIBRA paper.

The paper uses one stream. On links that one flow cannot fill, one stream is hopeless whatever its threads, so each
planner also plans for the fewest streams that nearly saturate the concurrency curve: a group then travels in as many
slices side by side, at G(n) / G(1) times the rate and with n times the threads against the computation. The simulator
picks.
"""

import math
from collections.abc import Sequence

import numpy as np

from sirtaki.comm.plan import Route
from sirtaki.link_model import LinkModel

from ..knobs import Cut
from ..model.planning import PlanningModel
from .libra_schedule import StageModel, allocate, coarsen, fuse_and_allocate
from .mg_wfbp import merge_gradients
from .planner import Planner, cuts_for_groups

SATURATED = 0.98  # share of the largest throughput at which more streams are not worth their threads


class Libra(Planner):
    """Thread allocation and tensor fusion together (listing 1)."""

    name = "libra"

    def cuts(self, model: PlanningModel, route: Route) -> tuple[Cut, ...]:
        """The programme's groups, each unit with its threads, for one stream or for enough to fill the link."""
        link, simulator = model.links[route], model.simulator(route)
        candidates = [
            self._cuts_on(model, link, streams)
            for streams in dict.fromkeys((self.space.streams[0], self._enough(link, route)))
        ]
        return min(candidates, key=lambda cuts: simulator.run_cuts(cuts).span_s)

    def _cuts_on(self, model: PlanningModel, link: LinkModel, streams: int) -> tuple[Cut, ...]:
        allocations = self.allocations(model)
        ends, choices = self._plan_groups(model, link, stage_model(model, link, allocations, streams=streams))
        threads = [allocations[choice] for choice in choices]
        return cuts_for_groups(model.layout, ends, streams=streams, slices=streams, threads=threads)

    def _plan_groups(
        self, model: PlanningModel, link: LinkModel, stages: StageModel
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Ends and thread allocations of the groups."""
        compute_s, sizes_bytes = _layers(model)
        runs = coarsen(compute_s, sizes_bytes)
        bounds = list(zip([0, *runs], runs, strict=False))
        plan = fuse_and_allocate(
            [math.fsum(compute_s[begin:end]) for begin, end in bounds],
            [sum(sizes_bytes[begin:end]) for begin, end in bounds],
            stages,
        )
        return [runs[end - 1] for end in plan.ends], plan.choices

    def _enough(self, link: LinkModel, route: Route) -> int:
        permitted = self.space.streams_on(route)
        best = max(link.total_bytes_per_s(streams) for streams in permitted)
        return next(n for n in permitted if link.total_bytes_per_s(n) >= SATURATED * best)


class LibraM(Libra):
    """Thread allocation for MG-WFBP's groups (eq. 16-19)."""

    name = "libra_m"

    def _plan_groups(
        self, model: PlanningModel, link: LinkModel, stages: StageModel
    ) -> tuple[Sequence[int], Sequence[int]]:
        compute_s, sizes_bytes = _layers(model)
        groups = merge_gradients(
            model.profile.issuable_s,
            sizes_bytes,
            alpha_s=stages.alpha_s,
            beta_s_per_byte=1 / float(stages.alone_J.max()),
        )
        # Theorem 1 allows an error of (K − 1) / Z, and MG-WFBP may leave many groups: Z grows with K while it is cheap.
        chunks = max(150, min(20 * len(groups), 2_000_000 // len(groups)))
        plan = allocate(compute_s, sizes_bytes, groups, stages, chunks=chunks)
        return plan.ends, plan.choices


def stage_model(
    model: PlanningModel, link: LinkModel, allocations: Sequence[int | None], *, streams: int
) -> StageModel:
    """What overlapping costs for each allocation when a group fills `streams` streams side by side."""
    gain = link.total_bytes_per_s(streams) / link.throughput[0]
    contention = model.contention
    if contention is None:
        rate = np.array([gain * link.throughput[0]])
        return StageModel(alpha_s=link.startup_s, overlapped_J=rate, alone_J=rate, speed_J=np.ones(1))
    threads = [allocation or contention.default_threads for allocation in allocations]
    return StageModel(
        alpha_s=link.startup_s,
        overlapped_J=np.array([gain * contention.overlapped.bytes_per_s(r) for r in threads]),
        alone_J=np.array([gain * contention.alone.bytes_per_s(r) for r in threads]),
        speed_J=np.array([min(1.0, contention.compute_speed(streams * r)) for r in threads]),
    )


def _layers(model: PlanningModel) -> tuple[Sequence[float], list[int]]:
    layout = model.layout
    return model.profile.durations_s, [size * layout.itemsize_bytes for size in layout.sizes]
