"""Child processes that a script forks while it trains, as data loaders and checkpoint writers do."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import cast

import torch

from .program import Backward
from .replica import Replica, Values

LIMIT_S = 20.0
"""Time limit of a child in seconds."""


def _leave() -> None:
    sys.exit(0)


def _leave_hard() -> None:
    os._exit(0)


def _train_and_leave(replica: Replica) -> None:
    """Write to all parameters and gradients and run a backward pass, which must not affect the parent."""
    for param in replica.parameters.values():
        for tensor in (param.data, param.grad):
            if tensor is not None and not tensor.is_sparse:
                tensor.fill_(float("nan"))
        param.grad = None
    if any(param.requires_grad for param in replica.parameters.values()):
        replica.backward(Backward(), 1)
    sys.exit(0)


def _save_and_leave(replica: Replica) -> None:
    torch.save(replica.blocks.state_dict(), io.BytesIO())
    os._exit(0)


CHILDREN: dict[str, Callable[[Replica], None]] = {
    "exits": lambda replica: _leave(),
    "exits hard": lambda replica: _leave_hard(),
    "trains": _train_and_leave,
    "saves": _save_and_leave,
    "process": lambda replica: None,  # a process of multiprocessing, which ends by itself
    "loader": lambda replica: None,  # a worker of a DataLoader
}
"""Actions of a child after it has read the parameters."""


class _Read(torch.utils.data.Dataset[bytes]):
    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: int) -> bytes:
        return pickle.dumps(self._replica.values(self._replica.parameters))


def seen_by_child(replica: Replica, how: str) -> Values:
    """Fork a child that reads all parameters. Return the values that it has read, after it has ended."""
    if how == "loader":
        loader: torch.utils.data.DataLoader[bytes] = torch.utils.data.DataLoader(
            _Read(replica), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=LIMIT_S
        )
        with torch.device("cpu"):  # because PyTorch draws the workers' seed on the default device
            first, second = list(loader)
        assert first == second
        return cast(Values, pickle.loads(first))
    reader, writer = os.pipe()
    process = None
    if how == "process":
        process = multiprocessing.get_context("fork").Process(target=_report, args=(replica, writer))
        process.start()
        child = process.pid
        assert child is not None
    else:
        child = os.fork()
        if child == 0:
            os.close(reader)
            _report(replica, writer)
            CHILDREN[how](replica)
    os.close(writer)
    deadline_s = time.monotonic() + LIMIT_S
    with open(reader, "rb", buffering=0) as pipe:
        parts = []
        while select.select([pipe], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            if not (part := pipe.read(1 << 16)):
                break
            parts.append(part)
    if process is not None:  # multiprocessing must know that it has ended, otherwise later children wait for it
        process.join(max(0.0, deadline_s - time.monotonic()))
        assert process.exitcode == 0, f"the child has ended with {process.exitcode}"
        return cast(Values, pickle.loads(b"".join(parts)))
    _, status = _waited(child, deadline_s)
    assert status == 0, f"the child has ended with {status}"
    return cast(Values, pickle.loads(b"".join(parts)))


def _report(replica: Replica, writer: int) -> None:
    with open(writer, "wb") as pipe:
        pickle.dump(replica.values(replica.parameters), pipe)


def _waited(child: int, deadline_s: float) -> tuple[int, int]:
    while time.monotonic() < deadline_s:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return pid, os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")
