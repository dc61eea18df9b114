"""What the registry knows of this job, and what this job leaves there; on one rank only.

A module of its own because it is where `autotune`'s types meet `registry`'s, which know nothing of each other.
"""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

import sirtaki
from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.meta.session import SessionResult
from sirtaki.autotune.trial import Trial
from sirtaki.comm.layout import GradientLayout
from sirtaki.errors import PlanError, SirtakiError, TuningError
from sirtaki.registry.digest import layout_fingerprint
from sirtaki.registry.entry import Entry, EntryKey, Provenance, make_key
from sirtaki.registry.recorder import ModelGraphRecorder
from sirtaki.registry.store import SafeStore
from sirtaki.registry.topology import Topology
from sirtaki.registry.warm_start import Job, WarmStart, warm_starts
from sirtaki.settings import REGISTRY_OFF, Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recollection:
    """What an earlier job has left.

    Attributes:
        exact: the knobs that this very job ended its warm-up with.
        seeds: knobs of similar jobs, the most similar first, scaled to this one.
        history: trials of a warm-up that was cut short.
        words: where this comes from, for the log; empty if there is nothing.
    """

    exact: Knobs | None = None
    seeds: tuple[Knobs, ...] = ()
    history: tuple[Trial, ...] = ()
    words: str = ""


def _from_similar(starts: Sequence[WarmStart]) -> Recollection:
    """The first proposals that similar jobs give; those that are no knobs are left out."""
    seeds = []
    for start in starts:
        try:
            seeds.append(Knobs.from_json(start.knobs))
        except PlanError as err:
            logger.warning("the registry's entry %s is left alone: %s", start.entry.id[:8], err)
    return Recollection(seeds=tuple(seeds), words="; ".join(start.explanation for start in starts))


class JobMemory:
    """Looks this job up and stores what it found. Nothing here raises into training."""

    def __init__(self, settings: Settings, parameters: Sequence[torch.Tensor], hosts: Sequence[str]) -> None:
        """Begins to watch for the model's graph.

        Args:
            settings: where the registry is.
            parameters: those whose gradients are reduced.
            hosts: of each rank; simulated nodes have different names.
        """
        self._off = settings.registry == REGISTRY_OFF
        self._url = settings.registry
        self._topology = Topology.from_ranks(hosts)
        self._recorder = ModelGraphRecorder()
        self._key: EntryKey | None = None
        if not self._off:
            self._recorder.start(parameters)

    def recall(self, layout: GradientLayout) -> Recollection:
        """What is known of this job; the model must have run forward once."""
        graph = self._recorder.graph
        self._recorder.stop()
        if self._off or graph is None:
            return Recollection()
        versions = {"torch": ".".join(torch.__version__.split(".")[:2]), "sirtaki": sirtaki.__version__}
        self._graph = graph
        self._key = make_key(graph, self._topology, dtype=layout.dtype, device=layout.device, versions=versions)
        self._layout = layout_fingerprint(layout.sizes, layout.itemsize_bytes)
        job = Job(
            key=self._key,
            model=graph,
            topology=self._topology,
            layout=self._layout,
            itemsize_bytes=layout.itemsize_bytes,
            name=self._recorder.model_name,
        )
        store = SafeStore(self._url)
        entry = store.lookup(self._key)
        similar: list[WarmStart] = []
        if entry is None:
            similar = store.attempt(lambda opened: warm_starts(opened, job), similar)
        store.close()
        if entry is None:
            return _from_similar(similar)
        try:
            if entry.complete:
                return Recollection(
                    exact=Knobs.from_json(entry.knobs),
                    words=f"found {entry.describe()} in the registry ({entry.id[:8]}): {1 / entry.speedup:.2f} of the "
                    f"default's time with {Knobs.from_json(entry.knobs).describe()}",
                )
            history = tuple(Trial.from_json(trial) for trial in entry.trials)
            return Recollection(
                history=history,
                words=f"found an unfinished warm-up of {entry.describe()} in the registry: going on after "
                f"{len(history)} trials",
            )
        except (PlanError, TuningError) as err:
            logger.warning("the registry's entry %s is left alone: %s", entry.id[:8], err)
            return Recollection()

    def keep(self, result: SessionResult, trials: Sequence[Trial], *, complete: bool) -> bool:
        """Stores what the warm-up has found; True if it was kept."""
        spans = (result.best_span_s, result.default_span_s)
        if self._key is None or not all(0 < span < math.inf for span in spans):
            return False
        versions: dict[str, Any] = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "sirtaki": sirtaki.__version__,
        }
        try:
            entry = Entry(
                key=self._key,
                model=self._graph,
                topology=self._topology,
                knobs=result.knobs.to_json(),
                best_span_s=result.best_span_s,
                default_span_s=result.default_span_s,
                noise_s=result.noise_s,
                n_trials=len(trials),
                arm=result.arm,
                complete=complete,
                layout=self._layout,
                trials=() if complete else tuple(trial.to_json() for trial in trials),
                provenance=Provenance(model_name=self._recorder.model_name, versions=tuple(sorted(versions.items()))),
            )
        except SirtakiError as err:
            logger.warning("this job's settings are not remembered: %s", err)
            return False
        store = SafeStore(self._url)
        kept = store.save(entry)
        store.close()
        return kept
