"""Digits with Accelerate, which does not shard on CPUs: the script does, attached or not. Started by test_fsdp.py."""

import sys

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from sirtaki.torch import fsdp

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
for layer in (model[0], model[2], model):
    fully_shard(layer)
if "attach" in sys.argv:
    fsdp.attach(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(data, batch_size=64, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0))
optimizer, loader = accelerator.prepare(optimizer, loader)
for epoch in range(2):
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    mean_loss = accelerator.reduce(loss.detach(), reduction="mean")
    accelerator.print(f"epoch {epoch + 1}: loss {mean_loss.item():.4f}", flush=True)
assert bool(fsdp.describe(model)) == ("attach" in sys.argv)
accelerator.end_training()
