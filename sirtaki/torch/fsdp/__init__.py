"""For scripts that shard their model with PyTorch's `fully_shard`: one line has Sirtaki carry its shards, tuned.

for block in model.blocks: fully_shard(block)
fully_shard(model)
sirtaki.torch.fsdp.attach(model)

FSDP gathers the parameters of each module before they are used, and scatters its gradients. It waits for both at once,
and each uses one connection. After `attach`, gathers and scatters use several connections (`comm.shards`), and FSDP
goes on while they are in flight:

    gather     launched when FSDP asks for it, waited for when the module is used; FSDP prefetches some modules
    scatter    launched at the end of the module's backward pass, waited for when the whole pass ends, or when the next
               scatter (or the one after it, if memory allows) needs its memory

If FSDP or a hook reads a gradient earlier, the scatter is waited for at once: gradients that accumulate, are divided or
cast by FSDP, are all-reduced over replicas, or have hooks of the user's.

On GPUs PyTorch's own collectives carry the shards, in CUDA streams. Sirtaki tunes how far ahead parameters are
gathered, which parameters are kept for the backward pass, how many scatters may be in flight, and whether scatters have
a communicator of their own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from sirtaki.comm.compress import Codec, Quantised, Rounded
from sirtaki.engine.console import start_logging
from sirtaki.engine.job import is_initialized
from sirtaki.engine.settings import Settings
from sirtaki.errors import ConfigError
from sirtaki.machine import finalize
from sirtaki.torch.compression import Choice, NoneCompressor, reduction_options
from sirtaki.uncompiled import exclude_from_compilation

from . import callbacks, replicated
from .connections import ShardConnections
from .model import ShardedModel
from .private import find_groups, log_unchecked_version, owners_of, sharded_modules
from .target import ShardTarget

__all__ = ["attach", "attached", "describe"]


def attach(
    model: nn.Module,
    *,
    gathers: Choice = NoneCompressor,
    scatters: Choice = NoneCompressor,
    carries: bool | None = None,
) -> None:
    """Have Sirtaki gather and scatter the shards of `model`, tuned. Collective, before the first forward pass.

    Any launcher may have started the ranks, and any backend may carry their process group, because Sirtaki connects
    the ranks once more. Meshes, policies, hooks and checkpoints of FSDP stay as they are. Groups of one rank are
    ignored.

    Args:
        model: `fully_shard` has been called on it, and on its blocks before; or `replicate`, whose gradients are
            reduced as those of a DDP model (`sirtaki.torch.ddp`).
        gathers: how gathered shards are packed: `Compression.int8`, `.fp8`, `.fp16`, `.bf16` or a codec of
            the user's own. Modules compute with unpacked parameters; the optimizer and checkpoints have exact shards.
            Ranks that share memory pack nothing.
        scatters: the same for gradients, which are summed after unpacking.
        carries: whether Sirtaki carries the shards. False = PyTorch's own collectives do, or those that the user has
            given to FSDP, and Sirtaki tunes when. None = it does for parameters on the CPU, and for no others.

    Raises:
        ConfigError: PyTorch is too old, nothing is sharded, it is attached already, or shards are to be carried or
            packed that are not on the CPU; or modules have parameters on several meshes; or a compressor cannot pack a
            tensor by itself.
        MismatchError: on all ranks, if their models or compressors differ.
    """
    packing = _codec(gathers), _codec(scatters)
    modules = sharded_modules(model)
    if not modules:
        raise ConfigError("attach() takes a model after fully_shard() or replicate(), and this one is not sharded")
    groups = find_groups(modules)
    # PyTorch may carry the gradients of parameters that are sharded over one rank, but not those under replicate().
    replicas = [
        group for group in groups if group.replicated and (carries is not False or group.shard_process_group is None)
    ]
    sharded = [group for group in groups if group not in replicas]
    if replicas and (carries is False or (packing[0] and not sharded)):
        raise ConfigError("replicated parameters are not gathered, and Sirtaki carries their gradients")
    devices = {str(group.device) for group in sharded if group.device.type != "cpu"}
    if devices and (carries or any(packing)):
        raise ConfigError(f"Sirtaki carries and packs parameters on the CPU, and these are on {', '.join(devices)}")
    if carries is False and any(packing):
        raise ConfigError("gathers and scatters are packed where Sirtaki carries them, and not with carries=False")
    settings = Settings.from_environ()
    if not is_initialized():  # otherwise `hvd.init()` has done so
        start_logging(settings, dist.get_rank())
    log_unchecked_version()
    if replicas:
        gradients = replicated.attach(model, replicas, scatters)
        for group in replicas:
            group.set_owner(gradients or True)
        replicated_modules = {id(module) for group in replicas for module in group.modules}
        modules = [module for module in modules if id(module) not in replicated_modules]
    if not sharded:
        return
    connections = ShardConnections(settings, sharded, packing, carries=not devices if carries is None else carries)
    # Models are garbage-collected at different times on different ranks.
    finalize(model, connections.leave)
    state = ShardedModel(sharded, connections, packing, settings)
    state.tuner = ShardTarget(state, settings)
    exclude_from_compilation()
    callbacks.install(state, model, modules)


def _codec(choice: Choice) -> Codec | None:
    options = reduction_options(choice)
    if "wire_dtype" in options:
        return Rounded(dict(options["wire_dtype"])[torch.float32])
    scheme = options.get("compression")
    if scheme is None:
        return None
    if not isinstance(scheme, Quantised):
        raise ConfigError("shards are packed by int8, fp8, fp16, bf16 or an object with pack() and unpack()")
    return scheme.codec


def attached(model: nn.Module) -> ShardedModel | None:
    """Return the state of an attached model. None if it is not attached, or replicated."""
    return next((owner for owner in owners_of(model) if isinstance(owner, ShardedModel)), None)


def describe(model: nn.Module) -> str:
    """Describe what carries the shards of an attached model, and the setting. Empty if the model is not attached."""
    found = attached(model)
    return "" if found is None else found.describe()
