"""An elastic job on a fake device with streams, whose rank 1 is killed. Started by test_generations.py.

The all-reduces of the other ranks then wait, as NCCL's kernels do, until their communicators are aborted. An aborted
all-reduce leaves NaN in its buffer. One of the optimizers was closed while the other ranks still used it.
"""

import copy
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from conformance.training import assert_same_parameters
from fakes.streams import FakeDevice, FakeOpener
from torch._C._distributed_c10d import PrefixStore

import sirtaki.torch as hvd
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.nccl_streams.transport import CommunicatorKey, Group
from sirtaki.comm.router import Router
from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.engine import job
from sirtaki.engine.settings import Settings
from sirtaki.engine.tuning import pipeline_target

STEPS, KILLED_AT = 12, 6
device = FakeDevice(seed=3)


class WaitingGroup:
    """A `Group` over Gloo whose operations wait for `abort` once a rank is lost."""

    def __init__(self, control: ControlPlane) -> None:
        store = PrefixStore(control.next_prefix(), control.store())
        self._gloo = dist.ProcessGroupGloo(store, control.rank, control.size, timedelta(seconds=5))
        self._aborted = threading.Event()

    def _reduce(self, tensor: torch.Tensor, scale: float) -> None:
        try:
            self._gloo.allreduce([tensor]).wait()
            tensor.mul_(scale)
        except RuntimeError:
            self._aborted.wait()
            tensor.fill_(torch.nan)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        device.launch(self._reduce, tensor, 1.0)

    def all_reduce_scaled(self, tensor: torch.Tensor, scale: float) -> bool:
        device.launch(self._reduce, tensor, scale)
        return True

    def reduce_scatter(self, share: torch.Tensor, tensor: torch.Tensor, op: ReduceOp) -> None:
        raise NotImplementedError

    def all_gather(self, tensor: torch.Tensor, share: torch.Tensor) -> None:
        raise NotImplementedError

    def error(self) -> str:
        return ""

    def memory_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass

    def abort(self) -> None:
        self._aborted.set()
        if hasattr(self._gloo, "abort"):  # only from PyTorch 2.7 on; else the operation fails after its timeout
            self._gloo.abort()


class WaitingOpener(FakeOpener):
    def __init__(self, control: ControlPlane) -> None:
        super().__init__(control, device)
        self._ranks = control

    def open(self, key: CommunicatorKey) -> Group:
        return WaitingGroup(self._ranks)


def open_on_streams(control: ControlPlane, settings: Settings, params: object) -> Router:
    return Router(control, timeout_s=30.0, device=device, nccl=WaitingOpener(control))


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(4, 8, generator=generator, dtype=torch.float64)).square().mean()


pipeline_target.open_router = open_on_streams  # type: ignore[assignment]  # replaces the router, as on a GPU
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)).double()
alone = copy.deepcopy(model)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
extra = torch.nn.Linear(8, 2).double()
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
begun_s = 0.0


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    global begun_s
    elastic = job.current().elastic
    if begun_s:
        print(f"restarted at step {state.step} after {time.monotonic() - begun_s:.2f} s", flush=True)
    is_first = elastic is not None and elastic.number == 1
    spare = hvd.DistributedOptimizer(torch.optim.SGD(extra.parameters(), lr=0.1)) if is_first else None
    while state.step < STEPS:
        begun_s = time.monotonic()
        if is_first and hvd.rank() == 1 and state.step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        if spare is not None:
            extra.zero_grad()
            loss_of(extra, state.step).backward()
            spare.synchronize()
            if state.step == KILLED_AT:
                spare.close()  # the device still waits for the lost rank
        optimizer.zero_grad()
        loss_of(model, state.step).backward()
        optimizer.synchronize()
        if "script" in sys.argv[-1] and hvd.rank() == 0 and state.step == KILLED_AT:
            device.synchronise()  # the script itself waits for the GPU
        job.current().wait_for_gpus()  # because the optimizer's step does not run on the stream, unlike on a GPU
        with optimizer.skip_synchronize():
            optimizer.step()
        state.step += 1
        device.launch(time.sleep, 0.02)
        late = device.record_event()
        state.commit()
        if hvd.size() > 1:
            assert device.is_reached(late), "the commit may contain gradients that are not reduced"


train(state)
reference = torch.optim.SGD(alone.parameters(), lr=0.1)
for step in range(STEPS):
    reference.zero_grad()
    loss_of(alone, step).backward()
    reference.step()
assert_same_parameters(model, alone, 1e-10)
print(f"done {hvd.rank()} of {hvd.size()}", flush=True)
