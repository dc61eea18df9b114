"""Ranks of one process group that do not do what the others do. Started by test_group_lanes.py."""

import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

import sirtaki.torch.distributed  # noqa: F401


def main(fault: str, operation: str) -> None:
    dist.init_process_group("sirtaki", timeout=timedelta(seconds=2 if fault == "stand_still" else 60))
    big = torch.ones(500_000)
    gathered = [torch.empty_like(big) for _ in range(dist.get_world_size())]
    act = partial(dist.all_reduce, big) if operation == "sum" else partial(dist.all_gather, gathered, big)
    if fault != "before":
        act()
    dist.barrier()
    if dist.get_rank() == 1:
        match fault:
            case "before" | "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "destroy":
                dist.destroy_process_group()
                return
            case "stand_still":
                time.sleep(8)
                os._exit(0)
    begin_s = time.monotonic()
    try:
        act()
    except RuntimeError as err:
        print(f"told after {time.monotonic() - begin_s:.1f} s: {type(err).__name__}: {err}", flush=True)
    try:
        act()
    except RuntimeError as err:
        print(f"again: {type(err).__name__}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
