"""Where the ranks of a script meet that says `init_method="sirtaki://"`: whatever launcher has started them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from sirtaki.comm.control.plane import ControlPlane
from sirtaki.engine.ranks import open_ranks
from sirtaki.settings import Settings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def meet(timeout: timedelta) -> tuple[Store, int, int]:
    """Collective over all ranks that the launcher has started.

    Returns:
        A store that all of them reach, this process's rank, and how many there are.

    Raises:
        ConfigError: what the launcher says does not fit together.
        CommError: the ranks do not find each other.
    """
    settings = replace(Settings.from_environ(), start_timeout_s=timeout.total_seconds())
    ranks = open_ranks(settings)
    control = ControlPlane(ranks, interface=settings.gloo_interface)
    store, _ = control.store()
    control.close()
    ranks.free()
    return store, control.rank, control.size
