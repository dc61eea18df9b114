"""Train for some steps, and print the ranks on which SQLAlchemy is loaded ahead."""

import torch

import sirtaki.torch as hvd
from sirtaki.engine.tuning import memory

memory.load_ahead = lambda registry: print("loads ahead", flush=True)
hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
hvd.shutdown()
