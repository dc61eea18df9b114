"""Models whose shapes or initial values differ between ranks. Started by test_same_model.py."""

import pytest
import torch
from torch import nn

import sirtaki.torch as hvd


def model(*, odd: int, last: nn.Module) -> nn.Module:
    torch.manual_seed(odd)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), last)


def step(net: nn.Module) -> None:
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(3, 8)).sum().backward()
        optimizer.step()


hvd.init()
odd = int(hvd.rank() == hvd.size() - 1)
for last, found in (
    (
        nn.Linear(8, 4 + odd),
        r"parameter 4 .* is '2.weight' of shape \(4, 8\).* on rank 0, but '2.weight' of shape \(5, 8",
    ),
    (nn.Linear(8, 4, dtype=torch.float64 if odd else torch.float32), "float32 .*float64"),
    (
        nn.Linear(8, 4, bias=not odd),
        f"'2.bias' of shape.*, but missing .* only 5 parameters\\) on rank {hvd.size() - 1}",
    ),
):
    net = model(odd=0, last=last)
    with pytest.raises(hvd.HorovodInternalError, match=f"disagree about the model: .*{found}"):
        hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())

torch.manual_seed(0)
step(model(odd=odd, last=nn.Linear(8, 4)))  # one warning
equal = model(odd=odd, last=nn.Linear(8, 4))
hvd.broadcast_parameters(equal.state_dict(), root_rank=0)
step(equal)
print("named", flush=True)
hvd.shutdown()
