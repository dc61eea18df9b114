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

GIVEN_UP = 1
"""Tag of what a rank that votes no sends to the others, which may still wait for its part: why."""


class Agreement:
    """Votes over a communicator of the control plane, which nobody else uses at the same time.

    A rank that votes no tells the others at once: without its part they would wait for long. Of one thread.
    """

    def __init__(self, comm: Communicator, *, check: Callable[[], None] | None = None) -> None:
        """`check`: called while it waits, ends waits by what it raises; None = CommError where the job is lost."""
        self._comm = comm
        self._check = check or comm.failures.check
        self._told = 0
        self._reason = ""

    def check(self) -> None:
        """For the client of the same rank, while it waits for sums.

        Raises:
            AggregatorError: another rank has voted no, and why.
            CommError: the job is lost.
        """
        self._check()
        self._hear()
        if self._told:
            raise AggregatorError(self._reason)

    @property
    def reason(self) -> str:
        """Why the first one that this rank has heard of has voted no; empty = nobody has."""
        return self._reason

    def _hear(self) -> None:
        while (posted := self._comm.collect()) is not None:
            rank, _, why = posted
            self._told += 1
            self._reason = self._reason or f"rank {rank} gets no sums: {why.decode()}"

    def begin(self, problem: str) -> Vote:
        """Collective: begins a vote; does not block. Of waits in it, see `check` in `__init__`.

        Args:
            problem: why this rank votes no; empty = it votes yes.
        """
        comm, yes = self._comm, not problem
        if not yes:
            for rank in range(comm.size):
                if rank != comm.rank:
                    comm.post(rank, GIVEN_UP, problem.encode())
        ballots = np.array([yes], dtype=np.int64)
        test = comm.all_reduce(ballots, Op.SUM)

        def vote() -> bool | None:
            self._check()
            if not test():
                return None
            others_against = comm.size - int(ballots[0]) - (not yes)
            self._hear()
            return None if self._told < others_against else bool(ballots[0] == comm.size)

        return vote


class AggregatedRows:
    """Rows of a fixed layout, the hot rows of an embedding for instance, that an aggregator sums.

    Attributes:
        is_open: it may be used; False from the first step that has failed on any rank.
    """

    def __init__(self, client: AggregatorClient, agreement: Agreement) -> None:
        """The client becomes its own; it was given the agreement's `check`."""
        self._client, self._agreement = client, agreement
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
        except OSError as err:
            problem = AggregatorError(f"the aggregator cannot be reached: {err.strerror or err}")
        vote = self._agreement.begin("" if problem is None else str(problem))
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
        raise problem or AggregatorError(self._agreement.reason)

    def close(self) -> None:
        """Leaves the aggregator; again is harmless."""
        if self.is_open:
            self.is_open = False
            self._client.close()
