"""PyTorch's TCPStore, through which process groups find each other: rank 0 serves it, the others connect."""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING

from .failure import FailureBoard, unless_failed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LIMIT_S = 300.0
"""How long a store is waited for, at its opening and for each answer."""

ATTEMPT_S = 1.0
"""How long one attempt to connect goes on, which hears of no failure."""


def serve_store() -> TCPStore:
    """A store of this process, at a free port of all its addresses.

    Raises:
        RuntimeError: it cannot be opened.
    """
    from torch._C._distributed_c10d import TCPStore

    return TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=LIMIT_S))


def connect_to_store(host: str, port: int, *, failures: FailureBoard) -> TCPStore:
    """Another process's store. It may end while this one connects, for which PyTorch would wait until the time is up.

    Raises:
        RuntimeError: it cannot be reached.
        CommError: the job has failed.
    """
    from torch._C._distributed_c10d import TCPStore

    def connect() -> TCPStore:
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            try:
                store = TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=ATTEMPT_S))
            except RuntimeError:
                if failures.error is not None or time.monotonic() > deadline_s:
                    raise
            else:
                store.set_timeout(datetime.timedelta(seconds=LIMIT_S))
                return store

    # An attempt also waits for a store that accepts it and never answers, as that of a stopped process, without limit.
    return unless_failed(connect, failures=failures, undo=lambda _: None)
