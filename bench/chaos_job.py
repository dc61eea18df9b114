"""The training script of the chaos run: `chaos_job.py FOLDER STRIKES_JSON`, on every rank of a job.

A rank appends a byte to `FOLDER/progress.RANK` after each step, does what STRIKES_JSON says when it gets SIGUSR1, and
leaves its weights in `FOLDER/weights.RANK.npy`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

STEP_S = 0.01
BATCH = 8


class ChaosError(Exception):
    """What a rank raises when it is told to."""


class Victim:
    """Lets this rank fail when it is told to."""

    def __init__(self, strikes: list[dict[str, Any]]) -> None:  # Any: as JSON has it
        self._strikes = strikes
        self._again: Callable[[], None] | None = None
        self._limits: dict[int, tuple[int, int]] = {}
        signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        for strike in self._strikes:
            match strike["fault"]:
                case "RAISE":
                    self._fail(_raise)
                case "EXIT":
                    self._fail(lambda code=strike["exit_code"]: sys.exit(code))
                case "EXIT_IN_C":
                    os._exit(strike["exit_code"])
                case "OUT_OF_MEMORY":
                    self._out_of_memory()
                case "NO_DESCRIPTORS":
                    self._lower(resource.RLIMIT_NOFILE, _lowest_free_descriptor())

    def check(self) -> None:
        """Fails again, where the exception of the signal's handler was lost (in a destructor, say)."""
        if self._again is not None:
            self._again()

    def release(self) -> None:
        """Takes limits away."""
        for kind, limits in self._limits.items():
            resource.setrlimit(kind, limits)

    def _lower(self, kind: int, value: int) -> None:
        soft, hard = resource.getrlimit(kind)
        self._limits.setdefault(kind, (soft, hard))
        resource.setrlimit(kind, (value, hard))

    def _fail(self, fail: Callable[[], None]) -> None:
        self._again = fail
        fail()

    def _out_of_memory(self) -> None:
        """Next to nothing can be mapped any more, and a large tensor is wanted."""
        import torch

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        self._lower(resource.RLIMIT_AS, (pages + 1024) * resource.getpagesize())
        self._fail(lambda: print(torch.ones(1 << 29).sum()))


def _raise() -> None:
    raise ChaosError("a bad batch")


def _lowest_free_descriptor() -> int:
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    return free


def model(dtype: torch.dtype) -> torch.nn.Module:
    """The same weights on every rank."""
    import torch

    torch.manual_seed(1)
    layers = [torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 4)).to(dtype)


def batch(step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """`(BATCH, 32)`."""
    import torch

    return torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(1000 * step + rank)).to(dtype)


def weights(network: torch.nn.Module) -> torch.Tensor:
    """All of them, `(n,)`."""
    import torch

    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def reference(ranks: int, steps: int) -> torch.Tensor:
    """What training must give: float64, one process, the joined batch."""
    import torch

    network = model(torch.float64)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        network(torch.cat([batch(step, rank, torch.float64) for rank in range(ranks)])).square().mean().backward()
        optimizer.step()
    return weights(network)


def main(folder: Path, job: dict[str, Any]) -> None:
    """Trains."""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    victim = Victim([strike for strike in job["strikes"] if strike["rank"] == rank])
    progress = os.open(folder / f"progress.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    import numpy as np
    import torch

    import sirtaki.torch as hvd

    hvd.init()
    network = model(torch.float32)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.5), named_parameters=network.named_parameters()
    )
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    for step in range(job["steps"]):
        victim.check()
        optimizer.zero_grad()
        loss = network(batch(step, rank, torch.float32)).square().mean()
        loss.backward()
        optimizer.step()
        os.write(progress, b".")
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss:.4f}")
        time.sleep(STEP_S)
    victim.release()
    np.save(folder / f"weights.{rank}.npy", weights(network).numpy())
    if job["shuts_down"]:
        hvd.shutdown()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Python gives up its handlers before the process has ended


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
