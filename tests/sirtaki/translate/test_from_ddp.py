import pytest

from sirtaki.errors import TranslationError
from sirtaki.translate import translate

SCRIPT = """\
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo", world_size=int(os.environ["WORLD_SIZE"]))
sampler = DistributedSampler(data, shuffle=True)
model = torch.nn.Linear(4, 2)
model = DDP(model, find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in sampler:
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
torch.save(model.module.state_dict(), "m.pt")
dist.destroy_process_group()
"""


def test_names_become_names_and_the_wrapper_goes() -> None:
    after = translate(SCRIPT).after
    assert (
        after
        == """\
import os
import torch
import sirtaki.torch as hvd
from torch.utils.data.distributed import DistributedSampler

hvd.init()
sampler = DistributedSampler(data, shuffle=True, num_replicas=hvd.size(), rank=hvd.rank())
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for x in sampler:
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    hvd.allreduce_(loss, op=hvd.Average)
torch.save(model.state_dict(), "m.pt")
hvd.shutdown()
"""
    )


@pytest.mark.parametrize(
    "call", ["dist.all_gather(a, b)", "dist.all_reduce(a, group=g)", "dist.all_reduce(a, async_op=True)"]
)
def test_what_has_no_sure_counterpart_is_refused(call: str) -> None:
    with pytest.raises(TranslationError, match="line 19"):
        translate(f"{SCRIPT}{call}\n")
