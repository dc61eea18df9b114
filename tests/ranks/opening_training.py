"""Train while streams of a trial cannot be opened on one rank. Started by test_warmup.py."""

import os
import resource
from collections.abc import Sequence

import torch

import sirtaki.torch as hvd
from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.trial import Proposal, Trial
from sirtaki.comm.plan import TransportKind

STREAMS = (24, 16, 2)


class ManyStreams:
    """An arm that proposes given numbers of streams once each."""

    name = "many_streams"

    def __init__(self) -> None:
        self.left = list(STREAMS)
        self.told: dict[int, str] = {}

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        if not self.left:
            return []
        knobs = Knobs(unit_bytes=65536, streams=self.left.pop(0), transport=TransportKind.GLOO)
        return [Proposal(arm=self.name, knobs=knobs)]

    def tell(self, trials: Sequence[Trial]) -> None:
        self.told |= {trial.knobs.streams: trial.status.value for trial in trials if trial.arm == self.name}


hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 200), torch.nn.Linear(200, 3))
arm = ManyStreams()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), arms=[arm])
before = resource.getrlimit(resource.RLIMIT_NOFILE)
if hvd.rank() == hvd.size() - 1:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 12, before[1]))
for step in range(40):
    optimizer.zero_grad()
    batches = [
        torch.randn(4, 200, generator=torch.Generator().manual_seed(100 * step + rank)) for rank in range(hvd.size())
    ]
    gradients = [torch.autograd.grad(model(batch).square().mean(), list(model.parameters())) for batch in batches]
    model(batches[hvd.rank()]).square().mean().backward()
    optimizer.synchronize()
    for number, param in enumerate(model.parameters()):
        wanted = torch.stack([gradient[number].double() for gradient in gradients]).mean(0)
        assert param.grad is not None
        torch.testing.assert_close(param.grad.double(), wanted, rtol=1e-4, atol=1e-7)
    with optimizer.skip_synchronize():
        optimizer.step()
if hvd.rank() == 0:
    print("told", [arm.told.get(streams) for streams in STREAMS], flush=True)
hvd.shutdown()
