"""Has an aggregator sum hot rows of sparse gradients, where `SIRTAKI_AGGREGATOR` names one and all ranks reach it.

Whether it is used is settled among all ranks: when lanes are opened, and by a vote after each sum. So all of them use
it, or none does.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from sirtaki.aggregator import AggregatorClient, HeatLayout, Patience
from sirtaki.aggregator.rows import AggregatedRows, Agreement
from sirtaki.aggregator.wire import Wire
from sirtaki.errors import AggregatorError, ConfigError, TransportError
from sirtaki.host_port import parse_address

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane

logger = logging.getLogger(__name__)

VARIABLE = "SIRTAKI_AGGREGATOR"

STEP_FLOATS = 1 << 19
"""Values that are summed at once; what is larger goes in several turns. Registers and buffers are as large."""


class HotRowAggregator:
    """A rank's side: see `HotSums`. Of one thread at a time, the same calls on all ranks.

    float32 tensors only are summed: an aggregator adds nothing else.
    """

    def __init__(
        self, control: ControlPlane, addresses: Sequence[str], *, stall_s: float, check: Callable[[], None]
    ) -> None:
        """Collective: see `joined`."""
        self._scope = control.scope()
        self._is_root = control.rank == 0
        self._addresses = ",".join(addresses)
        agreement = Agreement(self._scope.duplicate(), check=check)
        client = AggregatorClient(
            addresses,
            job=control.broadcast(secrets.token_hex(16)),
            rank=control.rank,
            ranks=control.size,
            layout=HeatLayout(rows=STEP_FLOATS, width=1),
            patience=Patience(stall_s=stall_s),
            check=agreement.check,
        )
        self._rows = AggregatedRows(client, agreement)
        self._closed = False

    @classmethod
    def joined(
        cls,
        control: ControlPlane,
        addresses: tuple[str, ...] | None,
        *,
        used: bool,
        stall_s: float,
        check: Callable[[], None],
    ) -> HotRowAggregator | None:
        """Collective: on all ranks once each of them has got a first sum, else None on all, of which rank 0 warns.

        Args:
            control: the ranks.
            addresses: what the variable names on this rank; rank 0's hold for all.
            used: hot rows may be sent there at all, the same on all ranks.
            stall_s: how long a rank waits for others that are late.
            check: called while this rank waits; what it raises ends the wait.
        """
        named = control.all_gather(addresses)
        is_root, common = control.rank == 0, named[0]
        odd = [f"rank {rank} has {_shown(other)}" for rank, other in enumerate(named) if other != common]
        if odd and is_root:
            logger.warning(
                "%s differs between ranks; rank 0's holds for all, %s: %s", VARIABLE, _shown(common), ", ".join(odd[:3])
            )
        if common is None:
            return None
        if not used:
            if is_root:
                logger.warning(
                    "%s has no effect: "
                    "it sums hot rows, which there are with SIRTAKI_SPARSE=hot_cold, or auto where jobs are tuned",
                    VARIABLE,
                )
            return None
        try:
            control.agree_on_success(_unknown_host(common))
            return cls._with_a_first_sum(control, common, stall_s=stall_s, check=check)
        except (TransportError, AggregatorError) as err:
            if is_root:
                logger.warning("%s=%s is not used, ranks sum all rows themselves: %s", VARIABLE, ",".join(common), err)
            return None

    @classmethod
    def _with_a_first_sum(
        cls, control: ControlPlane, addresses: Sequence[str], *, stall_s: float, check: Callable[[], None]
    ) -> HotRowAggregator:
        joined = cls(control, addresses, stall_s=stall_s, check=check)
        try:
            joined._rows.sum_rows(torch.ones(1, 1))
        except BaseException:  # the job may be lost, too
            joined.close()
            raise
        if joined._is_root:
            logger.info("hot rows of sparse gradients may be summed by the aggregator at %s", ",".join(addresses))
        return joined

    @property
    def is_open(self) -> bool:
        """See `HotSums`."""
        return self._rows.is_open

    def sum(self, values: torch.Tensor) -> torch.Tensor | None:
        """See `HotSums`; rank 0 warns when it is lost."""
        if values.dtype is not torch.float32 or not self.is_open:
            return None
        try:
            parts = [self._rows.sum_rows(part[:, None]) for part in torch.split(values, STEP_FLOATS)]
        except AggregatorError as err:
            if self._is_root:
                logger.warning(
                    "the aggregator at %s is lost, ranks sum all rows themselves from this step on: %s",
                    self._addresses,
                    err,
                )
            return None
        return torch.cat(parts)[:, 0]

    def close(self) -> None:
        """See `HotSums`; again is harmless."""
        if not self._closed:
            self._closed = True
            self._rows.close()
            self._scope.release(lambda: None)


def _shown(addresses: tuple[str, ...] | None) -> str:
    return "nothing" if addresses is None else ",".join(addresses)


def _unknown_host(addresses: Sequence[str]) -> str:
    """What is wrong with one of these on this host; empty = nothing. Whether anybody listens there is not asked."""
    with contextlib.ExitStack() as wires:
        try:
            for address in addresses:
                wires.callback(Wire.connected(parse_address(address)).close)
        except ConfigError as err:
            return str(err)
    return ""
