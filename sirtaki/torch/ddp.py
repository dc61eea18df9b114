"""For scripts that train with PyTorch's DistributedDataParallel: one line has its gradients reduced by Sirtaki, tuned.

model = DistributedDataParallel(model)
sirtaki.torch.ddp.attach(model)
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from sirtaki.autotune.arms.base import Arm
from sirtaki.comm.collectives.rank_sets import GLOBAL
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.engine import job
from sirtaki.engine.ddp_buckets import DdpBuckets
from sirtaki.engine.reducer_options import ReducerOptions
from sirtaki.errors import ConfigError


def attach(model: DistributedDataParallel, *, arms: Sequence[Arm] | None = None) -> None:
    """Collective, before the first backward pass: from now on Sirtaki averages the gradients of `model`.

    Whatever has started the ranks, and whatever carries their process group: Sirtaki connects them once more, if it has
    not been initialised. The rest of DDP stays as it is: its buckets and options, `no_sync()`, `join()`, unused
    parameters, buffers.

    Args:
        model: whose process group has all ranks; on one device.
        arms: search techniques to tune with, instead of the usual ones.

    Raises:
        ConfigError: the model's process group has not all ranks in it, or Sirtaki has been initialised with other
            ones; or DDP's own mixed precision is on.
        MismatchError: on all ranks, if their models differ.
        RuntimeError: DDP has a communication hook already.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"attach() takes a DistributedDataParallel model, not a {type(model).__name__}")
    if model.mixed_precision is not None:
        raise ConfigError("DDP(mixed_precision=...) does not go with attach(); torch.autocast does")
    group = model.process_group
    if dist.get_world_size(group) != dist.get_world_size():
        raise ConfigError("attach() takes a model whose process group has all ranks in it")
    if not job.is_initialized():
        job.init(beside=group)
    current = job.current()
    if current.elastic is not None:
        raise ConfigError(
            "attach() needs ranks that stay, as DDP does; where they come and go, DistributedOptimizer goes"
        )
    here, there = (current.rank, current.size), (dist.get_rank(group), dist.get_world_size(group))
    if here != there:
        raise ConfigError(
            f"hvd.init() has made this process rank {here[0]} of {here[1]}, and its process group rank {there[0]} of "
            f"{there[1]}: leave hvd.init() out, attach() does it"
        )
    if current.size == 1:
        return
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored]
    options = ReducerOptions(reduction=Reduction(postscale=1.0 / current.size), arms=arms)
    buckets = DdpBuckets(current, current.rank_sets[GLOBAL], named, options=options)
    model.register_comm_hook(buckets, _reduce)


def _reduce(buckets: DdpBuckets, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return buckets.reduce(bucket)  # DDP wants annotations that are types, not text
