"""Stop rank 0 for a while after it has sent its last message and its peers have received it."""

import time

import torch

import sirtaki.torch as hvd
from sirtaki.engine import job

hvd.init()
hvd.allreduce(torch.ones(3))
watchdog = job.current().watchdog
leave = watchdog.leave


def leave_late(timeout_s: float) -> bool:
    everybody = leave(timeout_s)
    time.sleep(7.0)
    return everybody


if hvd.rank() == 0:
    watchdog.leave = leave_late  # type: ignore[method-assign]  # as if it were stopped
print("ok")
