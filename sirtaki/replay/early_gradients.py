"""The same job with a compiled model's backward pass in parts, whose gradients come one part after the other.

torch.compile makes one operator of the whole backward pass, so all gradients come at its end and nothing hides how they
travel. `hvd.early_gradients()` compiles the model in parts. What is not recorded is what the operator is made of: a
part takes as much of its time as it has of its bytes of gradients, which holds for layers that multiply matrices.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sirtaki.autotune.model.graph import Activity
from sirtaki.autotune.model.replayer import replay
from sirtaki.comm.layout import GradientLayout
from sirtaki.errors import ReplayError

from .coarsening import coarse, mean_iteration
from .global_graph import global_graph
from .job_model import GradientKey, JobModel, Piece, Program
from .other_plan import with_plans
from .step_times import replayed
from .unit_costs import unit_cost

COMPILED = "CompiledFunctionBackward"
"""What autograd calls the node that AOTAutograd makes of a graph."""

COST_S, COST_SHARE = 2e-4, 0.004
"""Of each cut: calls into one more graph, and what is not fused across it, as a share of the operator's time."""

WORTH_A_LINE = 0.02
"""Share of the step; for less nobody is asked to change a script."""

INDIFFERENCE = 0.01
"""Share of the step that fewer parts may cost: no replay can be sure of it."""

WHOLE = 1 << 62
"""Bytes that no part has."""

COUNTS = (2, 3, 4, 6, 8, 12, 16)
"""Of parts that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledBackward:
    """One such operator.

    Attributes:
        gradients: that come at its end, in the order of a backward pass, as far as their names tell.
        n_bytes: of each.
        seconds: that it takes, a mean over ranks and iterations.
    """

    gradients: tuple[GradientKey, ...]
    n_bytes: tuple[int, ...]
    seconds: float

    def parts(self, part_bytes: int) -> list[tuple[GradientKey, ...]]:
        """Gradients of each part: it ends where it has as many bytes, as `DDPOptimizer` counts."""
        found: list[list[GradientKey]] = [[]]
        so_far = 0
        for key, size in zip(self.gradients, self.n_bytes, strict=True):
            if so_far >= part_bytes:
                found.append([])
                so_far = 0
            found[-1].append(key)
            so_far += size
        return [tuple(part) for part in found]

    @property
    def cost_s(self) -> float:
        """Of each cut."""
        return COST_S + COST_SHARE * self.seconds


def compiled_backwards(job: JobModel) -> tuple[CompiledBackward, ...]:
    """Those of a step, in their order; empty where iterations or ranks differ in what comes of which."""
    seen: list[list[tuple[frozenset[GradientKey], float]]] = []
    for each in job.iterations:
        for program in each.programs.values():
            blocks = [block for block in _blocks(program) if isinstance(block, _Block)]
            seen.append([(frozenset(block.gradients), block.seconds) for block in blocks])
    if not seen or not seen[0] or any([keys for keys, _ in one] != [keys for keys, _ in seen[0]] for one in seen):
        return ()
    layouts = {buffer.number: buffer.layout for buffer in job.buffers}
    found = []
    for place, (keys, _) in enumerate(seen[0]):
        if any(number not in layouts for number, _ in keys):
            return ()
        ordered = [
            (number, index)
            for number, layout in layouts.items()
            for index in backward_order(layout, sorted(index for other, index in keys if other == number))
        ]
        found.append(
            CompiledBackward(
                gradients=tuple(ordered),
                n_bytes=tuple(
                    layouts[number].sizes[index] * layouts[number].itemsize_bytes for number, index in ordered
                ),
                seconds=statistics.fmean(one[place][1] for one in seen),
            )
        )
    return tuple(found)


def backward_order(layout: GradientLayout, indices: Sequence[int]) -> list[int]:
    """Gradients that came at once, as they would come one by one.

    Autograd hands them on in the reverse order of the forward pass, but for a few that its queue moves to the front.
    These go back to those whose names show that they belong to the same block.
    """
    if not layout.names:
        return list(indices)
    places: dict[str, list[int]] = {}
    for place, index in enumerate(indices):
        places.setdefault(_block_name(layout.names[index]), []).append(place)
    of_block = {name: statistics.median_high(mine) for name, mine in places.items()}
    order = sorted(range(len(indices)), key=lambda place: (of_block[_block_name(layout.names[indices[place]])], place))
    return [indices[place] for place in order]


def _block_name(name: str) -> str:
    """Up to the first number, such as `encoder.layer.3`; without one, the module that the parameter is of."""
    words = name.split(".")
    number = next((place for place, word in enumerate(words) if word.isdecimal()), None)
    return ".".join(words[:-1] if number is None else words[: number + 1])


def sizes_worth_trying(job: JobModel) -> tuple[int, ...]:
    """Bytes of a part, ascending; none where nothing compiled is large enough.

    dPRO's theorem 1 is the filter: operators are fused if the first one's gradients travel in no more time than fusing
    saves. So nothing is cut so small that what a part sends, by itself on a free link, takes no longer than the cut.
    """
    found = compiled_backwards(job)
    if not found:
        return ()
    largest = max(found, key=lambda one: one.seconds * (len(one.gradients) > 1))
    total = sum(largest.n_bytes)
    sizes = {-(-total // count) for count in COUNTS}
    return tuple(
        size for size in sorted(sizes) if _alone_s(job, size) > largest.cost_s and len(largest.parts(size)) > 1
    )


def best_part_bytes(job: JobModel) -> int | None:
    """The size with which a step under the job's plan is shortest, or as good as that in fewer parts.

    None where nothing compiled was recorded, or parts bring less than `WORTH_A_LINE` of the step.
    """
    mean = mean_iteration(job)
    try:
        sizes = sizes_worth_trying(mean)
        whole_s = _step_s(in_parts(mean, WHOLE)) if sizes else 0.0
        steps_s = {size: _step_s(in_parts(mean, size)) for size in sizes}
    except ReplayError:  # nothing is known of when gradients come, or of what units cost
        return None
    if not steps_s or min(steps_s.values()) > (1 - WORTH_A_LINE) * whole_s:
        return None
    return max(size for size, step_s in steps_s.items() if step_s <= (1 + INDIFFERENCE) * min(steps_s.values()))


def _step_s(job: JobModel) -> float:
    return replayed(replay(global_graph(coarse(job)))).iteration_s


def in_words(job: JobModel, part_bytes: int) -> str:
    """What `in_parts` does, such as "the model was compiled in 4 parts"."""
    count = sum(len(one.parts(part_bytes)) for one in compiled_backwards(job))
    return f"the model was compiled in {count} parts"


def line_of_code(part_bytes: int) -> str:
    """That does it."""
    return f"torch.compile(model, backend=hvd.early_gradients(part_bytes={part_bytes}))"


def _alone_s(job: JobModel, n_bytes: int) -> float:
    """The least that so many bytes take."""
    buffer = job.buffers[0]
    cost = unit_cost(job, (buffer.plan.transport, buffer.plan.units[0].algorithm), buffer.ranks)
    fastest = max(job.link.totals) if cost.across and job.link is not None else 1.0
    return cost.startup_s + n_bytes * cost.s_per_byte / fastest


def in_parts(job: JobModel, part_bytes: int) -> JobModel:
    """The job with its compiled backward passes cut there, under the plan that it has.

    Args:
        job: in which all gradients of each buffer come on every rank.
        part_bytes: a part ends where it has as many bytes of gradients.

    Raises:
        ReplayError: there is nothing to cut, or nothing is known of units or of when gradients come.
    """
    found = compiled_backwards(job)
    if not found:
        raise ReplayError("no compiled backward pass was recorded, so there is nothing to compile in parts")
    moved: dict[GradientKey, int] = {}
    layouts = {}
    for buffer in job.buffers:
        order = list(range(len(buffer.layout.sizes)))
        for one in found:
            mine = [index for number, index in one.gradients if number == buffer.number]
            for place, index in zip(sorted(mine), mine, strict=True):
                order[place] = index
        layouts[buffer.number] = buffer.layout.reordered(order)
        moved |= {(buffer.number, index): place for place, index in enumerate(order)}
    iterations = tuple(
        replace(
            each, programs={rank: _cut(program, found, part_bytes, moved) for rank, program in each.programs.items()}
        )
        for each in job.iterations
    )
    buffers = tuple(replace(buffer, layout=layouts[buffer.number]) for buffer in job.buffers)
    changed = replace(job, buffers=buffers, iterations=iterations)
    return with_plans(changed, {buffer.number: buffer.plan for buffer in buffers})


@dataclass(slots=True)
class _Block:
    """Pieces of a compiled operator, and those behind it that hand on its gradients."""

    compute: list[Piece]
    behind: list[Piece]

    @property
    def gradients(self) -> Iterator[GradientKey]:
        return (key for piece in (*self.compute, *self.behind) for key in piece.ready)

    @property
    def seconds(self) -> float:
        return sum(piece.seconds for piece in self.compute)


def _blocks(program: Program) -> Iterator[_Block | Piece]:
    """The program with compiled operators and their gradients together."""
    block: _Block | None = None
    waiting: list[Piece] = []  # may lie between gradients, or behind the last one
    for piece in program:
        if piece.name == COMPILED:
            if block is not None and (block.behind or any(block.gradients)):
                yield block
                yield from waiting
                block, waiting = None, []
            block = block or _Block([], [])
            block.compute.append(piece)
        elif block is None:
            yield piece
        elif piece.waits or any(number < 0 for number, _, _ in piece.issues):  # others depend on where that is
            yield block
            yield from (*waiting, piece)
            block, waiting = None, []
        else:
            waiting.append(piece)
            if piece.ready:
                block.behind += waiting
                waiting = []
    if block is not None:
        yield block
    yield from waiting


def _cut(
    program: Program, found: Sequence[CompiledBackward], part_bytes: int, moved: dict[GradientKey, int]
) -> Program:
    pieces: list[Piece] = []
    compiled = iter(found)
    for block in _blocks(program):
        pieces += _in_parts(block, next(compiled), part_bytes) if isinstance(block, _Block) else [block]
    return tuple(
        replace(piece, ready=tuple((number, moved[number, index]) for number, index in piece.ready))
        if piece.ready
        else piece
        for piece in pieces
    )


def _in_parts(block: _Block, compiled: CompiledBackward, part_bytes: int) -> Iterator[Piece]:
    parts = compiled.parts(part_bytes)
    if len(parts) == 1:
        yield from (*block.compute, *block.behind)
        return
    size = dict(zip(compiled.gradients, compiled.n_bytes, strict=True))
    total = sum(compiled.n_bytes)
    first = block.compute[0]
    handed_s = sum(piece.seconds for piece in block.behind if piece.activity is not Activity.COPY)
    # What is copied is priced by the plan that it is for; one piece stands for that, so that its price is not lost.
    copied_s = sum(piece.seconds for piece in block.behind if piece.activity is Activity.COPY)
    waits = tuple(wait for piece in block.compute for wait in piece.waits)
    for number, part in enumerate(parts):
        share = sum(size[key] for key in part) / total
        yield replace(
            first,
            seconds=block.seconds * share + (compiled.cost_s if number else 0.0),
            waits=() if number else waits,
            ready=(),
            issues=(),
        )
        behind_s = handed_s * len(part) / len(compiled.gradients)
        for key in part:
            yield replace(first, name="AccumulateGrad", seconds=behind_s / len(part), waits=(), ready=(key,), issues=())
    if copied_s:
        copy = next(piece for piece in block.behind if piece.activity is Activity.COPY)
        yield replace(copy, seconds=copied_s, ready=(), issues=())
