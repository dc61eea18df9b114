"""GPU memory: peak of PyTorch's allocator compared with DDP's, and memory of a communicator of one rank.

Bar: at most 1.02 of the peak of DDP with `gradient_as_bucket_view=True`. `attach` must free DDP's buckets. The part
`kernels` measures the memory of a communicator between two ranks.
"""

from __future__ import annotations

import gc
import statistics

from bench.gpu.contenders import GpuAttached, GpuDdp, OneRank, Optimizer, open_group
from bench.gpu.models import models_for, small_mlp
from bench.gpu.runner import RankRun
from sirtaki.comm.nccl_streams.transport import CommunicatorKey

STEPS = 5
COMMUNICATORS = 4


def run(run: RankRun) -> None:
    """Measure the contenders' peaks one by one, then memory over many steps, then communicators."""
    place = run.place
    open_group(place, run.rank, run.size)
    name, make = list(models_for(dry=place.dry).items())[1]  # A transformer, because its activations are small.
    peaks: dict[str, int] = {}
    for who, contender in {"none": OneRank, "ddp": GpuDdp, "optimizer": Optimizer, "attached": GpuAttached}.items():
        with run.check(f"{name}: peak of {who}") as found:
            loop = contender(place, make(place.torch_device))
            gradients = 4 * sum(param.numel() for param in loop.model.parameters())
            for _ in range(STEPS):
                loop.step()
            peaks[who] = found["bytes"] = place.peak_bytes(loop.step)
            found["gradients_bytes"] = gradients
            if isinstance(loop, GpuAttached):
                found["freed_by_attach_bytes"] = loop.freed_bytes
                assert loop.freed_bytes >= 0.95 * gradients, "attach() has not freed DDP's buckets"
            loop.close()
            del loop
            gc.collect()
    for who, peak in peaks.items():
        run.report.rows.append({"model": name, "contender": who, "peak_mib": peak / 2**20})
        if who in ("optimizer", "attached"):
            run.report.bar(f"{name}: peak with {who} over DDP's", peak / peaks["ddp"], 1.02)
    with run.check("memory stays flat over many steps") as found:
        loop, used, goes_on = Optimizer(place, small_mlp(place.torch_device)), list[int](), run.until(0.5)
        while len(used) < 30 or (goes_on() and len(used) < (30 if place.dry else 1000)):
            loop.step()
            used.append(place.allocated_bytes())
        found |= {"steps": len(used), "first_bytes": max(used[:20]), "later_bytes": max(used[20:])}
        assert max(used[20:]) <= 1.01 * max(used[:20])
        loop.close()
    with run.check("bytes of each communicator") as found:
        opener = place.opener(run.control)
        for ctas in (1, 8, None):
            groups, taken, reported = [], list[int](), list[int]()
            for stream in range(COMMUNICATORS):
                before = place.used_bytes()
                groups.append(opener.open(CommunicatorKey(stream, ctas)))
                taken.append(place.used_bytes() - before)
                reported.append(groups[-1].memory_bytes())
            for group in groups:
                group.close()
            label = "as NCCL decides" if ctas is None else ctas
            row = {
                "ctas": label,
                "first_mib": taken[0] / 2**20,
                "later_mib": statistics.median(taken[1:]) / 2**20,
                "nccl_reports_mib": statistics.median(reported) / 2**20,
            }
            run.report.rows.append(row)
            found[str(label)] = taken
