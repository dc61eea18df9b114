"""Ranks that act differently between steps. A rank that waits for gradients continues where peers need it elsewhere.

The first rank lacks the gradient of one of two parameters. So its backward pass does not wait, while its peers' would
wait for it. Started by test_blocked.py.
"""

import time
from dataclasses import dataclass

import pytest
import torch
from conformance.training import main
from rank_jobs import cases

import sirtaki.torch as hvd
from sirtaki.engine.participants import REPORT_ANYWAY_S

SOON_S = 10.0
WHILE_S = 0.3


@dataclass
class Trained:
    one: torch.nn.Parameter
    other: torch.nn.Parameter
    optimizer: torch.optim.Optimizer

    def backward(self, *, lacks: bool = False) -> float:
        """Run a backward pass with this rank's own gradients. Return its duration in seconds."""
        begin_s = time.monotonic()
        ((hvd.rank() + 1) ** 2 * (self.one if lacks else self.one + self.other)).backward()
        return time.monotonic() - begin_s

    @property
    def reduced(self) -> bool:
        return mean_of(range(hvd.size())) == pytest.approx(float(self.one.grad))


def mean_of(ranks: range) -> float:
    """Return the mean over all ranks, to which only the given ranks contribute gradients."""
    return sum((rank + 1) ** 2 for rank in ranks) / hvd.size()


def make() -> Trained:
    one, other = (torch.nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(2))
    return Trained(one, other, hvd.DistributedOptimizer(torch.optim.SGD([one, other], lr=0.1)))


def end(*everything: Trained, lacking: int = 1) -> None:
    """Step all optimizers, and check the last one's gradients, of which `lacking` ranks had only one."""
    for trained in everything:
        trained.optimizer.step()
        assert trained.reduced
    assert mean_of(range(lacking, hvd.size())) == pytest.approx(float(everything[-1].other.grad))
    for trained in everything:
        trained.optimizer.zero_grad()
    hvd.barrier()


def goes_on(trained: Trained) -> None:
    assert trained.backward() < SOON_S
    assert not trained.reduced


def a_rank_that_lacks_a_gradient_waits_in_an_operation() -> None:
    trained = make()
    for _ in range(4):  # profiled iterations, then scheduled ones
        if hvd.rank() == 0:
            trained.backward(lacks=True)
        else:
            goes_on(trained)
        hvd.allreduce(torch.ones(1))
        end(trained)


def a_rank_that_computes_or_waits_for_what_the_others_have_submitted_holds_nobody_up() -> None:
    trained = make()
    for _ in range(3):
        if hvd.rank() == 0:
            trained.backward(lacks=True)
            time.sleep(WHILE_S)
            hvd.allreduce(torch.ones(1), name="early")
            time.sleep(WHILE_S)
        else:
            handle = hvd.allreduce_async(torch.ones(1), name="early")
            assert trained.backward() > WHILE_S
            assert trained.reduced
            hvd.synchronize(handle)
        end(trained)


def a_rank_waits_in_another_optimizers_step() -> None:
    first, second = make(), make()
    for _ in range(4):
        first.backward()
        if hvd.rank() == 0:
            second.backward(lacks=True)
        else:
            # The training thread continues; after profiling, the first step waits for no rank.
            assert second.backward() < SOON_S
        end(first, second)


def a_rank_leaves_its_backward_pass_out() -> None:
    trained = make()
    if hvd.rank() == 0:
        trained.one.grad = torch.ones((), dtype=torch.float64)
    else:
        goes_on(trained)
    hvd.allreduce(torch.ones(1))
    end(trained)


def two_ranks_wait_at_the_ends_of_different_backward_passes() -> None:
    both = (make(), make())
    for _ in range(2):
        turn = hvd.rank() % 2
        # One of the backward passes continues, and then the other one can complete.
        assert both[turn].backward() < SOON_S
        both[1 - turn].backward()
        end(*both, lacking=0)


def ranks_without_gradients_of_one_optimizer_wait_long_for_each_other_once_only() -> None:
    both, taken_s = (make(), make()), list[float]()
    for _ in range(6):
        mine = [trained for number, trained in enumerate(both) if number != hvd.rank()]
        begin_s = time.monotonic()
        sum((hvd.rank() + 1) ** 2 * (trained.one + trained.other) for trained in mine).backward()
        for trained in both:
            trained.optimizer.step()
        taken_s.append(time.monotonic() - begin_s)
        for number, trained in enumerate(both):
            assert mean_of(range(hvd.size())) - (number + 1) ** 2 / hvd.size() == pytest.approx(float(trained.one.grad))
            trained.optimizer.zero_grad()
        hvd.barrier()
    slowest_s = [max(ranks) for ranks in zip(*hvd.allgather_object(taken_s), strict=True)]
    assert sorted(slowest_s)[2] < REPORT_ANYWAY_S, slowest_s


CASES = cases(globals())

if __name__ == "__main__":
    main(CASES)
