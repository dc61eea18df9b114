"""Train in an elastic job until there is a file FOLDER/stop: `visited.py FOLDER`.

The start of each step by `time.monotonic()`, and its duration, are lines of FOLDER/PID.steps.
"""

import os
import sys
import time
from pathlib import Path

import torch

import sirtaki.torch as hvd

PAUSE_S = 0.02  # instead of computation on a device


def main(folder: Path) -> None:
    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        with (folder / f"{os.getpid()}.steps").open("a", buffering=1) as steps:
            while not hvd.allreduce(torch.tensor(float((folder / "stop").exists())), op=hvd.Max):
                begun_s = time.monotonic()
                optimizer.zero_grad()
                model(torch.randn(4, 64)).square().mean().backward()
                time.sleep(PAUSE_S)
                optimizer.step()
                steps.write(f"{begun_s} {time.monotonic() - begun_s}\n")
                state.step += 1
                if state.step % 50 == 0:
                    state.commit()

    train(state)


main(Path(sys.argv[1]))
