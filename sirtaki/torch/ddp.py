"""For scripts that train with PyTorch's DistributedDataParallel: one line has its gradients reduced by Sirtaki, tuned.

model = DistributedDataParallel(model)
sirtaki.torch.ddp.attach(model)
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sirtaki.autotune.trial import Arm
from sirtaki.comm.collectives.rank_sets import GLOBAL
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.engine import job
from sirtaki.engine.reducing.ddp_gradients import AtRest, DdpGradients, Outputs
from sirtaki.engine.reducing.reducer import ReducerOptions
from sirtaki.errors import ConfigError

from .basics import record_if_wanted
from .compression import Choice, Compression, reduction_options


def attach(
    model: DistributedDataParallel, *, arms: Sequence[Arm] | None = None, compression: Choice = Compression.none
) -> None:
    """Collective, before the first backward pass: from now on Sirtaki averages the gradients of `model`.

    Whatever has started the ranks, and whatever carries their process group: Sirtaki connects them once more, if it has
    not been initialised. The rest of DDP stays as it is: its buckets and options, `no_sync()`, `join()`, unused
    parameters, buffers.

    Args:
        model: whose process group has all ranks; on one device.
        arms: search techniques to tune with, instead of the usual ones.
        compression: how gradients travel, as `DistributedOptimizer` takes it.

    Raises:
        ConfigError: the model's process group has not all ranks in it, or Sirtaki has been initialised with other
            ones; or DDP's own mixed precision is on.
        MismatchError: on all ranks, if their models differ.
        RuntimeError: DDP has a communication hook already.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"attach() takes a DistributedDataParallel model, not a {type(model).__name__}")
    _require_reducer_alone(model)
    group = model.process_group
    if dist.get_world_size(group) != dist.get_world_size():
        raise ConfigError("attach() takes a model whose process group has all ranks in it")
    if not job.is_initialized():
        job.init(beside=group)
        record_if_wanted()
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
    reduction = Reduction(postscale=1.0 / current.size, **reduction_options(compression))
    options = ReducerOptions(reduction=reduction, unused_as_none=True, arms=arms)
    gradients = DdpGradients(current, current.rank_sets[GLOBAL], named, passes=1, options=options)
    if model.static_graph:
        gradients.count_arrivals()
    model.find_unused_parameters = False  # those are found when the pass ends
    model.reducer = AtRest(model.reducer, gradients)  # type: ignore[assignment]
    model.register_forward_hook(Outputs(gradients))


def _require_reducer_alone(model: DistributedDataParallel) -> None:
    """Nothing has taken the place of DDP's reducer, or changes what it does."""
    if isinstance(model.reducer, AtRest):
        raise ConfigError("this model has been attached already")
    if getattr(model, "_comm_hooks", ()):
        raise ConfigError("the model has a communication hook: attach() takes its place, leave register_comm_hook out")
    if getattr(model, "_use_python_reducer", False):
        raise ConfigError('attach() does not go with torch._dynamo.config.optimize_ddp = "python_reducer"')
    if getattr(model, "_delay_all_reduce_params", ()):
        raise ConfigError("attach() does not go with DDP(delay_all_reduce_named_params=...), which it makes needless")
    if model.mixed_precision is not None:
        raise ConfigError("DDP(mixed_precision=...) does not go with attach(); torch.autocast does")
