"""The memory of a rank by way of use: optimizer, attached DDP, backend "sirtaki", zero changed lines, attached FSDP2.

    python -m bench.ways [--quick] [--save] [--ranks 2]

A job of each way trains the same network (100 MB of gradients, SGD without momentum) on one host, through its tuning
phase. The benchmark reports the largest peak of resident memory of any rank. It also reports the difference from
PyTorch's own DDP or FSDP2, as a multiple of the gradients' bytes. Shared memory counts in each rank that uses it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

from bench.lib.harness import Report, finish, parser

# {name of a way of use: (its kind, its environment, the way that it is compared with)}
WAYS = {
    "DDP over Gloo": ("gloo", {}, ""),
    "optimizer": ("optimizer", {}, "DDP over Gloo"),
    "attach": ("attach", {}, "DDP over Gloo"),
    'backend "sirtaki"': ("sirtaki", {}, "DDP over Gloo"),
    "zero lines, DDP": ("gloo", {"SIRTAKI_ATTACH": "auto"}, "DDP over Gloo"),
    "FSDP2 over Gloo": ("fsdp", {}, ""),
    "attach, FSDP2": ("fsdp attach", {}, "FSDP2 over Gloo"),
    "zero lines, FSDP2": ("fsdp", {"SIRTAKI_ATTACH": "auto"}, "FSDP2 over Gloo"),
}
LAYERS, WIDTH = 24, 1024

SCRIPT = textwrap.dedent(
    """
    import os, resource, sys, torch, torch.distributed as dist
    from torch import nn
    torch.manual_seed(0)
    kind, layers, width, steps = sys.argv[1], *map(int, sys.argv[2:])
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    if kind == "optimizer":
        import sirtaki.torch as hvd
        hvd.init()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters())
    else:
        dist.init_process_group("sirtaki" if kind == "sirtaki" else "gloo")
        if kind.startswith("fsdp"):
            from torch.distributed.fsdp import fully_shard
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
        else:
            model = nn.parallel.DistributedDataParallel(model)
        if kind == "attach":
            import sirtaki.torch.ddp; sirtaki.torch.ddp.attach(model)
        if kind == "fsdp attach":
            import sirtaki.torch.fsdp; sirtaki.torch.fsdp.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(2, width)
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    os.write(1, b"%d\\n" % resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # in one call, which is atomic
    """
)


def peak_bytes(kind: str, environ: dict[str, str], ranks: int, warmup: int) -> int:
    """Run one job. Return the largest peak of resident memory of its ranks."""
    settings = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": str(warmup), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words = [kind, str(LAYERS), str(WIDTH), str(3 * warmup)]
    job = subprocess.run(
        [*command, "--no-python", sys.executable, "-c", SCRIPT, *words],
        env={**os.environ, **settings, **environ},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return 1024 * max(map(int, job.stdout.split()))


def main() -> int:
    """Run one job of each way."""
    flags = parser(__doc__)
    flags.add_argument("--ranks", type=int, default=2)
    args = flags.parse_args()
    report, peaks = Report(name="ways"), {}
    gradients = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    for name, (kind, environ, peer) in WAYS.items():
        peaks[name] = peak_bytes(kind, environ, args.ranks, 10 if args.quick else 40)
        print(f"{name}: {peaks[name] / 1e6:.0f} MB", flush=True)
        more = peaks[name] - peaks[peer or name]
        row = {"way": name, "ranks": args.ranks, "peak_mb": round(peaks[name] / 1e6), "more_mb": round(more / 1e6)}
        report.rows.append({**row, "more_of_gradients": round(more / gradients, 2)})
    report.notes.append(f"{gradients / 1e6:.0f} MB of gradients; a rank's largest resident memory; one host")
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
