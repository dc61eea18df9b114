"""Every eager collective on CUDA tensors, of every dtype, against the same on the host. Started by test_gpu.py."""

import os

import torch

import sirtaki.torch as hvd

hvd.init()
os.environ.setdefault("NCCL_HOSTID", f"rank{hvd.rank()}")
torch.cuda.set_device(0)
rank, size = hvd.rank(), hvd.size()
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8)


def same(on_gpu: torch.Tensor, on_host: torch.Tensor) -> None:
    assert on_gpu.is_cuda
    torch.testing.assert_close(on_gpu.cpu(), on_host)


for dtype in DTYPES:
    for numel in (1, 7, 1021):
        host = (torch.arange(numel * size) % 5 + rank + 1).to(dtype).view(size, numel)
        gpu = host.cuda()
        key = f"{dtype} {numel}"
        for op in (hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
            same(
                hvd.allreduce(gpu, op=op, name=f"g {key} {op}"),
                hvd.allreduce(host, op=op, name=f"h {key} {op}"),
            )
        same(hvd.allgather(gpu, name=f"ga {key}"), hvd.allgather(host, name=f"ha {key}"))
        same(
            hvd.broadcast(gpu, root_rank=size - 1, name=f"gb {key}"),
            hvd.broadcast(host, root_rank=size - 1, name=f"hb {key}"),
        )
        same(
            hvd.reducescatter(gpu, op=hvd.Sum, name=f"gr {key}"), hvd.reducescatter(host, op=hvd.Sum, name=f"hr {key}")
        )
        same(hvd.alltoall(gpu, name=f"gt {key}"), hvd.alltoall(host, name=f"ht {key}"))
    in_place = torch.full((33,), rank + 1, device="cuda").to(dtype)
    hvd.allreduce_(in_place, op=hvd.Sum, name=f"in place {dtype}")
    assert in_place.cpu().eq(sum(range(1, size + 1))).all()
many = [torch.full((index,), float(rank), device="cuda") for index in range(1, 20)]
for reduced in hvd.grouped_allreduce(many, op=hvd.Average, name="grouped"):
    torch.testing.assert_close(reduced, torch.full_like(reduced, (size - 1) / 2))
model = torch.nn.Linear(64, 64).cuda()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
sums = hvd.allgather(torch.stack([param.sum() for param in model.parameters()]).detach().view(1, -1))
assert all(torch.equal(row, sums[0]) for row in sums)
print(f"done {rank}", flush=True)
