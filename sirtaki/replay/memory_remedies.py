"""What holding less memory costs: job models whose modules compute again, or whose steps are several passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from sirtaki.autotune.model.graph import Activity, Phase
from sirtaki.profiler.step_memory import ModuleKey

from .job_model import Iteration, JobModel, Piece, Program

_Change = Callable[[Program], Program]

CALL_S, OPERATOR_S = 1e-3, 25e-6
"""What `torch.utils.checkpoint` itself takes for a module, and for each operator in it; as measured on two cores."""

AGAIN = "re-computation"
ADDING = "add gradients"


def with_recomputation(job: JobModel, modules: Collection[ModuleKey]) -> JobModel:
    """These modules do their forward pass again when their backward pass begins.

    Args:
        job: with what is known of each operator's module.
        modules: none within another.
    """
    return _changed(job, lambda program: tuple(_again(program, modules)))


def with_accumulation(job: JobModel, passes: int) -> JobModel:
    """A step is so many passes over parts of the batch, and gradients are exchanged in the last one.

    An operator takes the same time for a sample; what the script does between operators is done in each pass, and
    adding gradients takes as long as copying them.
    """
    return _changed(job, lambda program: tuple(_in_passes(program, passes)))


def _changed(job: JobModel, change: _Change) -> JobModel:
    return replace(
        job,
        iterations=tuple(
            Iteration(
                programs={rank: change(program) for rank, program in each.programs.items()}, operations=each.operations
            )
            for each in job.iterations
        ),
    )


def _again(program: Program, modules: Collection[ModuleKey]) -> Iterator[Piece]:
    owners = [_owner(piece.module, modules) for piece in program]
    owed_s: dict[ModuleKey, float] = {}
    last: ModuleKey | None = None
    gap_s = 0.0  # since the last operator, which counts for a module that has operators on both sides
    for piece, owner in zip(program, owners, strict=True):
        if piece.phase is Phase.FORWARD and not piece.name:
            gap_s += piece.seconds
        elif piece.phase is Phase.FORWARD:
            if owner is not None:
                again_s = piece.seconds + (gap_s if owner == last else 0.0)
                owed_s[owner] = owed_s.get(owner, CALL_S) + OPERATOR_S + again_s
            last, gap_s = owner, 0.0
        elif piece.phase is Phase.BACKWARD and owner is not None and owner in owed_s:
            seconds = owed_s.pop(owner)
            yield Piece(
                activity=Activity.COMPUTE, phase=Phase.BACKWARD, name=AGAIN, seconds=seconds, module=piece.module
            )
        yield piece


def _owner(module: ModuleKey | None, modules: Collection[ModuleKey]) -> ModuleKey | None:
    while module is not None and module not in modules:
        root, name = module
        module = (root, name.rpartition(".")[0]) if name else None
    return module


def _in_passes(program: Program, passes: int) -> Iterator[Piece]:
    body = [place for place, piece in enumerate(program) if piece.phase in (Phase.FORWARD, Phase.BACKWARD)]
    if not body:
        yield from program
        return
    first, last = body[0], body[-1] + 1
    yield from program[:first]
    for number in range(passes - 1):
        for piece in program[first:last]:
            if piece.activity is Activity.COPY:
                if number:
                    yield _added(piece)
            elif not piece.waits:
                yield replace(piece, seconds=_part_s(piece, passes), ready=(), issues=())
    for piece in program[first:last]:
        if piece.activity is Activity.COPY:
            yield _added(piece)
            yield piece
        else:
            yield replace(piece, seconds=_part_s(piece, passes))
    yield from program[last:]


def _added(copy: Piece) -> Piece:
    return replace(copy, activity=Activity.COMPUTE, name=ADDING, ready=(), issues=(), waits=())


def _part_s(piece: Piece, passes: int) -> float:
    return piece.seconds / passes if piece.name else piece.seconds
