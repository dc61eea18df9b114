"""Train with a loss that becomes NaN, without a setting that looks for NaN."""

import math

import torch
from torch import nn

import sirtaki.torch as hvd

hvd.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
for iteration in range(30):
    optimizer.zero_grad()
    inputs = torch.full((2, 4), math.nan if (hvd.rank(), iteration) == (1, 12) else 1.0)
    model(inputs).sum().backward()
    optimizer.step()
hvd.shutdown()
