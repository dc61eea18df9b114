"""Peak memory of a rank in a step of sharded training with several settings, compared with predictions.

Started by test_fsdp.py. The allocator returns memory at once, so that resident memory is used memory. Shards use
sockets, because ranks with shared memory would see their peers' memory, too.
"""

import ctypes
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from sirtaki.autotune.sharded import ShardKnobs, ShardSpace
from sirtaki.torch import fsdp

WIDTH, LAYERS = 724, 8
SLACK = 1.0
"""Tolerance in sizes of the largest module, for the allocator, Gloo, and late threads."""


def peak_bytes(model: nn.Module) -> int:
    """Return the smallest peak of resident memory in several steps, as threads may free memory late. Collective."""
    peaks = []
    for _ in range(5):
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        model(torch.ones(2, WIDTH)).square().mean().backward()
        model.zero_grad()
        peaks.append(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10)
    return min(peaks)


def main(root_times: int) -> None:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)], nn.Linear(WIDTH, root_times * WIDTH))
    for layer in list(model)[:-1]:
        fully_shard(layer)
    fully_shard(model)
    fsdp.attach(model)
    found = fsdp.attached(model)
    assert found is not None
    for _ in range(3):
        peak_bytes(model)
    default, dropped, pairs = found.knobs, found.dropped, (2, 4, 6, 8)
    space = ShardSpace(
        modules=LAYERS + 1, streams=(default.streams,), whole_bytes=found.whole_bytes, dropped=dropped, joinable=pairs
    )

    def peak_with(knobs: ShardKnobs) -> int:
        found.apply(knobs)
        peak_bytes(model)
        return peak_bytes(model)

    largest, before = max(space.whole_bytes), peak_with(default)
    for knobs in (
        replace(default, ahead=4),
        replace(default, behind=2),
        replace(default, scattering=2),
        replace(default, kept=dropped[-1:]),
        replace(default, kept=dropped),
        replace(default, joined=pairs, ahead=1),
        replace(default, joined=pairs, behind=2, scattering=2),
        replace(default, joined=pairs, kept=dropped),
    ):
        more = (peak_with(knobs) - before) / largest
        said = space.extra_bytes(knobs) / largest
        print(f"{knobs.describe()}: {more:+.2f} of the largest module, said at most {said:.2f}")
        assert more < said + SLACK, knobs


if __name__ == "__main__":
    for option, value in ((-3, 1 << 16), (-1, 1 << 16), (-8, 1)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_ARENA_MAX
        assert ctypes.CDLL(None).mallopt(option, value)
    dist.init_process_group("gloo")
    for times in (1, 8):
        main(times)
    dist.destroy_process_group()
