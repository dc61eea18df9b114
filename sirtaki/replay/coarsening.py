"""A smaller job model that takes as long: dPRO's coarsened view (section 5.3), ranks that are alike, and a mean step.

What a rank does between two moments at which another one depends on it is one piece; and where ranks do alike, one of
them stands for all.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from sirtaki.autotune.model.graph import Activity

from .job_model import Iteration, JobModel, Operation, Piece, Processors, Program


def coarse(job: JobModel, *, settled: bool = True, tolerance_s: float = 0.0) -> JobModel:
    """Chains of pieces that nothing else depends on become one.

    Args:
        job: what is to become smaller.
        settled: its plan stays, so when gradients come that complete no unit need no longer be known.
        tolerance_s: pieces up to that length count as what lies before them, whatever they are; the step's length
            stays, what it is said to be made of shifts by as much.
    """
    iterations = tuple(
        replace(
            each,
            programs={rank: _coarse_program(program, settled, tolerance_s) for rank, program in each.programs.items()},
        )
        for each in job.iterations
    )
    return replace(job, iterations=iterations)


def _coarse_program(program: Program, settled: bool, tolerance_s: float) -> Program:
    found: list[Piece] = []
    for piece in program:
        before = found[-1] if found else None
        marked = before is not None and (before.issues or (before.ready and not settled))
        if before is None or marked or piece.waits or not _join(before, piece, tolerance_s):
            found.append(piece)
            continue
        larger = before if before.seconds >= piece.seconds else piece
        found[-1] = replace(
            before,
            activity=larger.activity,
            phase=larger.phase,
            name=larger.name,
            seconds=before.seconds + piece.seconds,
            ready=before.ready + piece.ready,
            issues=piece.issues,
        )
    return tuple(found)


def _join(before: Piece, piece: Piece, tolerance_s: float) -> bool:
    alike = (before.activity, before.phase) == (piece.activity, piece.phase)
    negligible = min(before.seconds, piece.seconds) <= tolerance_s and not before.waits  # waiting has a phase, too
    return before.computes == piece.computes and (alike or negligible)


def mean_iteration(job: JobModel) -> JobModel:
    """One iteration of mean durations. An iteration in which a rank did other things than in most counts for others."""
    programs = {rank: _mean_program([each.programs[rank] for each in job.iterations]) for rank in job.ranks}
    operations: dict[Hashable, list[Operation]] = defaultdict(list)
    for each in job.iterations:
        for one in each.operations:
            operations[one.key].append(one)
    named = {key for program in programs.values() for piece in program for key in piece.issues}
    usual = max(job.iterations, key=lambda each: len(named & {one.key for one in each.operations}))
    mean = Iteration(
        programs=programs,
        operations=tuple(_mean_operation(operations[one.key]) for one in usual.operations if one.key in named),
    )
    return replace(job, iterations=(mean,))


def _mean_program(programs: Sequence[Program]) -> Program:
    usual, _ = Counter(_signature(program) for program in programs).most_common(1)[0]
    alike = [program for program in programs if _signature(program) == usual]
    return tuple(
        replace(
            pieces[0],
            seconds=statistics.fmean(piece.seconds for piece in pieces),
            waits=tuple(
                (key, statistics.fmean(piece.waits[place][1] for piece in pieces))
                for place, (key, _) in enumerate(pieces[0].waits)
            ),
        )
        for pieces in zip(*alike, strict=True)
    )


def _mean_operation(same: Sequence[Operation]) -> Operation:
    return replace(
        same[0],
        fixed_s=statistics.fmean(one.fixed_s for one in same),
        link_s=statistics.fmean(one.link_s for one in same),
        host_s=statistics.fmean(one.host_s for one in same),
        processor_s=statistics.fmean(one.processor_s for one in same),
        lag_s=statistics.fmean(one.lag_s for one in same),
    )


def _signature(program: Program) -> Hashable:
    return tuple(
        (piece.activity, piece.phase, piece.computes, tuple(key for key, _ in piece.waits), piece.issues)
        for piece in program
    )


def symmetric(job: JobModel, *, tolerance: float = 0.02) -> JobModel:
    """One rank for each kind of them: ranks that do the same, and take as long for each phase within `tolerance`.

    Hosts whose ranks are of the same kinds are alike, too; one of them stays, and on it one rank of each kind, which
    counts as many on the processors that they share. Hosts that are not there any more are not counted, so what units
    cost that nobody has run is to be asked of the whole job.
    """
    kinds = _kinds(job, tolerance)
    hosts: dict[Hashable, Processors] = {}
    for group in job.processors:
        counts = Counter(kinds[rank] for rank in group.ranks)
        hosts.setdefault((frozenset(counts.items()), group.capacity, group.threads), group)
    kept: dict[int, int] = {}
    processors = []
    for group in hosts.values():
        counts = Counter(kinds[rank] for rank in group.ranks)
        mine: dict[int, int] = {}
        for rank in group.ranks:
            if kinds[rank] not in {kinds[other] for other in mine}:
                mine[rank] = counts[kinds[rank]] * job.alike.get(rank, 1)
        kept |= mine
        processors.append(replace(group, ranks=tuple(mine)))
    return replace(
        job,
        ranks=tuple(rank for rank in job.ranks if rank in kept),
        processors=tuple(processors),
        buffers=tuple(
            replace(buffer, ranks=tuple(rank for rank in buffer.ranks if rank in kept)) for buffer in job.buffers
        ),
        iterations=tuple(_only(each, kept) for each in job.iterations),
        begin_s={rank: begin_s for rank, begin_s in job.begin_s.items() if rank in kept},
        alike=kept,
    )


def _only(iteration: Iteration, kept: Mapping[int, int]) -> Iteration:
    operations = [
        replace(one, ranks=ranks)
        for one in iteration.operations
        if (ranks := tuple(rank for rank in one.ranks if rank in kept))
    ]
    there = {one.key for one in operations}
    programs = {rank: program for rank, program in iteration.programs.items() if rank in kept}
    assert all(key in there for program in programs.values() for piece in program for key in piece.issues)
    return Iteration(programs=programs, operations=tuple(operations))


def _kinds(job: JobModel, tolerance: float) -> dict[int, int]:
    """The lowest rank of each one's kind."""
    found: dict[int, int] = {}
    signatures = {rank: tuple(_signature(each.programs[rank]) for each in job.iterations) for rank in job.ranks}
    lengths = {rank: [_lengths(each.programs[rank]) for each in job.iterations] for rank in job.ranks}
    for rank in job.ranks:
        found[rank] = next(
            (
                kind
                for kind in sorted(set(found.values()))
                if signatures[kind] == signatures[rank]
                and abs(job.begin_s.get(kind, 0.0) - job.begin_s.get(rank, 0.0)) <= tolerance * _total(lengths[rank])
                and all(_close(*pair, tolerance) for pair in zip(lengths[kind], lengths[rank], strict=True))
            ),
            rank,
        )
    return found


def _lengths(program: Program) -> dict[Hashable, float]:
    """Of a rank's iteration: what it does up to each operation, and in each phase."""
    found: dict[Hashable, float] = defaultdict(float)
    so_far_s = 0.0
    for piece in program:
        so_far_s += piece.seconds
        found[piece.phase, piece.activity is Activity.DATA] += piece.seconds
        for key in piece.issues:
            found[key] = so_far_s
    found["all"] = so_far_s
    return found


def _total(lengths: Sequence[Mapping[Hashable, float]]) -> float:
    return min(each["all"] for each in lengths)


def _close(mine: Mapping[Hashable, float], other: Mapping[Hashable, float], tolerance: float) -> bool:
    limit_s = tolerance * max(mine["all"], other["all"])
    return all(abs(seconds - other.get(key, 0.0)) <= limit_s for key, seconds in mine.items())
