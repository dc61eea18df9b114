"""Hybrid parallelism: scikit-learn's digits on a grid of ranks. Sirtaki handles the data-parallel dimension.

    torchrun --nproc-per-node 4 examples/hybrid.py --other tensor
    torchrun --nproc-per-node 4 examples/hybrid.py --other pipeline

In the other dimension, two ranks share a model. Tensor parallelism splits the matrices of its layers (parameters are
DTensors). Pipeline parallelism gives each rank some of its layers. Ranks with the same part form a process set.
"""

import argparse
from collections import OrderedDict
from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sirtaki.torch as hvd

BATCH_SIZE, MICROBATCHES = 64, 4  # global batch size; number of microbatches per rank and step


def make_model() -> nn.Sequential:
    torch.manual_seed(42)
    sizes = (64, 256, 256, 256, 10)
    layers = [layer for ins, outs in pairwise(sizes) for layer in (nn.Linear(ins, outs), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    return images[order[:1408]], labels[order[:1408]], images[order[1408:]], labels[order[1408:]]


def batches(epoch: int, count: int) -> Iterator[torch.Tensor]:
    """Yield the indices of the global batch of each step, the same on all ranks."""
    yield from torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).split(BATCH_SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", choices=["tensor", "pipeline"], default="tensor")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--save", metavar="FILE", help="write the parameters of the whole model to FILE")
    args = parser.parse_args()

    dist.init_process_group("sirtaki")
    hvd.init()
    mesh = init_device_mesh("cpu", (hvd.size() // 2, 2), mesh_dim_names=("data", args.other))
    # Every rank must create all sets. A set holds the ranks of one column, which have the same part of the model.
    columns = [hvd.add_process_set(ranks) for ranks in mesh.mesh.T.tolist()]
    replicas = columns[mesh.get_local_rank(args.other)]

    if args.other == "tensor":
        model, passes = make_model(), 1
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
    else:
        model, passes = stage_of(make_model(), mesh.get_local_rank("pipeline")), MICROBATCHES
        schedule = pipeline(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), backward_passes_per_step=passes, process_set=replicas
    )

    images, labels, *unseen = digits()
    for epoch in range(args.epochs):
        losses = []
        for batch in batches(epoch, len(labels)):
            mine = batch.chunk(mesh.size(0))[mesh.get_local_rank("data")]
            optimizer.zero_grad()
            if args.other == "tensor":
                loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
                loss.backward()
                losses.append(loss.detach())
            elif mesh.get_local_rank("pipeline") == 0:
                schedule.step(images[mine])
            else:
                of_parts: list[torch.Tensor] = []
                schedule.step(target=labels[mine], losses=of_parts)
                losses.append(torch.stack(of_parts).detach().mean())
            optimizer.step()
        if mesh.get_local_rank(args.other) == 1:  # in a pipeline, only the last stage has the loss
            loss = hvd.allreduce(torch.stack(losses).mean(), name="loss", process_set=replicas)
            if mesh.get_local_rank("data") == 0:
                print(f"epoch {epoch + 1}: loss {loss:.7f}", flush=True)

    whole = make_model()
    whole.load_state_dict(gathered(model))
    if hvd.rank() == 0:
        accuracy = (whole(unseen[0]).argmax(dim=1) == unseen[1]).double().mean()
        print(f"accuracy on {len(unseen[1])} unseen digits: {100 * accuracy:.1f} %", flush=True)
        if args.save:
            torch.save(whole.state_dict(), args.save)
    hvd.shutdown()
    dist.destroy_process_group()


def stage_of(model: nn.Sequential, number: int) -> nn.Sequential:
    layers = list(model.named_children())
    return nn.Sequential(OrderedDict(layers[:4] if number == 0 else layers[4:]))


def pipeline(model: nn.Sequential, mesh: DeviceMesh) -> Schedule1F1B:
    group = mesh.get_group("pipeline")
    stage = PipelineStage(model, dist.get_rank(group), 2, torch.device("cpu"), group=group)
    return Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.cross_entropy)


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of the whole model, assembled from all ranks' parts. Collective."""
    part = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.state_dict().items()}
    return {name: p for each in hvd.allgather_object(part) for name, p in each.items()}


if __name__ == "__main__":
    main()
