"""Successive jobs with one registry, which is damaged between jobs. Each job is compared with one process.

Started by test_warmup.py with the names of jobs and damages in order.
"""

import json
import os
import sqlite3
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import sirtaki.torch as hvd

BLOCKS, WIDTH, ITERATIONS = 6, 160, 30
NUMEL = BLOCKS * (WIDTH * WIDTH + WIDTH)
REGISTRY = Path(os.environ["SIRTAKI_REGISTRY"])

# Blocks that each optimizer reduces. Blocks without an optimizer are not updated.
JOBS = {
    "whole": [(0, 5)],
    "body and head": [(0, 3), (4, 5)],
    "tail": [(3, 5)],
    "middle": [(2, 4)],
}

# Jobs whose settings are changed by environment variables.
SETTINGS = {
    "two streams": {"SIRTAKI_STREAMS": "2"},
    "full disk for the registry": {"SIRTAKI_REGISTRY": "/dev/full"},
    "full disk for the trial log": {"SIRTAKI_TRIAL_LOG": "/dev/full"},
}


def network() -> torch.nn.Module:
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(BLOCKS)]
    return torch.nn.Sequential(*layers).double()


def train(parts: list[tuple[int, int]]) -> None:
    hvd.init()
    torch.manual_seed(0)
    model, reference = network(), network()
    reference.load_state_dict(model.state_dict())
    optimizers = []
    for first, last in parts:
        ours, theirs = model[first : last + 1], reference[first : last + 1]
        ours_named = ours.named_parameters()
        optimizers += [
            hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.05), named_parameters=ours_named),
            torch.optim.SGD(theirs.parameters(), lr=0.05),
        ]
    for iteration in range(ITERATIONS):
        generator = torch.Generator().manual_seed(iteration)
        batch = torch.randn(4 * hvd.size(), WIDTH, generator=generator, dtype=torch.float64)
        model.zero_grad()
        reference.zero_grad()
        model(batch[4 * hvd.rank() : 4 * hvd.rank() + 4]).square().mean().backward()
        reference(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for param, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param, wanted, rtol=1e-10, atol=1e-12)
    hvd.shutdown()


def in_every_entry(change: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
    """Return a damage that changes the bodies of all entries directly in the database."""

    def damage() -> None:
        connection = sqlite3.connect(REGISTRY)
        for name, body in connection.execute("SELECT id, body FROM entries").fetchall():
            data = json.loads(body)
            change(data)
            connection.execute("UPDATE entries SET body = ? WHERE id = ?", (json.dumps(data), name))
        connection.commit()
        connection.close()

    return damage


def planned(*, stop: int, stream: int = 0, streams: int = 1, count: int = 2) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        data["complete"] = True
        cuts = [[stop * (number + 1) // count, stream, None] for number in range(count)]
        data["knobs"] |= {"transport": "shared_memory", "algorithm": "flat", "streams": streams, "cuts": cuts}

    return change


def in_all_graphs() -> None:
    connection = sqlite3.connect(REGISTRY)
    for table in ("models", "topologies"):
        connection.execute(f"UPDATE {table} SET body = ?", (zlib.compress(b"[" * (1 << 28)),))
    connection.execute("UPDATE topologies SET shape = '[1, 2]'")
    connection.execute("UPDATE signatures SET body = x'00'")
    connection.commit()
    connection.close()


def cut_off(size: int) -> Callable[[], None]:
    return lambda: REGISTRY.write_bytes(REGISTRY.read_bytes()[:size])  # type: ignore[return-value]


DAMAGES = {
    "cuts of another model": in_every_entry(planned(stop=1234)),
    "cuts behind the last gradient": in_every_entry(planned(stop=NUMEL + 1)),
    "cuts in thousands": in_every_entry(planned(stop=NUMEL, count=60_000)),
    "streams that are not there": in_every_entry(planned(stop=NUMEL, stream=900, streams=1000)),
    "knobs out of space": in_every_entry(
        lambda data: data["knobs"].update(
            unit_bytes=1, threads=99, transport="nccl", algorithm="hierarchical", cuts=None
        )
    ),
    "times that are none": in_every_entry(lambda data: data.update(best_span_s=float("nan"), noise_s=float("inf"))),
    "a speed-up of millions": in_every_entry(lambda data: data.update(best_span_s=1e-9, default_span_s=1e3)),
    "a history of nonsense": in_every_entry(
        lambda data: data.update(
            complete=False,
            trials=[
                {
                    "arm": "default",
                    "knobs": {**data["knobs"], "cuts": [[7, 0, None]], "streams": 1},
                    "iterations": 10**9,
                    "span_s": None,
                    "noise_s": 0.0,
                    "status": "complete",
                    "was_best": True,
                }
            ]
            * 300,
        )
    ),
    "graphs that are none": in_all_graphs,
    "the file cut off": cut_off(20_000),
    "an empty file": cut_off(0),
    "the file gone": lambda: [Path(f"{REGISTRY}{suffix}").unlink(missing_ok=True) for suffix in ("", "-wal", "-shm")],
}

rank = int(next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK") if name in os.environ))
for step in sys.argv[1:]:
    if step in DAMAGES:
        if rank == 0:  # before rank 0 takes part in the start of the next job
            DAMAGES[step]()
            print(f"damaged: {step}", file=sys.stderr, flush=True)
        continue
    os.environ.update(SETTINGS.get(step, {}))
    train(JOBS[step if step in JOBS else "whole"])
    os.environ.pop("SIRTAKI_STREAMS", None)
    os.environ.pop("SIRTAKI_TRIAL_LOG", None)
    os.environ["SIRTAKI_REGISTRY"] = str(REGISTRY)
    if rank == 0:
        print(f"done: {step}", file=sys.stderr, flush=True)
