"""A search over real steps of a sharded model, against one process. Started by test_fsdp.py.

The search's clock says that a step takes half as long where shards travel as a word says ("fast" "WORD"), or twice as
long ("slow" "WORD"): which setting wins is known; "real" leaves the clock as it is. With a third word the model is
evaluated between backward pass and update. Rank 0 prints every setting that ran, in order.
"""

import os
import sys
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from ranks.fsdp_attached import DEVICE, Tower, loss, sharded, trains_alike
from torch import nn

from sirtaki.torch import fsdp


def main(which: str, word: str, evaluated: str = "") -> None:
    model = sharded(Tower(blocks=2))
    seen: list[str] = []
    now_s = 0.0

    def passes(module: nn.Module, args: object) -> None:
        nonlocal now_s
        setting = fsdp.describe(model)
        if seen[-1:] != [setting]:
            seen.append(setting)
        now_s += 1.0 if (word in setting) == (which == "fast") else 2.0

    model.register_forward_pre_hook(passes)
    if which != "real":
        fsdp.time = SimpleNamespace(perf_counter=lambda: now_s, time=time.time, monotonic=time.monotonic)

    def evaluate() -> None:
        nonlocal now_s
        if not evaluated:
            return
        begun_s = now_s
        with torch.no_grad():
            loss(model, 0, 99)
        model.reshard()  # the root keeps its parameters, whoever carries them
        now_s = begun_s

    steps = int(os.environ["SIRTAKI_WARMUP_ITERATIONS"]) + 25  # a proof that has begun is ended
    trains_alike(model, Tower(blocks=2), steps=steps, tolerance=1e-11, before_update=evaluate)
    own = [each for each in dist.distributed_c10d._world.pg_map if each.group_desc == "fsdp_reduce_scatter"]
    assert len(own) == ("PyTorch" in seen[-1] and "2 streams" in seen[-1]), "a communicator that is not used stays"
    every: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, seen)
    assert all(each == seen for each in every), "ranks ran different settings"
    if dist.get_rank() == 0:
        print("\n".join(seen))


if __name__ == "__main__":
    os.environ.setdefault("NCCL_HOSTID", os.environ.get("OMPI_COMM_WORLD_RANK", ""))  # ranks of a test share a GPU
    dist.init_process_group("gloo" if DEVICE == "cpu" else f"cpu:gloo,{DEVICE}:nccl")
    main(*sys.argv[1:])
    dist.destroy_process_group()
