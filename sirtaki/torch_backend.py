"""Tells PyTorch that there is a backend "sirtaki".

`import torch` calls `register` in every process where Sirtaki is installed (entry point `torch.backends`), so nothing
of Sirtaki is loaded here: what makes process groups is looked up when the first one is made.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

NAME = "sirtaki"

PROCESS_GROUP, MEETING = "sirtaki.torch.distributed.process_group", "sirtaki.torch.distributed.process_group"


def register() -> None:
    """Register the backend. Called once by `import torch`; harmless later, or without torch.distributed.

    It neither raises nor warns, because either would end `import torch` (a warning does under `python -W error`).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _register()
    except Exception:
        logger.debug("the backend %r could not be registered", NAME, exc_info=True)


def _register() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import register_rendezvous_handler

    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    # The first group asks whether there is a GPU: the question initialises CUDA, which does not survive a fork.
    devices = ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]  # type: ignore[no-untyped-call]
    dist.Backend.register_backend(NAME, _process_group, devices=devices)
    register_rendezvous_handler(NAME, _meet)  # type: ignore[no-untyped-call]


def _process_group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    import torch
    import torch.distributed as dist

    # ShardedTensor takes the first of these devices that is not the CPU.
    dist.Backend.backend_capability[NAME] = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    made: ProcessGroup = importlib.import_module(PROCESS_GROUP).SirtakiProcessGroup(store, rank, size, timeout)
    return made


def _meet(url: str, timeout: timedelta, **_: object) -> Iterator[tuple[Store, int, int]]:
    yield importlib.import_module(MEETING).meet(timeout)
