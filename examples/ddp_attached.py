"""Scikit-learn's digits under DistributedDataParallel. Sirtaki reduces the gradients and tunes the reduction.

torchrun --nproc-per-node 2 examples/ddp_attached.py
"""

import contextlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import sirtaki.torch.ddp

PASSES = 2  # backward passes accumulated per step

dist.init_process_group("gloo")
torch.manual_seed(0)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
ddp = DistributedDataParallel(model)
sirtaki.torch.ddp.attach(ddp)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(10):
    sampler.set_epoch(epoch)
    for number, (images, labels) in enumerate(loader, start=1):
        complete = number % PASSES == 0
        with contextlib.nullcontext() if complete else ddp.no_sync():
            loss = nn.functional.cross_entropy(ddp(images), labels) / PASSES
            loss.backward()
        if complete:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    mean_loss = loss.detach()
    dist.all_reduce(mean_loss)
    mean_loss /= dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: loss {PASSES * mean_loss.item():.4f}", flush=True)

dist.destroy_process_group()
