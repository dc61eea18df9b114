"""A script as written for Horovod trains on, the same on all ranks, while a rank is killed and hosts come and go."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import os, time
import torch
import horovod.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())

@hvd.elastic.run
def train(state):
    print(f"begins at {state.batch} as {hvd.rank()} of {hvd.size()}, process {os.getpid()}", flush=True)
    while True:
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        time.sleep(0.02)
        state.batch += 1
        if state.batch % 10 == 0:
            state.stops = bool(hvd.broadcast_object(os.path.exists("stop")))
            state.commit()
            if state.stops:
                break
    print(f"ends with {sum(p.double().sum().item() for p in model.parameters())!r}", flush=True)

train(hvd.elastic.TorchState(model, optimizer, batch=0, stops=False))
"""


def begun(job, size: int) -> list[tuple[int, int, int]]:
    """At which step, as which rank, which process: the newest beginnings of a generation of so many."""
    text = (job.folder / "out").read_text()
    found = re.findall(rf"begins at (\d+) as (\d+) of {size}, process (\d+)", text)
    return [(int(step), int(rank), int(pid)) for step, rank, pid in found]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_unchanged_script_survives_kills_and_hosts_that_come_and_go(start: Callable, tmp_path: Path) -> None:
    script, hosts = tmp_path / "train.py", tmp_path / "hosts"
    script.write_text(SCRIPT)
    hosts.write_text("a:1\nb:1\n")
    job = start(
        "--as-horovod", "--on-failure", "replace-rank", "--min-np", 1, "--host-discovery-script", f"cat {hosts}",
        "--agent-command", "{command}", command=["python", str(script)],
    )  # fmt: skip
    job.until(lambda: len(begun(job, 2)) == 2, timeout_s=60.0)
    hosts.write_text("a:1\nb:1\nc:1\n")
    job.until(lambda: len(begun(job, 3)) == 3, timeout_s=60.0)
    third = sorted(begun(job, 3), key=lambda entry: entry[1])
    assert third[0][0] > 0
    os.kill(third[0][2], signal.SIGKILL)
    job.until(lambda: len(begun(job, 2)) == 4, timeout_s=60.0)
    assert {pid for _, _, pid in begun(job, 2)[2:]} == {pid for _, _, pid in third[1:]}
    assert begun(job, 2)[-1][0] >= third[0][0]
    job.until(lambda: len(begun(job, 3)) == 6, timeout_s=60.0)
    hosts.write_text("b:1\nc:1\n")
    job.until(lambda: len(begun(job, 2)) == 6, timeout_s=60.0)
    (job.folder / "stop").touch()
    job.process.wait(60.0)
    assert job.process.returncode == 0
    sums = re.findall(r"ends with (\S+)", (job.folder / "out").read_text())
    assert len(sums) == 2
    assert len(set(sums)) == 1
