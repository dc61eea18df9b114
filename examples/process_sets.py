"""Two models on two sets of ranks at the same time, and a vote of all ranks at the end.

    sirtakirun -np 4 python examples/process_sets.py

The even ranks learn one function, the odd ranks another. The two sets do not wait for each other.
"""

import torch
from torch import nn

import sirtaki.torch as hvd


def main() -> None:
    hvd.init()
    evens = hvd.add_process_set(range(0, hvd.size(), 2))
    odds = hvd.add_process_set(range(1, hvd.size(), 2)) if hvd.size() > 1 else evens
    mine = evens if evens.included() else odds
    function = torch.sin if mine is evens else torch.cos
    steps = 300 if mine is evens else 200  # sets may make different numbers of steps

    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    first = mine.ranks[0]  # a root is given by its global rank
    for name, tensor in model.state_dict().items():
        hvd.broadcast_(tensor, root_rank=first, name=name, process_set=mine)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), process_set=mine)
    for _ in range(steps):
        points = 6 * torch.rand(64, 1) - 3
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(points), function(points))
        loss.backward()
        optimizer.step()

    mean = hvd.allreduce(loss.detach(), name="loss", process_set=mine)
    everybody = hvd.allgather_object((hvd.rank(), function.__name__, round(float(mean), 5)))
    if hvd.rank() == 0:
        for rank, name, error in everybody:
            print(f"rank {rank} has learned {name}, mean squared error {error}", flush=True)


if __name__ == "__main__":
    main()
