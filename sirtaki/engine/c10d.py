"""Functions about existing process groups that need private names of `torch.distributed`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from sirtaki.comm.control.failure import Timeout

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import Store


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend, such as "gloo", that a process group uses for tensors on `device`."""
    return str(group._get_backend(device).name())


def may_add_groups_alone() -> bool:
    """Return whether a subset of ranks can create a process group without the remaining ranks.

    Return False in two cases, in which all ranks must take part. Either the default group is bound to a device, so that
    NCCL splits the default group's communicator. Or the default group creates groups by its own method `new_group`.
    """
    import torch.distributed as dist

    world: Any = dist.group.WORLD  # Typed as Any, because PyTorch's type stub lacks the two attributes read below.
    return not hasattr(world, "new_group") and world.bound_device_id is None


def group_beside(group: dist.ProcessGroup, device: torch.device, token: str) -> dist.ProcessGroup:
    """Create a copy of the process group `group`, with the same ranks, backend and timeout. Collective over its ranks.

    `torch.distributed.new_group` is not used, because it derives the new group's name from the count of groups that a
    rank is in. Ranks with different counts would use different names, and not connect. The name could also be that of a
    destroyed group, whose addresses are still in the store.

    Args:
        group: process group to copy.
        device: device of the new group's tensors.
        token: part of the new group's name. It must be equal on all ranks, and unused before.

    Raises:
        AttributeError, TypeError: this PyTorch version creates process groups in another way.
    """
    import torch.distributed as dist

    c10d, ranks = dist.distributed_c10d, dist.get_process_group_ranks(group)
    backend, _ = c10d._world.pg_map[group]
    default = c10d._get_default_group()
    _, store = c10d._world.pg_map[default]
    options = getattr(group._get_backend(device), "options", None)
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        group.rank(),
        list(ranks),
        backend,
        store,
        c10d.GroupName(f"sirtaki_{hashlib.sha256(str(ranks).encode()).hexdigest()[:16]}_{token}"),
        timeout=getattr(options, "_timeout", None) or c10d.default_pg_timeout,
        device_id=default.bound_device_id,
        group_desc="fsdp_reduce_scatter",
    )
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return cast("dist.ProcessGroup", made)


def timeout_of(group: dist.ProcessGroup) -> Timeout | None:
    """Return a callable that reads the current timeout of `group`, in seconds.

    The callable returns the longest timeout if the group's backends have different ones. It may be called after the
    group has been destroyed.

    Returns:
        None if PyTorch does not expose the timeout.
    """
    found: list[Any] = [getattr(group._get_backend(each), "options", None) for each in group._device_types]
    options = [each for each in found if hasattr(each, "_timeout")]
    return partial(_longest_s, options) if options else None


def _longest_s(options: Sequence[Any]) -> float:  # Typed as Any, because each backend has its own class of options.
    return max(float(each._timeout.total_seconds()) for each in options)


def default_store() -> Store | None:
    """Return the key-value store of `torch.distributed`, which all ranks share. None if the backend has none (MPI)."""
    import torch.distributed as dist

    world = dist.group.WORLD
    return None if world is None else cast("Store | None", dist.distributed_c10d._world.pg_map[world][1])
