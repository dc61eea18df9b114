"""What an operation of a process group gives back: PyTorch's `Work`, over units or over Gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import Work
from torch.torch_version import TorchVersion

from sirtaki.comm.collectives.unit_pipeline import TensorReduction

from .group_lanes import GroupLanes

Tensors = list[torch.Tensor]

NO_TIMEOUT = timedelta(0)
"""What PyTorch says where it means none."""


KEEPS_WORKS = TorchVersion(torch.__version__) >= "2.7"
"""Whether PyTorch's C++ keeps a work of Python's alive; 2.4 does not, and waits for ever."""


def lasting(work: LaneWork | FollowedWork) -> Work:
    """What C++ may be given: in older versions of PyTorch a work of its own, which cannot wait for a limited time."""
    if KEEPS_WORKS:
        return work
    native: Work = _distributed_c10d._create_work_from_future(work.get_future())  # type: ignore[attr-defined]
    return native


class LaneWork(Work):
    """A tensor on its way through the lanes."""

    def __init__(self, lanes: GroupLanes, reduction: TensorReduction, outputs: Tensors) -> None:
        """`outputs` are what the operation fills."""
        super().__init__()
        self._lanes, self._reduction, self._outputs = lanes, reduction, outputs
        self._future: torch.futures.Future[Tensors] | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """See `Work`.

        Raises:
            CommError: it has failed, or the time is up.
        """
        limit_s = timeout.total_seconds()
        if not self._lanes.finish(self._reduction, limit_s if limit_s > 0 else None):
            raise RuntimeError(f"an operation of this process group did not end within {limit_s:g} s")
        return True

    def synchronize(self) -> None:
        """See `Work`."""
        self.wait()

    def is_completed(self) -> bool:
        """See `Work`."""
        if not self._reduction.is_done():
            self._lanes.drive()
        return self._reduction.is_done()

    def is_success(self) -> bool:
        """See `Work`."""
        return self._reduction.is_done() and self._reduction.error is None

    def exception(self) -> BaseException | None:
        """See `Work`."""
        return self._reduction.error

    def result(self) -> Tensors:
        """See `Work`."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[Tensors]:
        """See `Work`."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._reduction.when_done(self._tell)
            self._lanes.drive()
        return self._future

    def _tell(self) -> None:
        assert self._future is not None
        if self._reduction.error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(self._reduction.error)  # type: ignore[arg-type]  # so torch's stub has it


class FollowedWork(Work):
    """Operations of other groups, and what is done when they have ended, once, by whoever is there first."""

    def __init__(self, works: Sequence[Work], then: Callable[[], None], outputs: Tensors) -> None:
        """`outputs` are what the operation fills."""
        super().__init__()
        self._works, self._then, self._outputs = works, then, outputs
        self._followed = False
        self._error: RuntimeError | None = None
        self._following = threading.Lock()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """See `Work`."""
        for work in self._works:
            work.wait(timeout)
        self._follow()
        return True

    def _follow(self) -> None:
        with self._following:
            if not self._followed:
                self._then()
                self._followed = True

    def synchronize(self) -> None:
        """See `Work`."""
        self.wait()

    def is_completed(self) -> bool:
        """See `Work`."""
        if not all(work.is_completed() for work in self._works):
            return False
        try:
            self.wait()
        except RuntimeError as err:
            self._error = err
        return True

    def is_success(self) -> bool:
        """See `Work`."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """See `Work`."""
        return self._error if self.is_completed() else None

    def result(self) -> Tensors:
        """See `Work`."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[Tensors]:
        """See `Work`."""

        def follow(ended: torch.futures.Future[Any]) -> Tensors:
            for future in ended.value():
                future.value()  # raises what has failed
            self._follow()
            return self._outputs

        followed: torch.futures.Future[Tensors] = torch.futures.collect_all(
            [work.get_future() for work in self._works]
        ).then(follow)
        return followed
