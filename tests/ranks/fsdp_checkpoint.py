"""Save the training state of a sharded model, or load it and continue. Started by test_fsdp.py."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks.fsdp_attached import Tower, loss, sharded, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

BEFORE, AFTER = 3, 3


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train on equal batches on all ranks, so that their number makes no difference."""
    for step in steps:
        optimizer.zero_grad()
        loss(model, 0, step).backward()
        optimizer.step()


def main(act: str, folder: str) -> None:
    dist.init_process_group("gloo")
    model = sharded(Tower())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if act == "save":
        train(model, optimizer, range(BEFORE))
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=folder)
    else:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        train(model, optimizer, range(BEFORE, BEFORE + AFTER))
        alone = Tower()
        train(alone, torch.optim.AdamW(alone.parameters(), lr=0.01), range(BEFORE + AFTER))
        for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(found.detach()), wanted.detach(), rtol=1e-9, atol=1e-9)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
