"""Step times at world size 1, where nothing is sent: overhead of Sirtaki on the GPU compared with DDP's.

"alone" is the optimizer of a job with one rank. "optimizer" and "attached" have the reducers of a job with several
ranks.
Bars: a step of each of the three takes at most 1.00 of DDP's. The throughput of packing is at least 0.8 of a copy's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from bench.gpu.contenders import AloneOptimizer, Contender, GpuAttached, GpuDdp, OneRank, Optimizer, open_group
from bench.gpu.models import GpuModel, models_for
from bench.gpu.runner import RankRun
from bench.lib.harness import ratios
from sirtaki.comm.plan import alignment

CONTENDERS: dict[str, Contender] = {
    "none": OneRank,
    "ddp": GpuDdp,
    "alone": AloneOptimizer,
    "optimizer": Optimizer,
    "attached": GpuAttached,
}
STEPS = 5
"""Steps per sample."""


def run(run: RankRun) -> None:
    """Measure the models one by one, each for its share of the part's time."""
    place, models = run.place, models_for(dry=run.place.dry)
    torch.set_float32_matmul_precision("high")  # Allow TF32, as in most trainings of such models.
    run.report.settings["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    open_group(place, run.rank, run.size)
    for position, (name, make) in enumerate(models.items()):
        with run.check(f"{name}: steps are timed"):
            measure(run, name, make, run.until(1 / (len(models) - position)))
        with run.check(f"{name}: packing is timed"):
            pack(run, name, make(place.torch_device)[0])


def measure(
    run: RankRun, name: str, make: Callable[[torch.device], GpuModel], goes_on: Callable[[], bool], *, fewest: int = 3
) -> None:
    """Time contenders alternately. A round has one sample of each, so ratios compare neighbours."""
    place, report = run.place, run.report
    loops = {who: contender(place, make(place.torch_device)) for who, contender in CONTENDERS.items()}
    for loop in loops.values():
        loop.warm_up()
    samples: dict[str, list[float]] = {who: [] for who in loops}
    host_s: dict[str, list[float]] = {who: [] for who in loops}
    names, rounds = list(loops), 0
    while rounds < fewest or (goes_on() and rounds < (fewest if place.dry else 60)):
        turn = rounds % len(names)
        for who in names[turn:] + names[:turn]:
            begin_s, loop = time.perf_counter(), loops[who]
            samples[who].append(place.seconds(loop.step, STEPS))
            host_s[who].append((time.perf_counter() - begin_s) / STEPS)
        rounds += 1
    setting = loops["optimizer"].describe()  # type: ignore[attr-defined]  # an Optimizer's
    columns = {"setting": {"optimizer": setting}, "host_s": {who: statistics.median(host_s[who]) for who in loops}}
    report.compare(samples, "ddp", where={"model": name}, **columns)
    if not place.dry:
        for who in ("alone", "optimizer", "attached"):
            report.bar(f"{name}: {who}'s step over DDP's", ratios(samples[who], samples["ddp"]).median, 1.0)
    for loop in loops.values():
        loop.close()


def pack(run: RankRun, name: str, model: torch.nn.Module) -> None:
    """Time packing and unpacking all gradients of a model, compared with a copy of as many bytes.

    Gradients are aligned as in Sirtaki's flat buffers. "misaligned" packs them without gaps, 4 bytes off.
    """
    place = run.place
    gradients = [torch.randn_like(param) for param in model.parameters()]
    sizes = [gradient.numel() for gradient in gradients]
    piece = alignment("cuda", 4)
    padded = [-(-size // piece) * piece for size in sizes]
    flat, other = (torch.empty(sum(padded), device=place.torch_device) for _ in range(2))

    def laid_out(buffer: torch.Tensor, room: Sequence[int]) -> list[torch.Tensor]:
        parts = zip(buffer.split(list(room)), gradients, strict=True)
        return [part[: gradient.numel()].view_as(gradient) for part, gradient in parts]

    views = laid_out(flat, padded)
    close = laid_out(torch.empty(1 + sum(sizes), device=place.torch_device)[1:], sizes)
    works: dict[str, Callable[[], object]] = {
        "pack": lambda: torch._foreach_copy_(views, gradients),
        "misaligned": lambda: torch._foreach_copy_(close, gradients),
        "unpack": lambda: torch._foreach_copy_(gradients, views),
        "copy": lambda: other.copy_(flat),
    }
    for work in works.values():
        work()
    samples: dict[str, list[float]] = {what: [] for what in works}
    for _ in range(9):
        for what, work in works.items():
            samples[what].append(place.seconds(work, 10))
    slower = ratios(samples["misaligned"], samples["pack"]).median
    row = {"model": name, "mib": flat.numel() * 4 / 2**20, "misaligned_of_pack": slower}
    for what in ("pack", "unpack"):
        share = ratios(samples["copy"], samples[what]).median
        row |= {f"{what}_of_copy": share, f"{what}_gb_per_s": 8e-9 * flat.numel() / statistics.median(samples[what])}
        if not place.dry:
            run.report.bar(f"{name}: copy over {what} throughput", 1 / share, 1 / 0.8)
    run.report.rows.append(row)
