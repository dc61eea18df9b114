"""One rank cannot attach a model, so that PyTorch trains it on all ranks. Started by test_auto_attach.py.

The argument is what the last rank does: "missing" runs without SIRTAKI_ATTACH=auto, "setting" has an invalid setting,
"connection" cannot open a connection, "late" does not vote in time.
"""

import os
import resource
import sys
import time

import torch
import torch.distributed as dist
from conformance.ddp import dense_loss, dense_model, ranks
from torch.nn.parallel import DistributedDataParallel

import sirtaki.torch_backend
from sirtaki.engine import job
from sirtaki.engine.autograd import when_backward_ends

dist.init_process_group("gloo")
kind, is_last = sys.argv[1], dist.get_rank() == dist.get_world_size() - 1
if is_last and kind == "missing":
    del os.environ["SIRTAKI_ATTACH"]
if is_last and kind == "setting":
    os.environ["SIRTAKI_STREAMS"] = "many"
sirtaki.torch_backend.register()
from sirtaki.torch import attach_vote, ddp  # noqa: E402

if kind == "late":
    attach_vote.TIMEOUT_S = 1.0

hooks = sys.excepthook, sys.exit, dict(os.environ)
model = dense_model()
alone, wrapped = dense_model(), DistributedDataParallel(model)
for step in range(4):
    for one in (model, alone):
        one.zero_grad()
    result = dense_loss(wrapped, dist.get_rank(), step)
    if is_last and step == 0:
        if kind == "late":  # this callback runs before the vote
            result.register_hook(lambda _: when_backward_ends(lambda: time.sleep(3)))
        if kind == "connection":
            open_files = len(os.listdir("/proc/self/fd")) + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    began_s = time.monotonic()
    result.backward()
    assert time.monotonic() - began_s < 30
    sum(dense_loss(alone, rank, step) for rank in ranks()).div(len(ranks())).backward()
    for param, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.grad, wanted.grad)
assert not ddp.is_attached(wrapped)
assert not job.is_initialized()
assert (sys.excepthook, sys.exit, dict(os.environ)) == hooks
dist.destroy_process_group()
