"""A rank that dies during sharded training, or ("caught") skips a step. Started by test_fsdp.py."""

import os
import signal
import sys
from contextlib import suppress

import torch
import torch.distributed as dist
from ranks.fsdp_attached import Tower, loss, sharded
from torch import nn


class Alike(Tower):
    """A tower of blocks of one size only."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.first, self.last = nn.Identity(), nn.Identity()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))


def fail(module: nn.Module, args: object) -> None:
    raise ArithmeticError


def main(*words: str) -> None:
    dist.init_process_group("gloo")
    model = sharded(Alike() if words else Tower(torch.float32))
    loss(model, dist.get_rank(), 0).backward()
    dist.barrier()
    try:
        if dist.get_rank() == 1 and words:
            fails = model.blocks[2].register_forward_pre_hook(fail)
            with suppress(ArithmeticError):
                loss(model, dist.get_rank(), 0)
            fails.remove()
            if hasattr(model, "reset_iter_state"):
                model.reset_iter_state()
        elif dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for step in range(3):
            loss(model, dist.get_rank(), step).backward()
    except RuntimeError as err:
        print(f"told: {type(err).__name__}: {err}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
