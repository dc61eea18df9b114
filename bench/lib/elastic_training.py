"""Training script of `bench.elastic`, whose ranks are killed. It logs each event as a line in a file.

python -m bench.lib.elastic_training FOLDER STEPS COMMIT_EVERY      started by sirtakirun
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

LAYERS, WIDTH, BATCH = 8, 256, 16


class Diary:
    """Log of one process, `FOLDER/PID.jsonl`. Each line is flushed, so that it survives a SIGKILL."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def log(self, event: str, **what: int | str) -> None:
        """Log `event` with the current time."""
        self._file.write(json.dumps({"event": event, "at_s": time.time(), **what}) + "\n")


def main(folder: str, steps: str, commit_every: str) -> None:
    """Train for a number of steps, while ranks join and leave."""
    import sirtaki.torch as hvd
    from sirtaki.torch.exceptions import HostsUpdatedInterrupt

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, diary = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))), Diary(Path(folder))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def digest() -> str:
        digest = hashlib.sha256()
        for param in model.parameters():
            digest.update(param.detach().numpy().tobytes())
        return digest.hexdigest()[:16]

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        diary.log("resume", step=state.step, size=hvd.size(), rank=hvd.rank(), hash=digest())
        while state.step < int(steps):
            optimizer.zero_grad()
            model(torch.randn(BATCH, WIDTH)).square().mean().backward()
            optimizer.step()
            state.step += 1
            diary.log("step", step=state.step, size=hvd.size())
            if state.step % int(commit_every) == 0:
                try:
                    state.commit()
                except HostsUpdatedInterrupt:
                    diary.log("commit", step=state.step, size=hvd.size(), hash=digest())
                    raise
                diary.log("commit", step=state.step, size=hvd.size(), hash=digest())

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))
    diary.log("end", step=int(steps), size=hvd.size())
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
