"""Train a small model for some iterations, and print the final setting. Started by test_warmup.py.

With TEST_PAUSE_S, each unit takes so many seconds longer.
"""

import os
import sys
import time

import torch

import sirtaki.torch as hvd
from sirtaki.comm.router import Router

iterations = int(sys.argv[1])
layers = int(sys.argv[2]) if len(sys.argv) > 2 else 1
device = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
pause_s = float(os.environ.get("TEST_PAUSE_S", "0"))


def slowed_down() -> None:
    wait_for = Router.wait_for

    def slow(self: Router, works: list[object], **options: object) -> bool:
        time.sleep(pause_s if works else 0.0)
        return wait_for(self, works, **options)  # type: ignore[arg-type]

    Router.wait_for = slow  # type: ignore[method-assign]


def network() -> torch.nn.Module:
    hidden = [part for _ in range(layers - 1) for part in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    first = (torch.nn.Linear(64, 256), torch.nn.ReLU())
    return torch.nn.Sequential(*first, *hidden, torch.nn.Linear(256, 10)).double().to(device)


if pause_s:
    slowed_down()
hvd.init()
os.environ.setdefault("NCCL_HOSTID", f"rank{hvd.rank()}")  # because ranks of a test may share a GPU
torch.manual_seed(0)
model = network()
reference = network()
reference.load_state_dict(model.state_dict())
plain = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), named_parameters=model.named_parameters()
)
for iteration in range(iterations):
    generator = torch.Generator().manual_seed(iteration)
    batch = torch.randn(4 * hvd.size(), 64, generator=generator, dtype=torch.float64).to(device)
    optimizer.zero_grad()
    model(batch[4 * hvd.rank() : 4 * hvd.rank() + 4]).square().mean().backward()
    optimizer.step()
    plain.zero_grad()
    reference(batch).square().mean().backward()
    plain.step()
    # During all trials, training equals one process with the joined batch.
    for param, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, wanted, rtol=1e-10, atol=1e-12)
print(f"done {hvd.rank()}", flush=True)
