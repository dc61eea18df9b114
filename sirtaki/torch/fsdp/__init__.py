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

from torch import nn

from sirtaki.torch.compression import Choice, NoneCompressor

from .attachment import Attachment, Detachable
from .model import ShardedModel
from .private import owners_of

__all__ = ["attach", "attached", "describe", "detach", "is_attached"]


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
    attachment = Attachment(model, gathers=gathers, scatters=scatters, carries=carries)
    attachment.check()
    attachment.connect()
    attachment.install()


def detach(model: nn.Module) -> bool:
    """Let FSDP2 itself gather and reduce the shards of a model again. Collective, between two training steps.

    Accumulated gradients in `.grad` stay. A later `attach()` is possible.

    Args:
        model: the model that was passed to `attach`.

    Returns:
        False if the model is not attached.
    """
    owners = {id(owner): owner for owner in owners_of(model) if isinstance(owner, Detachable)}
    for owner in owners.values():
        owner.detach()
    return bool(owners)


def is_attached(model: nn.Module) -> bool:
    """Return whether `attach` was called for a module of the model."""
    return any(owner is not None for owner in owners_of(model))


def attached(model: nn.Module) -> ShardedModel | None:
    """Return Sirtaki's state of a sharded model for which `attach` was called.

    None if `attach` was not called for the model, or if the model is replicated.
    """
    return next((owner for owner in owners_of(model) if isinstance(owner, ShardedModel)), None)


def describe(model: nn.Module) -> str:
    """Describe how the shards of a model are sent, and the setting in use.

    Empty if `attach` was not called for the model.
    """
    found = attached(model)
    return "" if found is None else found.describe()
