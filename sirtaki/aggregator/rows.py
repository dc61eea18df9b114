"""Sums of rows over ranks through an aggregator, as training calls for them: tensors in, tensors out, and one verdict
on all ranks.

Whether a step's sums have come is known to each rank alone, and an aggregator may die between two of them. So ranks
vote after each step, over what carries their control plane, and go on serving each other while the vote is under way.
Either all of them get the sums, or all get the error, in the same step, and sum that step by other means.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from sirtaki.comm.control.communicator import Op
from sirtaki.comm.control.failure import SPIN_S
from sirtaki.errors import AggregatorError, ConfigError

from .client import AggregatorClient

if TYPE_CHECKING:
    from sirtaki.comm.control.communicator import Communicator

Vote = Callable[[], bool | None]
"""Whether all ranks said yes; None = not all have voted. Moves the vote on."""

Agree = Callable[[bool], Vote]
"""Collective: begins a vote; does not block."""


def agreement_over(comm: Communicator) -> Agree:
    """Votes over a communicator of the control plane, which nobody else uses at the same time.

    A vote raises CommError where the job is lost.
    """

    def agree(yes: bool) -> Vote:
        ballot = np.array([yes], dtype=np.int64)
        test = comm.all_reduce(ballot, Op.MINIMUM)

        def vote() -> bool | None:
            comm.failures.check()
            return bool(ballot[0]) if test() else None

        return vote

    return agree


class AggregatedRows:
    """Rows of a fixed layout, the hot rows of an embedding for instance, that an aggregator sums.

    Attributes:
        is_open: it may be used; False from the first step that has failed on any rank.
    """

    def __init__(self, client: AggregatorClient, agree: Agree) -> None:
        """The client becomes its own."""
        self._client, self._agree = client, agree
        self.is_open = True

    def sum_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: the sum over ranks of each rank's rows, bit by bit the same on all ranks.

        Args:
            values: (k, width) of a floating dtype on any device, k at most the layout's rows and the same on all
                ranks. Not changed. They are added as float32.

        Returns:
            A new tensor like `values`.

        Raises:
            ConfigError: the shape does not fit the layout.
            AggregatorError: on all ranks alike: on one of them the sums have not come. Nothing is summed for this
                step, and this object cannot be used any more; the caller sums by other means.
            CommError: the job is lost.
        """
        if not self.is_open:
            raise AggregatorError("the aggregator was given up in an earlier step; sums have to be made by other means")
        if not values.is_floating_point():
            raise ConfigError(
                f"values of {values.dtype} cannot be summed by an aggregator; it adds floating-point numbers"
            )
        problem: AggregatorError | None = None
        total: torch.Tensor | None = None
        try:
            sums = self._client.sum(values.detach().to("cpu", torch.float32).numpy())
            total = torch.from_numpy(sums).to(values.device, values.dtype)
        except AggregatorError as err:
            problem = err
        vote = self._agree(problem is None)
        verdict: bool | None = None

        def is_decided() -> bool:
            nonlocal verdict
            if verdict is None:
                verdict = vote()
            return verdict is not None

        spin_until_s = time.perf_counter() + SPIN_S
        while not is_decided() and time.perf_counter() < spin_until_s:
            os.sched_yield()
        self._client.linger(is_decided)
        if verdict and total is not None:
            return total
        self.close()
        raise problem or AggregatorError(
            "another rank has got no sums from the aggregator; it is given up on all ranks"
        )

    def close(self) -> None:
        """Leaves the aggregator; again is harmless."""
        if self.is_open:
            self.is_open = False
            self._client.close()
