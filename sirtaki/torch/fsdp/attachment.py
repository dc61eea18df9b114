"""The steps by which a model under `fully_shard` or `replicate` is attached: check, connect, install.

The first step is local, the second collective, and the third local again. So ranks can agree after each collective step
whether all have succeeded, before PyTorch's model changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store

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
from .private import find_groups, log_unchecked_version, ranks_of_model, sharded_modules
from .target import ShardTarget


@runtime_checkable
class Detachable(Protocol):
    """Owner of FSDP's parameter groups: the Sirtaki object that runs the collectives of the groups."""

    def detach(self) -> None:
        """Let FSDP communicate itself again. Collective, between two training steps."""
        ...


class Attachment:
    """A model that is being attached. See `sirtaki.torch.fsdp.attach` for the arguments and errors.

    Attributes:
        kind: name of the way in which PyTorch distributes the model, for messages.
        model: the whole model.
    """

    kind = "FSDP2"

    def __init__(
        self,
        model: nn.Module,
        *,
        gathers: Choice = NoneCompressor,
        scatters: Choice = NoneCompressor,
        carries: bool | None = None,
    ) -> None:
        """Store the arguments. `check`, `connect` and `install` must follow, in this order."""
        self.model, self._gathers, self._scatters, self._wants_to_carry = model, gathers, scatters, carries
        self._gradients: replicated.ReplicatedGradients | None = None
        self._state: ShardedModel | None = None
        self._connections: ShardConnections | None = None

    @property
    def ranks(self) -> Sequence[int]:
        """Return the global ranks that train the model."""
        return ranks_of_model(self.model)

    def check(self) -> None:
        """Check whether the model can be attached. Not collective.

        Raises:
            ConfigError: the model cannot be attached.
        """
        carries = self._wants_to_carry
        self._packing = packing = _codec(self._gathers), _codec(self._scatters)
        self._modules = modules = sharded_modules(self.model)
        if not modules:
            raise ConfigError(
                "this model is not prepared for fsdp.attach(): call fully_shard() or replicate() on it first"
            )
        groups = find_groups(modules)
        # Sirtaki's reducer for DDP all-reduces the gradients of groups under `replicate()`, and of groups that are
        # sharded over a single rank. With `carries=False`, PyTorch reduces the gradients of single-rank groups.
        self._replicas = replicas = [
            group
            for group in groups
            if group.replicated and (carries is not False or group.shard_process_group is None)
        ]
        self._sharded = sharded = [group for group in groups if group not in replicas]
        if replicas and (carries is False or (packing[0] and not sharded)):
            raise ConfigError(
                "fsdp.attach() accepts neither gathers= nor carries=False for a model under replicate(): such a model "
                "gathers nothing, and only Sirtaki can send its gradients; remove these arguments"
            )
        devices = {str(group.device) for group in sharded if group.device.type != "cpu"}
        if devices and (carries or any(packing)):
            raise ConfigError(
                "fsdp.attach() can send or compress shards (carries=True, gathers=, scatters=) only on the CPU, but "
                f"this model's parameters are on {', '.join(devices)}; remove these arguments"
            )
        if carries is False and any(packing):
            raise ConfigError(
                "gathers= and scatters= of fsdp.attach() require that Sirtaki sends the shards, so carries=False is "
                "not possible; remove carries=False, or remove gathers= and scatters="
            )
        self._carries = not devices if carries is None else carries
        for group in groups if self._carries else replicas:
            group.require_custom_collectives()
        self._settings = Settings.from_environ()
        if replicas:
            replicated.require_attachable(replicas)

    def connect(self, store: Store | None = None) -> None:
        """Open the connections between ranks. Collective.

        Args:
            store: key-value store by which the ranks exchange addresses. None to use the model's process groups.

        Raises:
            ConfigError, MismatchError, CommError: see `sirtaki.torch.fsdp.attach`.
        """
        settings = self._settings
        if not is_initialized():  # Start logging here only if `hvd.init()` has not done so.
            start_logging(settings, dist.get_rank())
        log_unchecked_version()
        if self._replicas:
            self._gradients = replicated.connect(self.model, self._replicas, self._scatters, store)
        if self._sharded:
            self._connections = ShardConnections(
                settings, self._sharded, self._packing, carries=self._carries, store=store
            )
            self._state = ShardedModel(self._sharded, self._connections, self._packing, settings)
            self._state.tuner = ShardTarget(self._state, settings)

    def install(self) -> None:
        """Let FSDP call Sirtaki for its communication. Not collective."""
        modules = self._modules
        if self._replicas:
            if self._gradients is not None:
                self._gradients.install(self.model)
                for group in self._replicas:
                    group.set_owner(self._gradients)
            replicated_modules = {id(module) for group in self._replicas for module in group.modules}
            modules = [module for module in modules if id(module) not in replicated_modules]
        if self._state is not None:
            # Close the connections without waiting, because models are garbage-collected at different times on
            # different ranks.
            finalize(self.model, self._state.connections.leave)
            exclude_from_compilation()
            callbacks.install(self._state, self.model, modules)

    def undo(self) -> None:
        """Close what `connect` has opened, because another rank could not connect. Not collective."""
        if self._gradients is not None:
            self._gradients.close("because the model could not be attached on all ranks")
        if self._connections is not None:
            self._connections.leave()


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
