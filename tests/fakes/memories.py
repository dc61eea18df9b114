"""Memory of a training step, made by hand: a chain of blocks that save activations for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sirtaki.analysis.job_model import JobModel, Program, ThreadInterval
from sirtaki.analysis.recording import Allocation, Holds, Module, ModuleCall, Recording, StepMemory
from sirtaki.autotune.model.replayer import Activity, Phase

from . import recordings
from .played_jobs import made_job, plan_of, record

PARAMETERS, FLAT, LEFT, OUTPUT, TEMPORARY, GRADIENT = 1000, 200, 400, 40, 100, 16
THERE = PARAMETERS + FLAT


def modules(blocks: int, *, kind: str = "Block") -> tuple[Module, ...]:
    return (
        Module(name="", kind="Net", root=0),
        *(Module(name=f"blocks.{n}", kind=kind, root=0) for n in range(blocks)),
    )


def chain(blocks: int = 4, *, batch: int = 8) -> StepMemory:
    """Return the memory of a chain. Block n runs forward in second n, and backward in second `2 * blocks - n`.

    The forward pass allocates TEMPORARY briefly, saves LEFT and returns OUTPUT, which the next block's backward pass
    needs. The backward pass frees LEFT at its end and allocates GRADIENT, which is accumulated, and copied later.
    """
    there = [Allocation(0, PARAMETERS, Holds.PARAMETERS), Allocation(0, FLAT, Holds.FLAT_BUFFERS)]
    end_s = 2.0 * blocks + 2
    found = list[Allocation]()
    calls = [ModuleCall(0, -1, 0.0, float(blocks), blocks + 1.0, end_s - 1)]
    for number in range(blocks):
        back_s = 2.0 * blocks - number
        # The next block's backward pass needs the output; the last block's output lives until its own.
        until_s = back_s - 0.05 if number < blocks - 1 else back_s + 0.01
        call = number + 1
        found += [
            _made(TEMPORARY, Holds.OTHER, Phase.FORWARD, number + 0.2, number + 0.3, call),
            _made(LEFT, Holds.ACTIVATIONS, Phase.FORWARD, number + 0.4, back_s + 0.9, call),
            _made(OUTPUT, Holds.ACTIVATIONS, Phase.FORWARD, number + 0.5, until_s, call),
        ]
        output = len(there) + len(found) - 1
        inputs = (output - 3,) if number else ()
        calls.append(ModuleCall(call, 0, number + 0.1, number + 0.9, back_s, back_s + 0.95, inputs, (output,)))
    found += [
        _made(
            GRADIENT, Holds.GRADIENTS, Phase.BACKWARD, 2.0 * blocks - n + 0.5, 2.0 * blocks - n + 0.8, n + 1
        )._replace(added_s=2.0 * blocks - n + 0.6)
        for n in reversed(range(blocks))
    ]
    return StepMemory(
        iteration=102,
        begin_s=0.0,
        end_s=end_s,
        devices=("cpu",),
        batch=batch,
        allocations=(*there, *found),
        calls=tuple(calls),
    )


def _made(n_bytes: int, holds: Holds, phase: Phase, begin_s: float, end_s: float, call: int) -> Allocation:
    return Allocation(0, n_bytes, holds, phase, begin_s, end_s, call=call, operator="aten::mm")


def recording(blocks: int = 4, *, kind: str = "Block", batch: int = 8) -> Recording:
    """Return a recording of two ranks. It has the memory of rank 0 only."""
    found = recordings.recording()
    first = replace(found.ranks[0], modules=modules(blocks, kind=kind), memory=chain(blocks, batch=batch))
    return replace(found, ranks={**found.ranks, 0: first})


def recorded_job(blocks: int = 4, *, of: Sequence[int] = (0,), kind: str = "Block") -> Recording:
    """Return a recording of `job`, with the memory of the ranks `of`."""
    found = record(job(blocks))
    ranks = dict(found.ranks)
    for number in of:
        layers, memory = ranks[number].modules, chain(blocks)
        calls = tuple(one._replace(module=one.module + len(layers)) for one in memory.calls)
        ranks[number] = replace(
            ranks[number],
            modules=(*layers, *modules(blocks, kind=kind)),
            memory=replace(memory, calls=calls, iteration=ranks[number].iterations[0].number),
        )
    return replace(found, ranks=ranks)


def job(blocks: int = 4, *, forward_s: float = 0.1, backward_s: float = 0.2, gap_s: float = 0.0) -> JobModel:
    """Return a job of two equal ranks, whose blocks have the given times and a gap after the forward pass."""
    plain = made_job(durations_s={0: (backward_s,) * blocks, 1: (backward_s,) * blocks}, sizes=(10,) * blocks,
                     plan=plan_of((10,) * blocks, (blocks,)))  # fmt: skip
    (each,) = plain.iterations
    programs = {rank: tuple(_of_blocks(mine, blocks, forward_s, gap_s)) for rank, mine in each.programs.items()}
    return replace(plain, iterations=(replace(each, programs=programs),))


def _of_blocks(program: Program, blocks: int, forward_s: float, gap_s: float) -> Iterator[ThreadInterval]:
    left = list(range(blocks))
    for piece in program:
        if piece.name == "forward":
            for number in range(blocks):
                module = (0, f"blocks.{number}.linear")
                for _ in range(2):
                    yield replace(piece, name="mm", seconds=forward_s / 2, module=module)
                    yield ThreadInterval(Activity.COMPUTE, Phase.FORWARD, gap_s / 2)
        elif piece.name and piece.phase is Phase.BACKWARD and piece.activity is Activity.COMPUTE:
            yield replace(piece, module=(0, f"blocks.{left.pop()}.linear"))
        else:
            yield piece
