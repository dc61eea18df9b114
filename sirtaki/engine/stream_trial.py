"""Measure whether all-reduces on two NCCL streams overlap, and how much time that saves.

    sirtakirun -np 8 python -m sirtaki.engine.stream_trial

`sirtaki doctor` runs this program on all GPUs of a machine. Rank 0 prints one JSON object. Each rank uses the GPU of
its local rank.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass

import numpy as np
import torch

from sirtaki.autotune.knobs import MIB
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.plan import CommPlan, TransportKind, Unit
from sirtaki.comm.router import Router
from sirtaki.measures import faster

from . import job as job
from .tuning.pipeline_target import open_router

UNITS, UNIT_BYTES = 16, 2 * MIB
ROUNDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTrial:
    """Times of all-reducing the same units (buckets) on one CUDA stream (with its NCCL communicator) and on two.

    Attributes:
        transport: name of the transport that was measured, such as "nccl".
        max_streams: maximum number of streams on this machine.
        one_s: median seconds on one stream, on the slowest rank.
        two_s: median seconds on two streams, on the slowest rank. None if two streams are not possible.
    """

    transport: str
    max_streams: int
    one_s: float
    two_s: float | None

    def describe(self) -> str:
        """Return a sentence for `sirtaki doctor` that states the two times."""
        if self.transport != TransportKind.NCCL.value:
            return "gradients go through host memory, because NCCL does not connect these GPUs"
        if self.two_s is None:
            return "one NCCL stream only"
        what = "overlap" if self.one_s > 1.03 * self.two_s else "do not overlap, or one fills the link"
        gain = faster(self.one_s, self.two_s)
        return f"two NCCL streams {what}: {UNITS} × {UNIT_BYTES // MIB} MiB are reduced {gain} than on one"


def try_streams(control: ControlPlane, router: Router) -> StreamTrial:
    """Time all-reduces on one and on two CUDA streams, alternating. Collective.

    `router`, which sends units (buckets) over the transports, provides the default transport and algorithm.
    """
    transport, _ = router.routes[0]
    limit = router.max_streams()
    numel = UNIT_BYTES // 4
    buffer = router.allocate(UNITS * numel, torch.float32)
    times_s: dict[int, list[float]] = {streams: [] for streams in (1, 2) if streams <= limit}
    for round_number in range(ROUNDS + 1):
        for streams in times_s:
            units = tuple(
                Unit(start=index * numel, stop=(index + 1) * numel, stream=index % streams) for index in range(UNITS)
            )
            plan = CommPlan(numel=UNITS * numel, units=units, streams=streams, transport=transport)
            router.open_plan(plan)
            control.barrier()
            begin = router.device.record_event(timed=True)
            router.wait_for(router.all_reduce_plan(buffer, plan, scale=0.0))
            end = router.device.record_event(timed=True)
            router.device.wait_for(end)
            if round_number:  # Do not count the times of the first round, because NCCL opens connections in it.
                times_s[streams].append(router.device.elapsed_s(begin, end))
    slowest = {
        streams: float(control.maximum(np.array([statistics.median(taken)]))[0]) for streams, taken in times_s.items()
    }
    return StreamTrial(transport=transport.value, max_streams=limit, one_s=slowest[1], two_s=slowest.get(2))


def main() -> None:
    """Time all-reduces on one and on two CUDA streams of the GPUs of this job. Print the result on rank 0.

    Collective.
    """
    job.init()
    current = job.current()
    if torch.cuda.is_available():
        torch.cuda.set_device(current.control.local_rank)
    somewhere = torch.zeros(1, dtype=torch.float32, device="cuda" if torch.cuda.is_available() else "cpu")
    router = open_router(current.control, current.settings, [somewhere])
    trial = try_streams(current.control, router)
    router.close()
    if current.control.rank == 0:
        print(json.dumps({**asdict(trial), "words": trial.describe()}), flush=True)
    job.shutdown()


if __name__ == "__main__":
    main()
