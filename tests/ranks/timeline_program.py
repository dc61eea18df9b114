"""Train and reduce a little with a timeline. The first argument selects how the program ends."""

import os
import signal
import sys

import torch

import sirtaki.torch as hvd
from sirtaki.comm import timeline


def train(steps: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        hvd.allreduce(torch.ones(3), name=f"metric.{step % 2}")


def main(ending: str, path: str) -> None:
    if ending == "refused":
        for _ in range(2):
            try:
                hvd.start_timeline(path)
            except ValueError as err:
                print(f"refused: {err}", flush=True)
            hvd.init()
        hvd.shutdown()
        return
    hvd.init()
    if ending == "dynamic":
        train(3)
        if hvd.rank() == 0:
            hvd.start_timeline(path, mark_cycles=True)
        train(5)
        hvd.stop_timeline()
        train(3)
    else:
        train(8)
    if ending == "killed":
        present = timeline.current
        assert present is not None
        present.flush()
        hvd.barrier()
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        train(1000)
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
