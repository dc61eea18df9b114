"""Training script of `bench.elastic_cost`. No rank is lost, and each step is timed.

python -m bench.lib.elastic_steady FOLDER SECONDS COMMIT_EVERY STATE_BYTES      started by sirtakirun
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

WIDTH, LAYERS, BATCH = 1024, 4, 64
WARM_STEPS = 10


def main(folder: str, seconds: str, commit_every: str, state_bytes: str) -> None:
    """Train, and write times in seconds to `FOLDER/RANK.json`.

    "step" and "commit" are ordinary steps and commits. "beside" are steps while a checkpoint is written. "due" are
    commits that must be written to disk.

    Args:
        folder: folder for the times. Checkpoints are in FOLDER/checkpoints.
        seconds: training time.
        commit_every: steps between commits; 0 = never.
        state_bytes: bytes committed in addition to the model and its optimizer.
    """
    import sirtaki.torch as hvd
    from sirtaki.torch.elastic.state import checkpoints_of_this_process

    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    ballast = torch.ones(int(state_bytes) // 4)
    batch, checkpoints = torch.randn(BATCH, WIDTH), Path(folder, "checkpoints")
    times: dict[str, list[float]] = {"step": [], "beside": [], "commit": [], "due": []}

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        going = torch.ones(1)
        end_s = time.monotonic() + float(seconds)
        while going > 0:
            writing = any(checkpoints.glob("writing-*"))
            begin_s = time.perf_counter()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            took_s = time.perf_counter() - begin_s
            state.step += 1
            if state.step > WARM_STEPS and writing == any(checkpoints.glob("writing-*")):
                times["beside" if writing else "step"].append(took_s)
            if int(commit_every) and state.step % int(commit_every) == 0:
                there = checkpoints_of_this_process()
                kind = "due" if there is not None and there.due else "commit"
                begin_s = time.perf_counter()
                state.commit()
                times[kind].append(time.perf_counter() - begin_s)
            if state.step % 10 == 0:
                going = hvd.allreduce(torch.tensor([float(time.monotonic() < end_s)]), op=hvd.Min, name="going")

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, ballast=ballast))
    Path(folder, f"{hvd.rank()}.json").write_text(json.dumps(times))


if __name__ == "__main__":
    main(*sys.argv[1:])
