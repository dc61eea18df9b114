"""Private names of `torch.distributed` about process groups that exist."""

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
    """Return the name of the backend that carries a process group's tensors on `device`: "gloo", "nccl"."""
    return str(group._get_backend(device).name())


def may_add_groups_alone() -> bool:
    """Return whether a subset of ranks may make a process group alone.

    They may not if the default group is bound to a device, because NCCL then splits its communicator. They may not if
    the default group makes groups by itself, either.
    """
    import torch.distributed as dist

    world: Any = dist.group.WORLD  # Any: the stub lacks both attributes
    return not hasattr(world, "new_group") and world.bound_device_id is None


def group_beside(group: dist.ProcessGroup, device: torch.device, token: str) -> dist.ProcessGroup:
    """Make another process group of the same ranks, with the same backend and timeout. Collective over its ranks.

    `torch.distributed.new_group` names a group by the number of groups that this rank is in. Ranks with different
    numbers would not meet. The name could also be that of a destroyed group, whose addresses are still in the store.

    Args:
        group: the process group to imitate.
        device: where its tensors are.
        token: part of the name, the same on all ranks and never used before.

    Raises:
        AttributeError, TypeError: this PyTorch makes process groups in another way.
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
    """Return the timeout of a process group, the longest if it differs by device. None if PyTorch does not expose it.

    The timeout is a function. It returns the seconds that are set in `torch.distributed` at the time of the call, also
    after the group has been destroyed.
    """
    found: list[Any] = [getattr(group._get_backend(each), "options", None) for each in group._device_types]
    options = [each for each in found if hasattr(each, "_timeout")]
    return partial(_longest_s, options) if options else None


def _longest_s(options: Sequence[Any]) -> float:  # Any: options of a backend
    return max(float(each._timeout.total_seconds()) for each in options)
