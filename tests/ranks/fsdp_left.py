"""A rank that exits while its peers search for a setting. Started by test_fsdp.py."""

import os
import sys

import torch
import torch.distributed as dist
from ranks.fsdp_attached import Tower, loss, sharded


def main() -> None:
    dist.init_process_group("gloo")
    model = sharded(Tower(torch.float32))
    for step in range(6):
        loss(model, dist.get_rank(), step).backward()
    if dist.get_rank() == 0:
        sys.exit()
    try:
        loss(model, dist.get_rank(), 6).backward()
    except RuntimeError as err:
        print(f"told: {type(err).__name__}: {err}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
