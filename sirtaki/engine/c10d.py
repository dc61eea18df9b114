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


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend, such as "gloo", that a process group uses for tensors on `device`."""
    return str(group._get_backend(device).name())


def may_add_groups_alone() -> bool:
    """Return whether a subset of ranks can create a process group without the remaining ranks.

    False if the default group is bound to a device, because NCCL then splits its communicator, and if the default group
    has its own way to create groups. In both cases all ranks must take part.
    """
    import torch.distributed as dist

    world: Any = dist.group.WORLD  # typed as Any, because PyTorch's type stub lacks the two attributes read below
    return not hasattr(world, "new_group") and world.bound_device_id is None


def group_beside(group: dist.ProcessGroup, device: torch.device, token: str) -> dist.ProcessGroup:
    """Create a second process group of the ranks, backend and timeout of `group`. Collective over its ranks.

    `torch.distributed.new_group` is not used, because it names a group by the number of groups that a rank is in. Ranks
    with different numbers would not connect. The name could also be that of a destroyed group, whose addresses are
    still in the store.

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
    """Return a function that returns a process group's current timeout in seconds.

    Return None if PyTorch does not expose the timeout. The function returns the longest timeout if backends differ. It
    also works after the group has been destroyed.
    """
    found: list[Any] = [getattr(group._get_backend(each), "options", None) for each in group._device_types]
    options = [each for each in found if hasattr(each, "_timeout")]
    return partial(_longest_s, options) if options else None


def _longest_s(options: Sequence[Any]) -> float:  # Any, because each backend has its own class of options
    return max(float(each._timeout.total_seconds()) for each in options)
