"""Train with checkpoints, and possibly be killed. Started by test_checkpoints.py: STEPS FAULT STEP."""

import os
import random
import signal
import sys
import time

import torch

import sirtaki.torch as hvd

steps, fault, at = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
hvd.init()
torch.manual_seed(hvd.rank())
random.seed(hvd.rank())
model = torch.nn.Linear(5, 2, dtype=torch.float64)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters()
)
sampler = hvd.elastic.ElasticSampler(range(12 * hvd.size()))
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, step=0, words=["none"])
if fault == "another script":
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, other=1)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    print(f"begins at {state.step} {state.words[-1]} {state.sampler.processed_num}", flush=True)
    for batch in range(steps - state.step):  # the remaining batches of the epoch
        generator = torch.Generator().manual_seed(100 * state.step + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        state.sampler.record_batch(batch, 1)
        state.step += 1
        state.words.append(f"step{state.step}")
        print(f"draws at {state.step} on {hvd.rank()}: {torch.rand(1).item()} {random.random()}", flush=True)
        if fault == "terminate" and state.step == at:
            os.kill(os.getpid(), signal.SIGTERM)
        state.commit()
        time.sleep(0.02)  # gives the writing thread time
        if fault == "kill" and state.step == at:
            hvd.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


train(state)
print("ends", [round(weight, 12) for weight in torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()])
