"""Tells PyTorch that there is a backend "sirtaki".

`import torch` calls `register` in every process where Sirtaki is installed (entry point `torch.backends`), so nothing
of Sirtaki is loaded here: what makes process groups is looked up when the first one is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

NAME = "sirtaki"

PROCESS_GROUP, MEETING = "sirtaki.torch.distributed.process_group", "sirtaki.torch.distributed.process_group"


def register() -> None:
    """Harmless if it has been called, or where PyTorch was built without torch.distributed."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import register_rendezvous_handler

    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _process_group, devices=["cpu", "cuda"])
    register_rendezvous_handler(NAME, _meet)  # type: ignore[no-untyped-call]


def _process_group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    made: ProcessGroup = importlib.import_module(PROCESS_GROUP).SirtakiProcessGroup(store, rank, size, timeout)
    return made


def _meet(url: str, timeout: timedelta, **_: object) -> Iterator[tuple[Store, int, int]]:
    yield importlib.import_module(MEETING).meet(timeout)
