"""Train as a user does, on a fake device with streams. Started by test_streams.py.

Arguments: iterations, event on rank 1 ("nothing", "sleep", "error"), and the iteration of the event.
"""

import sys
import time

import torch
from fakes.streams import FakeDevice, FakeOpener

import sirtaki.torch as hvd
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.router import Router
from sirtaki.engine.settings import Settings
from sirtaki.engine.tuning import pipeline_target
from sirtaki.engine.tuning import plans as contention_probe

iterations, fault, fault_at = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
device = FakeDevice(seed=7)
openers = []


def open_on_streams(control: ControlPlane, settings: Settings, params: object) -> Router:
    openers.append(FakeOpener(control, device))
    return Router(control, timeout_s=30.0, device=device, nccl=openers[-1])


# Small sizes, because there is no GPU to fill.
contention_probe.MATRIX, contention_probe.UNIT_BYTES = 64, (1 << 14, 1 << 16)
pipeline_target.open_router = open_on_streams  # replaces the router, as on a GPU
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).double()
params = list(model.parameters())
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.05), named_parameters=model.named_parameters())
for iteration in range(iterations):
    if hvd.rank() == 1 and iteration == fault_at and fault == "sleep":
        time.sleep(60)
    if hvd.rank() == 1 and iteration >= fault_at and fault == "error":
        next(iter(openers[0].groups.values())).problem = "remote error"
        time.sleep(0.1)
    generator = torch.Generator().manual_seed(iteration)
    batch = torch.randn(4 * hvd.size(), 64, generator=generator, dtype=torch.float64)
    optimizer.zero_grad()
    model(batch[4 * hvd.rank() : 4 * hvd.rank() + 4]).square().mean().backward()
    optimizer.synchronize()
    wanted = torch.autograd.grad(model(batch).square().mean(), params)
    device.synchronise()  # because the optimizer's step does not run on the stream, unlike on a GPU
    for param, gradient in zip(params, wanted, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad, gradient, rtol=1e-10, atol=1e-12)
    with optimizer.skip_synchronize():
        optimizer.step()
opened = sorted({str(key) for key in openers[0].opened})
left = [str(key) for key, group in openers[0].groups.items() if not group.closed]
print(f"done {hvd.rank()}; opened {len(opened)}, left {len(left)}", flush=True)
hvd.shutdown()
