"""Train while the tuner may compress gradients. Started by test_lossy.py.

    lossy.py slow | latency ITERATIONS    a link whose time depends on bytes, or on messages only
    lossy.py refused                      optimizers whose gradients the tuner may not compress

The link is emulated: an iteration counts as long as the link would take for its messages, independent of the machine.
In each step, gradients are compared between ranks bit by bit, and the applied gradients plus residuals with the sum of
the gradients.
"""

import sys
import zlib
from dataclasses import replace
from typing import Any

import torch
from conformance.training import batch

import sirtaki.torch as hvd
from sirtaki.comm.gradients.pipeline import GradientPipeline
from sirtaki.comm.gradients.trace import IterationReport
from sirtaki.comm.router import Router
from sirtaki.comm.transports.contract import FlatBuffer, Parcels

BYTES_PER_S, MESSAGE_S = 60e6, 1e-3
kind, iterations = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0


def emulate() -> None:
    all_reduce, exchange, finish = Router.all_reduce, Router.exchange, GradientPipeline.finish
    sent_s: list[float] = []  # since the iteration began; streams share the link

    def send(n_bytes: float) -> None:
        sent_s.append(n_bytes / BYTES_PER_S if kind == "slow" else MESSAGE_S)

    def noted_all_reduce(self: Router, buffer: FlatBuffer, start: int, stop: int, **options: Any) -> Any:
        send(2 * (hvd.size() - 1) / hvd.size() * (stop - start) * buffer.tensor.itemsize)
        return all_reduce(self, buffer, start, stop, **options)

    def noted_exchange(
        self: Router, outgoing: FlatBuffer, parcels: Parcels, incoming: torch.Tensor, **options: Any
    ) -> Any:
        send(incoming.numel())
        return exchange(self, outgoing, parcels, incoming, **options)

    def timed_finish(self: GradientPipeline, **options: Any) -> IterationReport:
        report = replace(finish(self, **options), span_s=1e-3 + sum(sent_s))
        sent_s.clear()
        return report

    Router.all_reduce, Router.exchange = noted_all_reduce, noted_exchange  # type: ignore[method-assign]
    GradientPipeline.finish = timed_finish  # type: ignore[method-assign]


class Given(torch.nn.Module):
    """A module whose gradients are the values of `batch`."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(7,), (256, 640), (300, 400), (33, 31), (90_001,)]
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def gradient(self, place: int, rank: int, step: int) -> torch.Tensor:
        return batch(rank, 100 * step + place, *self.weights[place].shape, dtype=torch.float32)

    def forward(self, rank: int, step: int) -> torch.Tensor:
        parts = ((param * self.gradient(place, rank, step)).sum() for place, param in enumerate(self.weights))
        return sum(parts, torch.zeros(()))


def refused() -> None:
    for dtype, compression in ((torch.float32, hvd.Compression.bf16), (torch.complex64, hvd.Compression.none)):
        weight = torch.nn.Parameter(torch.zeros(3000, dtype=dtype))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], compression)
        for _ in range(3):
            optimizer.zero_grad()
            (weight * (hvd.rank() + 1)).abs().sum().backward() if dtype.is_complex else weight.sum().backward()
            optimizer.step()
        optimizer.close()


if kind == "refused":
    hvd.init()
    refused()
    hvd.shutdown()
    sys.exit()
emulate()
hvd.init()
model = Given()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
truth = [torch.zeros(param.shape, dtype=torch.float64) for param in model.weights]
for step in range(iterations):
    optimizer.zero_grad()
    model(hvd.rank(), step).backward()
    optimizer.step()
    for place in range(len(model.weights)):
        truth[place] += sum(model.gradient(place, rank, step).double() for rank in range(hvd.size()))
    digests = hvd.allgather_object([zlib.crc32(param.grad.numpy().tobytes()) for param in model.weights])
    assert all(digest == digests[0] for digest in digests), step
owed = optimizer.state_dict().get("sirtaki_compression", {"owed": {}})["owed"]
for place, (name, param) in enumerate(model.named_parameters()):
    mine = owed.get(name, torch.zeros(param.numel())).double()
    total = hvd.allreduce(mine, op=hvd.Sum, name=f"owed.{name}").view(param.shape)
    applied = -param.detach().double() * hvd.size()
    torch.testing.assert_close(applied + total, truth[place], rtol=1e-4, atol=1e-3)
print(f"done {hvd.rank()}, owes {any(bool(each.any()) for each in owed.values())}", flush=True)
hvd.shutdown()
