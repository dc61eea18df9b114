"""An elastic training script on ranks that stay: commits, a disagreement, restoring. Started by test_elastic.py."""

import torch

import sirtaki.torch as hvd
from sirtaki.errors import CommError

hvd.init()
rank, size = hvd.rank(), hvd.size()

# The sampler deals every index once, as evenly as possible. After a reset it deals only the remaining ones.
sampler = hvd.elastic.ElasticSampler(range(23), shuffle=True, seed=3)
dealt = hvd.allgather_object(list(sampler))
assert set().union(*dealt) == set(range(23))
assert len({len(part) for part in dealt}) == 1
sampler.record_batch(0, 2)
first = set(sampler.get_indices(0, 2))
assert set(sampler.state_dict()["processed_indices"]) == first
sampler.set_epoch(1)
assert not sampler.processed_indices
assert sampler.processed_num == 0
assert size > 6 or list(sampler) != dealt[rank]

# After sync, all ranks have rank 0's state. After restore, they have the last commit. Processed indices are merged.
torch.manual_seed(rank)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.9)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, batch=rank, history=[rank])
sampler.record_indices([rank])
state.sync()
assert (state.batch, state.history) == (0, [0])
assert sampler.processed_indices == set(range(size))
assert sampler.processed_num == size
weights = hvd.allgather(model.weight.detach().reshape(1, -1))
assert torch.equal(weights, weights[:1].expand_as(weights))
assert optimizer.param_groups[0]["lr"] == 0.1

committed = model.weight.detach().clone()
state.batch = 7
state.commit()
with torch.no_grad():
    model.weight.add_(1.0)
state.batch, state.history = 8, ["spoilt"]
state.restore()
assert (state.batch, state.history) == (7, [0])
assert torch.equal(model.weight, committed)

# After a disagreement, all ranks repeat the training from the last commit.
calls, resets = [], []
state.register_reset_callbacks([lambda: resets.append(len(calls))])


@hvd.elastic.run
def train(state: hvd.elastic.TorchState, extra: str) -> str:
    calls.append(state.batch)
    state.batch += 1
    state.commit()
    state.batch += 100
    if len(calls) == 1 and size > 1:
        hvd.allreduce(torch.zeros(3 + rank), name="disagreement")
    return f"{extra} {state.batch}"


assert train(state, extra="batch") == ("batch 109" if size > 1 else "batch 108")
assert calls == ([7, 8] if size > 1 else [7])
assert resets == ([1] if size > 1 else [])


# A lost rank raises an error in the script.
@hvd.elastic.run
def lose(state: hvd.elastic.TorchState) -> None:
    raise CommError("a rank is lost")


try:
    lose(state)
except CommError as err:
    print(f"ok {rank} {err}")
