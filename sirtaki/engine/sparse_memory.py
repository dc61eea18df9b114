"""What earlier jobs have found of rows that are touched like a job's, and what this job leaves; rank 0 asks.

Nothing that is wrong with the registry reaches training: `SafeStore` sees to that, and what is stored is checked.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

import sirtaki
from sirtaki.autotune.sparse.choice import SparseChoice
from sirtaki.autotune.sparse.coverage import TouchCounts, curve_points
from sirtaki.comm.sparse.plan import COLD_PATHS, SparsePath, SparsePlan
from sirtaki.comm.sparse.rows import RowFormat
from sirtaki.errors import PlanError
from sirtaki.registry.row_ways import RowsKey, RowWay, Skew, nearest_way
from sirtaki.registry.safe_store import SafeStore
from sirtaki.registry.topology import Topology
from sirtaki.settings import REGISTRY_OFF

from .knob_choices import fixed_knobs
from .tuning_cache import Hardware, hosts_by_rank

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane
    from sirtaki.settings import Settings

logger = logging.getLogger(__name__)

OF_ROWS = ("streams", "transport")
"""Knobs that hold for rows, too, where the user has fixed them."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What a job knows of one parameter before it has tried anything.

    Attributes:
        form: of its rows.
        counts: who touches which.
    """

    form: RowFormat
    counts: TouchCounts


class SparseMemory:
    """Of the sparse gradients of one reducer."""

    def __init__(self, control: ControlPlane, settings: Settings) -> None:
        """Asks nobody."""
        self._control, self._settings = control, settings
        self._topology, self._aggregator = "", False
        self._store: SafeStore | None = None

    def recall(self, learned: Mapping[str, Learned], *, aggregator: bool = False) -> dict[str, SparsePlan]:
        """Collective: the plans that were kept where rows were touched like these, by name; the same on all ranks.

        `aggregator`: one is there that sums hot rows of float32.
        """
        if not learned:
            return {}
        self._aggregator = aggregator
        if not self._topology:
            self._topology = self._look_around()
        found = {name: self._find(name, one) for name, one in learned.items()} if self._control.rank == 0 else {}
        plans: dict[str, SparsePlan | None] = self._control.broadcast(found)
        return {name: plan for name, plan in plans.items() if plan is not None}

    def _look_around(self) -> str:
        """Collective: the fingerprint of the ranks' places."""
        hosts = hosts_by_rank(self._control, self._settings)
        kinds = self._control.all_gather(Hardware.here(torch.device("cpu")))
        return Topology.from_ranks(
            hosts,
            devices=[kind.device for kind in kinds],
            host_kinds={name: kind.host for name, kind in zip(hosts, kinds, strict=True)},
        ).fingerprint()

    def _find(self, name: str, learned: Learned) -> SparsePlan | None:
        if self._settings.registry == REGISTRY_OFF:
            return None
        try:
            key, skew = self._key(learned.form), skew_of(learned.counts)
            nothing: list[RowWay] = []
            found = self._opened().attempt(lambda store: store.row_ways(key), nothing)
            way = nearest_way(found, skew, name=name)
            plan = None if way is None else plan_of(way, learned.counts)
        except Exception:  # whatever others have stored, training goes on
            logger.warning("what earlier jobs have found of rows of %s is left alone", name, exc_info=True)
            return None
        if way is not None and plan is not None:
            logger.info(
                "rows of %s are touched like those of %s in an earlier job, which went by %s",
                name,
                way.name,
                plan.describe(),
            )
        return plan

    def keep(self, name: str, form: RowFormat, choice: SparseChoice) -> None:
        """Not collective: the way that is kept is remembered, by rank 0; nothing before the first `recall`."""
        learned = choice.learned
        off = not self._topology or self._settings.registry == REGISTRY_OFF
        if self._control.rank != 0 or off or learned is None:
            return
        plan = choice.plan
        try:
            way = RowWay(
                key=self._key(form),
                name=name,
                skew=skew_of(learned),
                path=plan.path.value,
                cold=plan.cold.value,
                block_rows=plan.block_rows,
                n_hot=len(plan.hot_rows),
                aggregated=plan.aggregated,
                span_s=min(choice.measured_s, default=0.0),
            )
            self._opened().attempt(lambda store: store.save_row_way(way), False)
        except Exception:  # as above
            logger.warning("the way of rows of %s is not remembered", name, exc_info=True)

    def _key(self, form: RowFormat) -> RowsKey:
        return RowsKey(
            topology=self._topology,
            ranks=self._control.size,
            n_rows=form.n_rows,
            row_bytes=form.row_bytes,
            dtype=str(form.dtype).removeprefix("torch."),
            aggregator=self._aggregator and form.dtype is torch.float32,
            versions=(("sirtaki", sirtaki.__version__),),
            fixed=tuple(pair for pair in sorted(fixed_knobs(self._settings).items()) if pair[0] in OF_ROWS),
        )

    def _opened(self) -> SafeStore:
        if self._store is None:  # once: a server that cannot be reached takes seconds each time
            self._store = SafeStore(self._settings.registry)
        return self._store

    def close(self) -> None:
        """Lets go of the registry. Idempotent."""
        if self._store is not None:
            self._store.close()
            self._store = None


def skew_of(counts: TouchCounts) -> Skew:
    """How skewed touches are that were counted.

    Raises:
        RegistryError: there are none.
    """
    return Skew(touched=counts.touched, union=counts.union, curve=curve_points(counts))


def plan_of(way: RowWay, counts: TouchCounts) -> SparsePlan | None:
    """A remembered way for these rows, with as many hot ones as then; None where it is none that is known here."""
    try:
        path, cold = SparsePath(way.path), SparsePath(way.cold)
        hot = counts.ranked()[: way.n_hot] if path is SparsePath.HOT_COLD else np.zeros(0, dtype=np.int64)
        return SparsePlan(
            path=path,
            hot_rows=tuple(np.sort(hot).tolist()),
            aggregated=way.aggregated,
            cold=cold if path is SparsePath.HOT_COLD else COLD_PATHS[0],
            block_rows=way.block_rows if path is SparsePath.BLOCKS else 1,
        )
    except (ValueError, PlanError) as err:
        logger.info("the way %s of %s in the registry cannot be taken here: %s", way.path, way.name, err)
        return None
