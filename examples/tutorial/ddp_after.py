"""Scikit-learn's digits with gradients accumulated and clipped.

sirtakirun -np 2 python examples/tutorial/ddp_after.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import sirtaki.torch as hvd

PASSES = 2  # backward passes accumulated per step

hvd.init()
torch.manual_seed(0)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=PASSES
)

for epoch in range(10):
    sampler.set_epoch(epoch)
    for number, (images, labels) in enumerate(loader, start=1):
        loss = nn.functional.cross_entropy(model(images), labels) / PASSES
        loss.backward()
        if number % PASSES == 0:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
    mean_loss = hvd.allreduce(loss.detach(), name="loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {PASSES * mean_loss.item():.4f}", flush=True)
