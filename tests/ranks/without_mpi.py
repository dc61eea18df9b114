"""Train without mpi4py. Started by test_without_mpi.py."""

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType


class NoMpi(importlib.abc.MetaPathFinder):
    """Import hook that hides mpi4py."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] == "mpi4py":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


for module in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
    del sys.modules[module]
sys.meta_path.insert(0, NoMpi())

import torch  # noqa: E402

import sirtaki.torch as hvd  # noqa: E402

assert not hvd.mpi_enabled()
for _ in range(2):  # init() may be called again
    hvd.init()
    assert not hvd.mpi_threads_supported()
    model = torch.nn.Linear(4, 2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.full((3, 4), float(hvd.rank()))).sum().backward()
        optimizer.step()
    weights = hvd.allgather(model.weight.detach().reshape(1, -1), name="weights")
    assert torch.equal(weights, weights[:1].expand_as(weights))
    assert len(weights) == hvd.size()
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_size()) == (hvd.rank(), hvd.size(), 1)
    pair = hvd.add_process_set([0, hvd.size() - 1]) if hvd.size() > 2 else hvd.global_process_set
    if pair.included():
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=pair, name="pair").tolist() == [2.0, 2.0]
    hvd.shutdown()
assert not any(name.startswith("mpi4py") for name in sys.modules)
print(f"trained {sys.argv[1:]}")
