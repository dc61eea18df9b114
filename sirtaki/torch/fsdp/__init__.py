"""Tuned all-gathers and reduce-scatters for models that are sharded with PyTorch's `fully_shard`.

    for block in model.blocks: fully_shard(block)
    fully_shard(model)
    sirtaki.torch.fsdp.attach(model)

FSDP all-gathers the parameters of each module before their use, and reduce-scatters the module's gradients. This
package says *gather* and *scatter* for short. Without Sirtaki, FSDP over Gloo waits for each collective at once, and
each collective uses one connection. After `attach`, gathers and scatters use several connections (`comm.shards`), and
overlap with computation:

    gather     launched when FSDP requests it. FSDP waits for it when it uses the module, and prefetches some modules.
    scatter    launched at the end of the module's backward pass. FSDP waits for it when the whole backward pass ends,
               or earlier if a later scatter needs its memory.

If FSDP accumulates, divides, casts or all-reduces the gradients, or if the user has registered gradient hooks, the
result of a scatter is read before the backward pass ends. Then FSDP waits for the scatter at once.

On GPUs, PyTorch's own collectives send the shards in CUDA streams. Then Sirtaki only tunes how far ahead parameters are
gathered, which parameters are kept for the backward pass, how many scatters may be in flight, and whether scatters have
an NCCL communicator of their own.
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
    """Let Sirtaki all-gather the sharded parameters of `model` and reduce-scatter its gradients, and tune both.

    Collective. Call it before the first forward pass. Works with every launcher and every backend of the process
    groups, because Sirtaki opens its own connections. Meshes, policies, hooks and checkpoints of FSDP stay unchanged.
    Process groups of one rank are ignored.

    Args:
        model: a model whose blocks and which itself were passed to `fully_shard`. If they were passed to `replicate`,
            Sirtaki reduces the gradients as for a DDP model (`sirtaki.torch.ddp`).
        gathers: compression of the parameters for the all-gathers: `Compression.int8`, `.fp8`, `.fp16`, `.bf16` or a
            custom codec. Modules compute with the decompressed parameters. The optimizer and checkpoints use the exact
            shards. Ranks that share memory do not compress.
        scatters: compression of the gradients for the reduce-scatters. Gradients are summed after decompression.
        carries: True if Sirtaki sends the shards. False if PyTorch's collectives or the user's own send the shards, and
            Sirtaki tunes only their timing. None means True for parameters on the CPU, and False for other parameters.

    Raises:
        ConfigError: PyTorch is too old, the model is not sharded or attached already, a module has parameters on
            several meshes, `carries=True` or compression is used with parameters that are not on the CPU, or
            compression is `Compression.topk` or `.powersgd`.
        MismatchError: the models or compressors of ranks differ. Raised on all ranks.
    """
    packing = _codec(gathers), _codec(scatters)
    modules = sharded_modules(model)
    if not modules:
        raise ConfigError(
            "this model is neither sharded nor replicated: call fully_shard() or replicate() on it before fsdp.attach()"
        )
    groups = find_groups(modules)
    # Choose the groups whose gradients Sirtaki's reducer for DDP all-reduces: those under `replicate()`, and those that
    # are sharded over one rank. With `carries=False`, PyTorch reduces the gradients of the latter.
    replicas = [
        group for group in groups if group.replicated and (carries is not False or group.shard_process_group is None)
    ]
    sharded = [group for group in groups if group not in replicas]
    if replicas and (carries is False or (packing[0] and not sharded)):
        raise ConfigError(
            "for a model under replicate(), remove gathers= and carries=False from fsdp.attach(): each rank has all "
            "parameters, so nothing is gathered, and Sirtaki must send the gradients"
        )
    devices = {str(group.device) for group in sharded if group.device.type != "cpu"}
    if devices and (carries or any(packing)):
        raise ConfigError(
            "carries=True, gathers= and scatters= of fsdp.attach() require parameters on the CPU, but this model has "
            f"parameters on {', '.join(devices)}; remove these arguments"
        )
    if carries is False and any(packing):
        raise ConfigError(
            "gathers= and scatters= of fsdp.attach() compress the shards that Sirtaki sends, but with carries=False "
            "PyTorch or your own hooks send them; remove carries=False, or remove gathers= and scatters="
        )
    settings = Settings.from_environ()
    if not is_initialized():  # if it is, `hvd.init()` has started logging
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
    # Close the connections without waiting, because models are garbage-collected at different times on different ranks.
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
        raise ConfigError(
            "gathers= and scatters= of fsdp.attach() must be Compression.int8, .fp8, .fp16, .bf16 or an object with "
            f"pack() and unpack(), not {choice!r}"
        )
    return scheme.codec


def attached(model: nn.Module) -> ShardedModel | None:
    """Return Sirtaki's state of a sharded model whose shards it sends or tunes.

    None if `attach` was not called for the model, or if the model is replicated.
    """
    return next((owner for owner in owners_of(model) if isinstance(owner, ShardedModel)), None)


def describe(model: nn.Module) -> str:
    """Describe how the shards of a model are sent, and the setting in use.

    Empty if `attach` was not called for the model.
    """
    found = attached(model)
    return "" if found is None else found.describe()
