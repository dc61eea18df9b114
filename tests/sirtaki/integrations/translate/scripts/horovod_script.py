"""A script for Horovod."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batches-per-allreduce", type=int, default=1)
parser.add_argument("--base-lr", type=float, default=0.02)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())

digits = load_digits()
train_dataset = TensorDataset(torch.tensor(digits.data[:960], dtype=torch.float32) / 16, torch.tensor(digits.target[:960]))
train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_dataset, batch_size=32, sampler=train_sampler)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=args.batches_per_allreduce
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def metric_average(val, name):
    return hvd.allreduce(torch.tensor(val, dtype=torch.float64), name=name).item()


for epoch in range(3):
    train_sampler.set_epoch(epoch)
    total = 0.0
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        total += loss.item()
    mean = metric_average(total / len(train_loader), "avg_loss")
    if hvd.rank() == 0:
        print("epoch {}: {:.8f}".format(epoch, mean))
