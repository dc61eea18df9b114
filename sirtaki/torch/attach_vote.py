"""Agreement of ranks whether to attach a model, through the key-value store of `torch.distributed`.

A vote uses no collective operation. So ranks that do not vote, because they run without `SIRTAKI_ATTACH=auto`, cannot
be hung by the others.

Each rank announces itself when it creates its first model. Ranks vote at the end of a backward pass in which PyTorch
has reduced gradients over all of them. By then, every rank has announced itself, unless it runs without the variable.
"""

from __future__ import annotations

import itertools
import uuid
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from sirtaki.comm.control.waiting import Deadline, Poll, wait_for
from sirtaki.engine.c10d import default_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

PREFIX = "sirtaki_attach"

TIMEOUT_S = 60.0
"""Maximum seconds that a rank waits for the other ranks' votes. After this time, the ranks do not attach the model."""

AGREED = "yes"

MOST_NAMED = 8  # Maximum number of ranks that a message lists.

_n_ballots: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""Counters of ballots, by the kind of model and the ranks that vote. A counter is equal on all of these ranks, because
they create their ballots in the same order."""

_announced: weakref.ref[ProcessGroup] | None = None
"""Default process group in whose store this rank has announced itself."""


def announce() -> None:
    """Tell the other ranks that this rank takes part in votes on attaching models. Idempotent. Not collective."""
    global _announced
    world, store = dist.group.WORLD, default_store()
    if store is not None and world is not None and (_announced is None or _announced() is not world):
        store.set(_key_of(dist.get_rank()), uuid.uuid4().hex)
        _announced = weakref.ref(world)


class AttachBallot:
    """Votes of some ranks on one model. The ranks must create their ballots in the same order.

    Attributes:
        ranks: global ranks that must agree.
        is_reporter: whether this rank logs the result: the first one of `ranks` that takes part in votes.
    """

    def __init__(self, kind: str, ranks: Sequence[int]) -> None:
        """Begin the votes on a model of this kind. Not collective."""
        self.ranks, self._store = ranks, default_store()
        self.is_reporter = dist.get_rank() == ranks[0]
        self._missing: list[int] = []
        members = "all" if len(ranks) == dist.get_world_size() else ",".join(map(str, ranks))
        self._key = f"{PREFIX}/{kind}/{members}/{next(_n_ballots[f'{kind}/{members}'])}"
        if (store := self._store) is None:
            return
        if not store.check([_key_of(rank) for rank in ranks]):
            self._missing = [rank for rank in ranks if not store.check([_key_of(rank)])]
            self.is_reporter = dist.get_rank() == next(rank for rank in ranks if rank not in self._missing)
        if ranks[0] not in self._missing:
            # A store may be reused, for example after a restart of all ranks. It then contains answers of earlier
            # votes.
            self._key += f"/{store.get(_key_of(ranks[0])).decode()}"

    @property
    def addresses(self) -> Store | None:
        """Return a store that only these ranks use for this model, to exchange their addresses."""
        return None if self._store is None else PrefixStore(f"{self._key}/addresses/", self._store)

    def vote(self, step: str, objection: str | None) -> str | None:
        """Return the first objection that a rank has stored, or None if all ranks agree. Polls the store.

        All ranks that vote get the same answer, also ranks that vote late.

        Args:
            step: what the ranks vote on, in the same order on all ranks.
            objection: why this rank objects. None if it agrees.
        """
        if (store := self._store) is None:
            return objection or "the backend has no key-value store by which the ranks could agree"
        answer = f"{self._key}/{step}/answer"
        if objection is not None:
            store.compare_set(answer, "", f"rank {dist.get_rank()}: {objection}")
        elif self._missing:
            store.compare_set(answer, "", self._describe_missing())
        elif store.add(f"{self._key}/{step}/agreed", 1) == len(self.ranks):
            store.compare_set(answer, "", AGREED)
        if not wait_for(lambda: store.check([answer]), Deadline.after(TIMEOUT_S), Poll.SLICES):
            store.compare_set(answer, "", f"a rank did not answer within {TIMEOUT_S:g} s")
        found = store.get(answer).decode()
        return None if found == AGREED else found

    def _describe_missing(self) -> str:
        named = ", ".join(map(str, self._missing[:MOST_NAMED])) + (", ..." if len(self._missing) > MOST_NAMED else "")
        who = f"rank {named} runs" if len(self._missing) == 1 else f"ranks {named} run"
        return f"{who} without SIRTAKI_ATTACH=auto; set it on all ranks"


def _key_of(rank: int) -> str:
    return f"{PREFIX}/rank/{rank}"
