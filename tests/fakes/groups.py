"""Communicators of one rank, on the host. They record how they are used."""

import torch

from sirtaki.comm.nccl_streams.transport import CommunicatorKey, Group
from sirtaki.comm.plan import NcclWay
from sirtaki.comm.transports.contract import ReduceOp


class LoneGroup:
    """A `Group` of one rank. It supports scaling within an all-reduce if `multiplies` is true."""

    def __init__(self, *, multiplies: bool) -> None:
        self._multiplies = multiplies
        self.problem, self.closed = "", False

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        pass

    def all_reduce_scaled(self, tensor: torch.Tensor, scale: float) -> bool:
        if self._multiplies:
            tensor.mul_(scale)
        return self._multiplies

    def reduce_scatter(self, share: torch.Tensor, tensor: torch.Tensor, op: ReduceOp) -> None:
        share.copy_(tensor)

    def all_gather(self, tensor: torch.Tensor, share: torch.Tensor) -> None:
        tensor.copy_(share)

    def error(self) -> str:
        return self.problem

    def memory_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


class LoneOpener:
    """An `Opener` whose communicators take `taken_bytes` of a memory of 1000 bytes each."""

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
