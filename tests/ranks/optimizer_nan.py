"""Train with non-finite gradients on given ranks in given iterations, with SIRTAKI_CHECK_NAN=1."""

import math

import torch
from torch import nn

import sirtaki.torch as hvd

BAD = {(1, 2): math.nan, (0, 5): math.inf, (1, 5): math.inf}
"""Value in the input of the second layer, by rank and iteration."""

hvd.init()
torch.manual_seed(0)
model = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4), "words": nn.Embedding(5, 4, sparse=True)})
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
for iteration in range(8):
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.zero_grad()
    inputs = torch.ones(2, 4)
    second = inputs.clone()
    second[0, 3] = BAD.get((hvd.rank(), iteration), 1.0)
    loss = (
        model["first"](inputs).sum() + model["second"](second).square().sum() + model["words"](torch.tensor([1])).sum()
    )
    loss.backward()
    optimizer.step()
    if iteration != 2:  # parameters spoiled in iteration 2 stay for iteration 3, which must not report again
        model.load_state_dict(start)
    elif hvd.rank() == 0:
        print("spoiled:", not all(value.isfinite().all() for value in model.state_dict().values()), flush=True)
    if iteration == 3:
        model.load_state_dict({name: torch.ones_like(value) for name, value in start.items()})
hvd.shutdown()
