"""Scikit-learn's digits under DistributedDataParallel, over the backend "sirtaki".

torchrun --nproc-per-node 2 examples/torch_backend.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import sirtaki.torch.distributed  # noqa: F401  (registers the backend; not needed from PyTorch 2.5 on)

dist.init_process_group("sirtaki")
torch.manual_seed(0)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(10):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = nn.functional.cross_entropy(ddp(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    mean_loss = loss.detach()
    dist.all_reduce(mean_loss, op=dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: loss {mean_loss.item():.4f}", flush=True)

dist.destroy_process_group()
