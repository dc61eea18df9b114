"""Models of jobs that were compiled as a whole, so that all gradients are ready at the end of one operator."""

from __future__ import annotations

from dataclasses import replace

from fakes.played_jobs import made_job, plan_of

from sirtaki.analysis.job_model import JobModel, ThreadInterval
from sirtaki.analysis.what_if import COMPILED
from sirtaki.autotune.model.replayer import Activity, Phase
from sirtaki.measures import LinkModel

BLOCKS = 4
WEIGHT, BIAS = 400_000, 100_000  # elements: 2 MB per block


def compiled_job(
    link: LinkModel, *, backward_s: float = 0.4, graphs: int = 1, out_of_place: bool = False, ranks: int = 4
) -> JobModel:
    """Return a job of `BLOCKS` blocks with a weight and a bias each, and control flags in the last unit.

    Args:
        link: link between the ranks.
        backward_s: duration of all compiled operators together.
        graphs: number of compiled operators in the backward pass.
        out_of_place: whether the first block's weight is ready first, which autograd's queue may cause.
        ranks: number of ranks.
    """
    sizes = [*[BIAS, WEIGHT] * BLOCKS, 1]
    names = [f"blocks.{block}.{kind}" for block in reversed(range(BLOCKS)) for kind in ("bias", "weight")]
    if out_of_place:
        names.insert(0, names.pop())
        sizes.insert(0, sizes.pop(-2))
    job = made_job(
        durations_s=dict.fromkeys(range(ranks), [0.0] * len(sizes)),
        sizes=sizes,
        plan=plan_of(sizes, (2, 4, 6, len(sizes)), streams=3),
        link=link,
        copy_s=0.0005,
    )
    (buffer,), (each,) = job.buffers, job.iterations
    layout = replace(buffer.layout, names=(*names, "flags"))
    programs = {}
    for rank, program in each.programs.items():
        pieces: list[ThreadInterval] = []
        for piece in program:
            if any(index == len(names) for _, index in piece.ready):
                continue  # the control flags have no gradient
            if any(index % (len(names) // graphs) == 0 for _, index in piece.ready):
                pieces.append(
                    ThreadInterval(
                        activity=Activity.COMPUTE, phase=Phase.BACKWARD, name=COMPILED, seconds=backward_s / graphs
                    )
                )
            pieces.append(replace(piece, name="AccumulateGrad", seconds=1e-5) if piece.ready else piece)
        programs[rank] = tuple(pieces)
    operations = tuple(replace(one, name=layout.describe(*one.key[1:])) for one in each.operations)
    changed = replace(each, programs=programs, operations=operations)
    return replace(job, buffers=(replace(buffer, layout=layout),), iterations=(changed,))
