"""What Sirtaki's way through a GPU costs at world size 1, where nothing has to be sent: overhead alone.

    python -m bench.gpu [--quick] [--check] [--save] [--trace PATH]

Takes 3 minutes on one GPU; without one it says so and ends with status 0.

*Step*: forward, backward with synchronisation, update, of three networks. Sirtaki leaves a job of one rank alone, so
its way is taken on purpose here: hooks, packing on a side stream, an all-reduce a unit on several communicators, and
views of the flat buffer afterwards. DDP does the same with NCCL, one bucket after the other. *Pack*: the throughput of
packing all gradients of a model, against a copy of as many bytes on the same GPU. *Hook*: host time a gradient of all
that runs in hooks. *Trace*: one step under torch's profiler, with the time in which packing and all-reduces run beside
other kernels.

Bars: step ≤ 1.00 of DDP, pack ≥ 80 % of the copy.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.lib.contenders import LEARNING_RATE
from bench.lib.harness import Report, Spread, alternate, finish, parser, ratios

# ── Networks of the size that people train on GPUs, built from torch's own parts, with a batch each ──────────────────

GpuModel = tuple[nn.Module, torch.Tensor]


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """`(n, inputs, h, w)` → `(n, 4 * width, h / stride, w / stride)`."""
        return torch.relu(self.path(images) + self.around(images))


def resnet50_like(device: torch.device, *, batch: int = 64) -> GpuModel:
    """ResNet-50: 25.6 M parameters in 161 tensors."""
    blocks: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for number in range(count):
            blocks.append(Bottleneck(inputs, width, 2 if stage and not number else 1))
            inputs = 4 * width
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))
    return model.to(device), torch.randn(batch, 3, 224, 224, device=device)


class TokenModel(nn.Module):
    """An embedding, transformer layers, and a projection onto the vocabulary (BERT) or not."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, length: int, causal: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=causal
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.causal = causal

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`(n, length)` token numbers → `(n, length, vocabulary)`."""
        length = tokens.shape[1]
        hidden = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device) if self.causal else None
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=self.causal)
        logits: torch.Tensor = self.head(hidden)
        return logits


def bert_base_like(device: torch.device, *, batch: int = 8) -> GpuModel:
    """BERT-Base's encoder with its vocabulary: 12 layers of 768, sequences of 128."""
    model = TokenModel(vocabulary=30522, width=768, layers=12, length=128, causal=False)
    return model.to(device), torch.randint(0, 30522, (batch, 128), device=device)


def gpt2_like(device: torch.device, *, batch: int = 4) -> GpuModel:
    """GPT-2's smallest: 12 causal layers of 768, sequences of 256."""
    model = TokenModel(vocabulary=50257, width=768, layers=12, length=256, causal=True)
    return model.to(device), torch.randint(0, 50257, (batch, 256), device=device)


GPU_MODELS: Mapping[str, Callable[[torch.device], GpuModel]] = {
    "resnet50-like": resnet50_like,
    "bert-base-like": bert_base_like,
    "gpt2-like": gpt2_like,
}


# ── The benchmark ────────────────────────────────────────────────────────────────────────────────────────────────────

STREAMS = 4
UNIT_BYTES = 16 * 1024 * 1024
WARM_STEPS = 12
"""Sirtaki learns the order in the first two, DDP rebuilds its buckets after the first."""


class OneRank:
    """A training loop; what is called after the backward pass is what differs."""

    def __init__(self, made: GpuModel) -> None:
        self.model, self.batch = made
        self.forward: nn.Module = self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)

    def synchronise(self) -> None:
        """Nothing, with one rank and no framework."""

    def step(self) -> None:
        """One training step; nothing here waits for the GPU."""
        self.forward(self.batch).sum().backward()
        self.synchronise()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Ddp(OneRank):
    """PyTorch's DistributedDataParallel over NCCL."""

    def __init__(self, made: GpuModel) -> None:
        super().__init__(made)
        self.forward = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)


class Sirtaki(OneRank):
    """The whole way of a gradient, on purpose. `postscale` other than 1 makes NCCL do something even here."""

    def __init__(self, made: GpuModel, *, postscale: float = 1.0) -> None:
        """`hvd.init()` comes first."""
        from sirtaki.autotune.knobs import Knobs
        from sirtaki.comm.gradients.buffers import Reduction
        from sirtaki.comm.gradients.synchroniser import Synchroniser
        from sirtaki.engine import job
        from sirtaki.engine.tuning.warmup import open_router

        super().__init__(made)
        current = job.current()
        named = list(self.model.named_parameters())
        router = open_router(current.control, current.settings, [param for _, param in named])
        transport, algorithm = router.routes[0]
        knobs = Knobs(
            unit_bytes=UNIT_BYTES,
            streams=min(STREAMS, router.max_streams()),
            transport=transport,
            algorithm=algorithm,
        )
        self.description = knobs.describe()
        self.sync = Synchroniser(
            [param for _, param in named],
            [name for name, _ in named],
            control=current.control,
            router=router,
            reduction=Reduction(postscale=postscale),
            default_plan=knobs.to_plan,
        )
        self.router = router
        self.hook_s, self.hooked = 0.0, 0
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]  # torch's
            for index, (_, param) in enumerate(named)
        ]

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(param: torch.Tensor) -> None:
            begin_s = time.perf_counter()
            assert param.grad is not None
            self.sync.ready(index, param.grad, param.grad._version)
            self.hook_s += time.perf_counter() - begin_s
            self.hooked += 1

        return hook

    def synchronise(self) -> None:
        """Orders the update after the last reduced unit."""
        self.sync.finish()

    def close(self) -> None:
        """Frees communicators and buffers."""
        for hook in self._hooks:
            hook.remove()
        torch.cuda.synchronize()
        self.sync.close()
        self.router.close()


def step_s(contender: OneRank, steps: int) -> float:
    """Seconds a step by the GPU's clock, over `steps` in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
    torch.cuda.synchronize()
    begin.record()
    for _ in range(steps):
        contender.step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / steps


def measure_steps(
    report: Report, name: str, make: Callable[[torch.device], GpuModel], *, rounds: int, steps: int
) -> None:
    """Adds a row and a bar for one model."""
    device = torch.device("cuda", torch.cuda.current_device())
    sirtaki = Sirtaki(make(device))
    contenders: dict[str, OneRank] = {"none": OneRank(make(device)), "ddp": Ddp(make(device)), "sirtaki": sirtaki}
    for contender in contenders.values():
        step_s(contender, WARM_STEPS)
    sirtaki.hook_s, sirtaki.hooked = 0.0, 0
    samples = alternate({who: (lambda one=one: step_s(one, steps)) for who, one in contenders.items()}, rounds)
    against_ddp = ratios(samples["sirtaki"], samples["ddp"])
    report.rows.append(
        {
            "model": name,
            "gradients": len(sirtaki.sync.layouts[0].sizes) - 1,
            "mib": sirtaki.sync.layouts[0].total_bytes / 2**20,
            "knobs": sirtaki.description,
            **{f"{who}_s": Spread.of(taken) for who, taken in samples.items()},
            "of_ddp": against_ddp,
            "of_none": ratios(samples["sirtaki"], samples["none"]),
            "hook_us": 1e6 * sirtaki.hook_s / max(1, sirtaki.hooked),
        }
    )
    report.bar(f"{name}: step over DDP's at world size 1", against_ddp.median, 1.0)
    sirtaki.close()


def measure_packing(report: Report, name: str, make: Callable[[torch.device], GpuModel], *, rounds: int) -> None:
    """Adds the throughput of packing a model's gradients against a plain copy."""
    device = torch.device("cuda", torch.cuda.current_device())
    model, _ = make(device)
    gradients = [torch.randn_like(param) for param in model.parameters()]
    sizes = [gradient.numel() for gradient in gradients]
    flat, other = (torch.empty(sum(sizes), device=device) for _ in range(2))
    views = [part.view_as(gradient) for part, gradient in zip(flat.split(sizes), gradients, strict=True)]
    taken = alternate(
        {
            "pack": lambda: _gpu_seconds(lambda: torch._foreach_copy_(views, gradients)),
            "unpack": lambda: _gpu_seconds(lambda: torch._foreach_copy_(gradients, views)),
            "copy": lambda: _gpu_seconds(lambda: other.copy_(flat)),
        },
        rounds,
    )
    row: dict[str, Any] = {"model": name, "mib": 4 * sum(sizes) / 2**20}
    for what in ("pack", "unpack"):
        share = ratios(taken["copy"], taken[what]).median
        row[f"{what}_of_copy"] = share
        row[f"{what}_gb_per_s"] = 2 * 4 * sum(sizes) / statistics.median(taken[what]) / 1e9
        report.bar(f"{name}: copy over {what} throughput", 1 / share, 1 / 0.8)
    report.rows.append(row)


def _gpu_seconds(work: Callable[[], object], times: int = 10) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
    begin.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def overlap_s(ours: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """How long at least one of `ours` runs while at least one of `others` does; spans are (begin, end)."""
    edges = sorted(
        [(moment, which, change) for which, spans in enumerate((ours, others)) for begin, end in spans
         for moment, change in ((begin, 1), (end, -1))]
    )  # fmt: skip
    running, together, last = [0, 0], 0.0, 0.0
    for moment, which, change in edges:
        if all(running):
            together += moment - last
        running[which] += change
        last = moment
    return together


def trace_step(report: Report, make: Callable[[torch.device], GpuModel], path: Path) -> None:
    """Writes a Chrome trace of one step, and adds how much of packing and all-reduces ran beside other kernels."""
    device = torch.device("cuda", torch.cuda.current_device())
    sirtaki = Sirtaki(make(device), postscale=0.5)
    step_s(sirtaki, WARM_STEPS)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        sirtaki.step()
        torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(path))
    spans: dict[str, list[tuple[float, float]]] = {"all-reduce": [], "pack": [], "other": []}
    for event in profile.events() or []:
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        kind = next((kind for word, kind in KINDS.items() if word in event.name.lower()), "other")
        spans[kind].append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    for kind in ("all-reduce", "pack"):
        busy = sum(end - begin for begin, end in spans[kind])
        report.rows.append(
            {
                "model": "trace",
                "kernels": kind,
                "count": len(spans[kind]),
                "busy_s": busy,
                "beside_others_s": overlap_s(spans[kind], spans["other"]),
            }
        )
    sirtaki.close()


KINDS = {"nccl": "all-reduce", "onerankreduce": "all-reduce", "multi_tensor_apply": "pack", "foreach": "pack"}
"""Parts of kernels' names. Updates are foreach kernels, too, but run when nothing else does."""


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--trace", type=Path, metavar="PATH", help="write a Chrome trace of one step there")
    args = flags.parse_args()
    if not torch.cuda.is_available():
        print("bench.gpu: PyTorch sees no GPU here; nothing was measured")
        return 0
    import sirtaki.torch as hvd

    hvd.init()
    if hvd.size() != 1:
        raise SystemExit("bench.gpu runs on one rank: python -m bench.gpu")
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    report = Report(name="gpu", settings={"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda})
    rounds, steps = (3, 5) if args.quick else (9, 10)
    for name, make in GPU_MODELS.items():
        measure_steps(report, name, make, rounds=rounds, steps=steps)
        measure_packing(report, name, make, rounds=rounds)
        torch.cuda.empty_cache()
    if args.trace:
        trace_step(report, GPU_MODELS["bert-base-like"], args.trace)
    dist.destroy_process_group()
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
