"""Communicators of one rank, on the host: they remember what became of them."""

import torch

from sirtaki.comm.nccl_streams.transport import CommunicatorKey, Group, GroupWork
from sirtaki.comm.plan import NcclWay
from sirtaki.comm.transports.contract import ReduceOp


class Done:
    """An operation that was over when it was started."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class LoneGroup:
    """See `Group`. Multiplies on the way only if it is told to."""

    def __init__(self, *, multiplies: bool) -> None:
        self._multiplies = multiplies
        self.problem, self.closed = "", False

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> GroupWork:
        return Done()

    def all_reduce_scaled(self, tensor: torch.Tensor, scale: float) -> GroupWork | None:
        if not self._multiplies:
            return None
        tensor.mul_(scale)
        return Done()

    def reduce_scatter(self, share: torch.Tensor, tensor: torch.Tensor, op: ReduceOp) -> GroupWork:
        share.copy_(tensor)
        return Done()

    def all_gather(self, tensor: torch.Tensor, share: torch.Tensor) -> GroupWork:
        tensor.copy_(share)
        return Done()

    def error(self) -> str:
        return self.problem

    def close(self) -> None:
        self.closed = True


class LoneOpener:
    """See `Opener`; each communicator takes `taken_bytes` of a memory of 1000."""

    max_streams, threads, ways = 8, (512, 1024, 2048), tuple(NcclWay)

    def __init__(self, taken_bytes: int = 1, *, multiplies: bool = False) -> None:
        self._taken_bytes, self._multiplies = taken_bytes, multiplies
        self.made: dict[CommunicatorKey, LoneGroup] = {}
        self.opened: list[CommunicatorKey] = []

    def open(self, key: CommunicatorKey) -> Group:
        self.opened.append(key)
        self.made[key] = LoneGroup(multiplies=self._multiplies)
        return self.made[key]

    def memory_bytes(self) -> tuple[int, int]:
        is_open = [group for group in self.made.values() if not group.closed]
        return 1000 - self._taken_bytes * len(is_open), 1000
