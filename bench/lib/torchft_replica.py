"""The same training with torchft, one process a replica.

python -m bench.lib.torchft_replica FOLDER STEPS NUMBER LIGHTHOUSE
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from bench.lib.elastic_training import Diary, loss_of, make_model


def main(folder: str, steps: str, number: str, lighthouse: str) -> None:
    """Trains until all replicas together have made so many steps."""
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.ddp import PureDistributedDataParallel

    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        port = sock.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    model, diary = make_model(), Diary(Path(folder))
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        replica_id=f"replica{number}_",
        timeout=datetime.timedelta(seconds=10),
        lighthouse_addr=lighthouse,
        port=0,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=port,
    )
    # Its DistributedDataParallel ends a survivor now and then: an AssertionError in the hook (torchft 0.2.0).
    replicated, optimizer = PureDistributedDataParallel(manager, model), Optimizer(manager, plain)
    while manager.current_step() < int(steps):
        optimizer.zero_grad()
        loss_of(replicated).backward()
        optimizer.step()
        diary.note("step", step=manager.current_step(), size=manager.num_participants())
    manager.shutdown()
    del store


if __name__ == "__main__":
    main(*sys.argv[1:])
