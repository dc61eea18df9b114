"""Process groups of the backend "sirtaki" compared with Gloo's, by size, in the same run.

    python -m bench.torch_backend [--quick] [--check] [--save] [--ranks 2 4] [--sizes-kib 1 64 1024 25600]

The groups alternate. Each all-reduces and reduce-scatters one tensor through `torch.distributed`. A sample is the
slowest rank's time from a barrier to the last result. All ranks are on this host, so the backend "sirtaki" uses shared
memory and Gloo uses sockets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bench.lib.harness import Report, finish, parser, ratio
from bench.lib.ranks import in_turns, run_ranks, start
from sirtaki.autotune.knobs import KIB

SIRTAKI, GLOO = "sirtaki", "gloo"


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run one rank: time every size in both groups alternately. Collective."""
    import sirtaki.torch.distributed  # noqa: F401

    dist.init_process_group(SIRTAKI, init_method="sirtaki://")
    groups = {SIRTAKI: dist.group.WORLD, GLOO: dist.new_group(backend=GLOO)}
    results = []
    for size_bytes in options["sizes_bytes"]:
        whole = torch.zeros(max(comm.size, size_bytes // 4 // comm.size * comm.size))
        part = torch.zeros(whole.numel() // comm.size)
        calls: dict[str, Callable[[], object]] = {}
        for name, group in groups.items():
            calls[f"{name} all-reduce"] = partial(dist.all_reduce, whole, group=group)
            calls[f"{name} reduce-scatter"] = partial(
                dist.reduce_scatter, part, list(whole.chunk(comm.size)), group=group
            )
        repeats = max(2, min(20, options["sizes_bytes"][-1] // size_bytes))
        samples = in_turns(calls, comm, rounds=options["rounds"], block=repeats, before=0, seed=options["seed"])
        results.append({"size_bytes": size_bytes, "samples": samples})
    dist.destroy_process_group()
    return results


def main() -> int:
    """Run every number of ranks."""
    flags = parser(__doc__)
    flags.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    flags.add_argument("--sizes-kib", type=int, nargs="+")
    flags.add_argument("--rounds", type=int)
    args = flags.parse_args()
    args.sizes_kib = args.sizes_kib or (
        [1, 64, 1024, 25600] if args.quick else [1, 16, 64, 256, 1024, 4096, 25600, 102400]
    )
    args.rounds = args.rounds or (7 if args.quick else 15)
    report = Report(name="torch_backend")
    for ranks in args.ranks:
        options = {"sizes_bytes": [kib * KIB for kib in args.sizes_kib], "rounds": args.rounds, "seed": args.seed}
        for result in run_ranks("bench.torch_backend", ranks, options):
            _add_size(report, ranks, result["size_bytes"], result["samples"])
    return finish(report, args)


def _add_size(report: Report, ranks: int, size_bytes: int, samples: Mapping[str, list[float]]) -> None:
    def peer(name: str) -> str:
        return f"{GLOO} {name.split()[1]}"

    where, who = {"ranks": ranks, "size_KiB": size_bytes // KIB}, "group_and_operation"
    report.compare(samples, peer, time="time_s", ratio="ratio_to_gloo", who=who, where=where)
    if size_bytes >= 25600 * KIB:
        for name in samples:
            if name.startswith(SIRTAKI):
                claim = f"{ranks} ranks, {size_bytes // KIB} KiB: {name} / Gloo"
                report.bar(claim, ratio(samples, name, peer(name)), 1.0)


if __name__ == "__main__":
    sys.exit(start(main, on_rank, init=False))
