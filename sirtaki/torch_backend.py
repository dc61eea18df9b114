"""Registration of the `torch.distributed` backend "sirtaki", and of the attachment of unmodified scripts.

`import torch` calls `register` in every process where Sirtaki is installed (entry point `torch.backends`). Therefore
this module imports nothing else of Sirtaki: the process group's module is imported when the first group is created, and
`sirtaki.attach` only if `SIRTAKI_ATTACH=auto` is set.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

NAME = "sirtaki"

RESULTS = ("SIRTAKI_TRIAL_LOG", "SIRTAKI_PROFILE", "SIRTAKI_PLAN", "SIRTAKI_METRICS_PORT")
"""Variables that are set to get a result of Sirtaki from this job, so that a user expects it to be attached."""

PROCESS_GROUP = "sirtaki.torch.distributed.process_group"


def register() -> None:
    """Register the backend, and with `SIRTAKI_ATTACH=auto` attach the script's models. Called by `import torch`.

    Idempotent. Does nothing without torch.distributed. If `SIRTAKI_ATTACH` is not set, rank 0 reports at its end which
    settings, such as `SIRTAKI_TRIAL_LOG`, had no effect.

    Exceptions and warnings are suppressed, because either could end `import torch` (a warning under `python -W error`).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _register()
            if "torch.distributed" not in sys.modules:
                return
            attach = os.environ.get("SIRTAKI_ATTACH", "").strip().lower()
            unused = [name for name in RESULTS if os.environ.get(name, "").strip()]
            if attach == "auto":
                importlib.import_module("sirtaki.attach").install()
            elif unused and not attach:
                importlib.import_module("sirtaki.attach").report_unused(unused)
    except Exception as err:
        logger.debug(
            "`import torch` could not register Sirtaki's backend %r (%s: %s), so init_process_group() cannot use it, "
            "and SIRTAKI_ATTACH=auto attaches no model; report this as a bug of Sirtaki",
            NAME,
            type(err).__name__,
            err,
            exc_info=True,
        )


def _register() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import register_rendezvous_handler

    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    # Register for GPUs without a check for one, because the check initialises CUDA, which does not survive a fork. The
    # first process group makes the check.
    devices = ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]  # type: ignore[no-untyped-call]
    dist.Backend.register_backend(NAME, _process_group, devices=devices)
    register_rendezvous_handler(NAME, _rendezvous)  # type: ignore[no-untyped-call]


def _process_group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    import torch
    import torch.distributed as dist

    # The list has "cuda" only if there is a GPU, because ShardedTensor uses the first device that is not the CPU.
    dist.Backend.backend_capability[NAME] = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    group: ProcessGroup = importlib.import_module(PROCESS_GROUP).SirtakiProcessGroup(store, rank, size, timeout)
    return group


def _rendezvous(url: str, timeout: timedelta, **_: object) -> Iterator[tuple[Store, int, int]]:
    yield importlib.import_module(PROCESS_GROUP).meet(timeout)
