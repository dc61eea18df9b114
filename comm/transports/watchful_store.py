"""A key-value store that stops waiting when the job fails: Gloo would wait for a rank that is gone until a timeout."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from sirtaki.comm.control.failure import FailureBoard
from sirtaki.errors import CommError

LOOK_S = 2e-3
LONGEST_WAIT_S = 60.0
"""Where whoever waits names no limit."""


class WatchfulStore(Store):
    """What Gloo asks of a store while its ranks find each other, over another store. Whoever uses it keeps it alive."""

    def __init__(self, store: Store, failures: FailureBoard) -> None:
        """Waits as long as `failures` are none."""
        super().__init__()
        self._store, self._failures = store, failures

    def set(self, key: str, value: str) -> None:
        """As `Store.set`."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """As `Store.get`.

        Raises:
            CommError: the job has failed.
        """
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        """As `Store.add`."""
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """As `Store.check`."""
        return self._store.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """As `Store.wait`.

        Raises:
            CommError: the job has failed, or the time is up.
        """
        limit_s = LONGEST_WAIT_S if timeout is None else timeout.total_seconds()
        deadline_s = time.monotonic() + limit_s
        while not self._store.check(list(keys)):
            self._failures.check()
            if time.monotonic() > deadline_s:
                raise CommError(f"no rank has told {', '.join(keys)} within {limit_s:.0f} s")
            time.sleep(LOOK_S)
