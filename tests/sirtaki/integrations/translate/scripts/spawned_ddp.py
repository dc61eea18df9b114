"""DistributedDataParallel started by mp.spawn, in the style of PyTorch's tutorial."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def ddp_setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def main(rank, world_size, total_epochs):
    ddp_setup(rank, world_size)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 20), torch.randn(256, 1))
    loader = DataLoader(data, batch_size=32, shuffle=False, sampler=DistributedSampler(data))
    model = DDP(nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(total_epochs):
        loader.sampler.set_epoch(epoch)
        for source, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(source), targets)
            loss.backward()
            optimizer.step()
        print(f"[{rank}] epoch {epoch} loss {loss.item():.7f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = torch.cuda.device_count() or 1
    mp.spawn(main, args=(world_size, 2), nprocs=world_size)
