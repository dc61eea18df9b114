"""A script for DistributedDataParallel and torchrun, with no_sync, an averaged metric and a barrier."""

import contextlib
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup():
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def reduce_mean(value, device):
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor.item() / dist.get_world_size()


def main():
    setup()
    rank = dist.get_rank()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(5)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data[:1024], dtype=torch.float32) / 16, torch.tensor(digits.target[:1024]))
    sampler = DistributedSampler(data, shuffle=True, seed=9)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    model = DDP(model, device_ids=[local_rank] if torch.cuda.is_available() else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loss_fn = nn.CrossEntropyLoss()
    accumulate = 2
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = 0.0
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % accumulate == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = loss_fn(model(x.to(device)), y.to(device)) / accumulate
                loss.backward()
            total += loss.item() * accumulate
            if last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad()
        mean = reduce_mean(total / len(loader), device)
        if rank == 0:
            print(f"epoch {epoch} loss {mean:.8f}")
            torch.save(model.module.state_dict(), "ddp_model.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
