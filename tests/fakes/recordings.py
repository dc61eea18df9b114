"""Recordings made by hand. A step takes 100 ms, all clocks are right, and two units act as barriers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from sirtaki.analysis.recording import (
    Buffer,
    Collective,
    Copy,
    Detail,
    JobInfo,
    Operator,
    PhaseSpan,
    Placement,
    RankRecording,
    ReadyGradient,
    RecordedIteration,
    RecordedUnit,
    Recording,
    UnitId,
)
from sirtaki.autotune.knobs import Cut, Knobs
from sirtaki.autotune.model.replayer import Phase
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.measures import LinkModel

LAYOUT = GradientLayout(sizes=(100, 200, 8), names=("head.weight", "body.weight", "sirtaki.control_flags"))
ROUTE = (TransportKind.GLOO, Algorithm.FLAT)
KNOBS = Knobs(unit_bytes=400, streams=2, transport=TransportKind.GLOO, cuts=(Cut(stop=100), Cut(stop=308, stream=1)))
STEP_S = 0.1


def placement(rank: int, *, host: int = 0) -> Placement:
    return Placement(
        rank=rank,
        host=host,
        node=host,
        host_name=f"host{host}",
        clock=f"clock{host}",
        processors=(0, 1),
        host_processors=2,
        quota=None,
        threads=1,
    )


def job(n_ranks: int = 2, *, ranks_per_host: int = 2, n_iterations: int = 3) -> JobInfo:
    return JobInfo(
        job="1.2",
        n_iterations=n_iterations,
        placement=tuple(placement(rank, host=rank - rank % ranks_per_host) for rank in range(n_ranks)),
        buffers=(
            Buffer(
                number=0,
                reducer=(0, 0),
                ranks=tuple(range(n_ranks)),
                layout=LAYOUT,
                plan=KNOBS.to_plan(LAYOUT),
                knobs=KNOBS,
            ),
        ),
        links={ROUTE: LinkModel(alpha_s=1e-4, throughput=(1e8, 1.5e8))},
        settings={"SIRTAKI_TUNE": "0"},
        versions={"sirtaki": "0.1.0"},
    )


def unit(iteration: int, number: int, issue_s: float, done_s: float) -> RecordedUnit:
    planned = KNOBS.to_plan(LAYOUT).units[number]
    identity = UnitId(iteration, 0, planned.start, planned.stop, ROUTE, planned.stream)
    return RecordedUnit(*identity, issue_s, None if number else issue_s + 1e-4, done_s)


def iteration(number: int, *, late_s: float = 0.0) -> RecordedIteration:
    """Return an iteration whose second gradient is `late_s` late. Units end when all ranks' gradients are ready."""
    begin_s = 1000.0 + number * STEP_S
    phases = ((Phase.DATA, 0.0, 0.005), (Phase.FORWARD, 0.005, 0.03), (Phase.BACKWARD, 0.03, 0.08))
    return RecordedIteration(
        number=number,
        begin_s=begin_s,
        end_s=begin_s + STEP_S,
        spans=tuple(PhaseSpan(phase, begin_s + from_s, begin_s + to_s) for phase, from_s, to_s in phases),
        operators=(
            Operator("aten::linear", 0, begin_s + 0.006, begin_s + 0.03, Phase.FORWARD, 7),
            Operator("AddmmBackward0", 0, begin_s + 0.031, begin_s + 0.05 + late_s, Phase.BACKWARD, 7, (0,)),
        ),
        ready=(ReadyGradient(0, 0, begin_s + 0.04), ReadyGradient(0, 1, begin_s + 0.05 + late_s)),
        copies=(Copy(begin_s + 0.05 + late_s, begin_s + 0.051 + late_s, 1),),
        units=(
            unit(number, 0, begin_s + 0.041, begin_s + 0.06),
            unit(number, 1, begin_s + 0.052 + late_s, begin_s + 0.09),
        ),
        collectives=(Collective("loss", "allreduce", begin_s + 0.091, begin_s + 0.092, begin_s + 0.093, 4),),
        exposed_s=0.01,
    )


def rank(number: int, *, n_iterations: int = 3, model: str = "m", late_s: float = 0.0) -> RankRecording:
    return RankRecording(
        rank=number,
        job="1.2",
        model=model,
        detail=Detail.OPERATORS,
        offset_s=0.0 if number == 0 else 1e-5,
        round_trip_s=0.0 if number == 0 else 4e-5,
        clock_error_s=2e-6,
        lanes=("train",),
        iterations=tuple(iteration(102 + step, late_s=late_s) for step in range(n_iterations)),
    )


def recording(n_ranks: int = 2, *, ranks_per_host: int = 2, n_iterations: int = 3) -> Recording:
    """Return a recording of equal ranks, except for the last one, which is 10 ms late."""
    ranks = {
        number: rank(number, n_iterations=n_iterations, late_s=0.01 if number == n_ranks - 1 else 0.0)
        for number in range(n_ranks)
    }
    return Recording(job=job(n_ranks, ranks_per_host=ranks_per_host, n_iterations=n_iterations), ranks=ranks)


MOMENTS = ("begin_s", "end_s", "ready_s", "issue_s", "agreed_s", "done_s")


def shifted(recorded: RankRecording, *, by_s: float, drift: float = 0.0) -> RankRecording:
    """Return a rank's recording with a clock that is `by_s` ahead in the first iteration, and gains `drift`."""
    first_s = recorded.iterations[0].begin_s

    def moved(one: Any) -> Any:
        change = one._replace if hasattr(one, "_replace") else partial(replace, one)
        there = {name: at_s for name in MOMENTS if (at_s := getattr(one, name, None)) is not None}
        return change(**{name: at_s + by_s + drift * (at_s - first_s) for name, at_s in there.items()})

    def of_iteration(one: RecordedIteration) -> RecordedIteration:
        rows = ("spans", "operators", "ready", "copies", "units", "collectives")
        return replace(moved(one), **{name: tuple(map(moved, getattr(one, name))) for name in rows})  # type: ignore[no-any-return]

    return replace(recorded, iterations=tuple(map(of_iteration, recorded.iterations)))


def with_ranks(recording: Recording, change: Callable[[RankRecording], RankRecording], *ranks: int) -> Recording:
    """Return the recording with a change to the given ranks, or to all ranks if none is given."""
    changed = {n: one if ranks and n not in ranks else change(one) for n, one in recording.ranks.items()}
    return replace(recording, ranks=changed)


def with_iterations(
    recording: Recording, change: Callable[[RecordedIteration], RecordedIteration], *ranks: int
) -> Recording:
    """Return the recording of a rank with a change to each iteration."""
    return with_ranks(recording, lambda rank: replace(rank, iterations=tuple(map(change, rank.iterations))), *ranks)
