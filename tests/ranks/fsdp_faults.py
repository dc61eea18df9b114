"""A rank that dies in the middle of sharded training. Started by test_fsdp.py."""

import os
import signal

import torch
import torch.distributed as dist
from ranks.fsdp_attached import Tower, loss, sharded


def main() -> None:
    dist.init_process_group("gloo")
    model = sharded(Tower(torch.float32))
    loss(model, dist.get_rank(), 0).backward()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for step in range(3):
            loss(model, dist.get_rank(), step).backward()
    except RuntimeError as err:
        print(f"told: {type(err).__name__}: {err}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
