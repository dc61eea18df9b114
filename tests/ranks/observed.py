"""A job with watchers, scraped by Prometheus and shown by `sirtaki top`. Started by test_observed.py."""

import math
import os
import urllib.request

import torch
from conformance.training import main
from torch import nn

import sirtaki.torch as hvd
from sirtaki import watch
from sirtaki.watch.watchers import running_jobs, watching


class Seen(watch.Watcher):
    def __init__(self) -> None:
        self.iterations: list[watch.IterationEnded] = []
        self.trials: list[watch.TrialEnded] = []
        self.decisions: list[watch.Decision] = []
        self.generations: list[watch.GenerationBegun] = []

    def iteration(self, event: watch.IterationEnded) -> None:
        self.iterations.append(event)

    def trial(self, event: watch.TrialEnded) -> None:
        self.trials.append(event)

    def decision(self, event: watch.Decision) -> None:
        self.decisions.append(event)

    def generation(self, event: watch.GenerationBegun) -> None:
        self.generations.append(event)


def train(steps: int) -> torch.optim.Optimizer:
    """Train for some steps, and return the optimizer. Collective."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
    return optimizer


def mine() -> dict:
    return next(job for job in running_jobs() if job["pid"] == os.getpid())


def iterations_trials_and_the_decision_are_told() -> None:
    seen = Seen()
    watch.add(seen)
    train(80)
    watch.remove(seen)
    assert seen.generations == [watch.GenerationBegun(number=0, rank=hvd.rank(), size=hvd.size())]
    numbers = [event.number for event in seen.iterations]
    assert numbers == list(range(numbers[0], numbers[0] + 80))
    assert math.isnan(seen.iterations[0].step_s)
    for event in seen.iterations[1:]:
        assert event.step_s >= event.communication_s >= event.exposed_s >= 0.0
        assert event.n_bytes == 4 * (8 * 64 + 64 + 64 * 4 + 4)
    assert seen.iterations[5].tuning
    assert not seen.iterations[-1].tuning
    assert (len(seen.decisions) == 1 and len(seen.trials) > 1) == (hvd.rank() == 0)


def top_sees_the_job_at_a_cost_only_once_it_has_looked() -> None:
    optimizer = train(3)
    if hvd.local_rank() == 0:
        assert mine()["ranks"] == hvd.size()
        assert "step_s" not in mine()
        assert len(watching) == 1
    else:
        assert watching == []
    hvd.barrier()
    again = train(5)
    if hvd.local_rank() == 0:
        job = mine()
        assert job["step_s"] >= job["communication_s"] > 0.0
        assert job["iteration"] >= 3
        assert job["setting"]
    hvd.barrier()
    del optimizer, again


def prometheus_is_answered_at_each_ranks_port() -> None:
    train(4)
    port = int(os.environ["SIRTAKI_METRICS_PORT"]) + hvd.local_rank()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    assert f'sirtaki_ranks{{rank="{hvd.rank()}"}} {float(hvd.size())}\n' in text
    (line,) = [line for line in text.splitlines() if line.startswith("sirtaki_iterations_total")]
    assert float(line.split()[-1]) >= 4
    hvd.barrier()


CASES = (iterations_trials_and_the_decision_are_told, top_sees_the_job_at_a_cost_only_once_it_has_looked)
METRICS = (prometheus_is_answered_at_each_ranks_port,)

if __name__ == "__main__":
    main(METRICS if "SIRTAKI_METRICS_PORT" in os.environ else CASES)
