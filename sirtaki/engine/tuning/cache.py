"""Look up settings in the registry before the first one is tried, and store the result of the search there."""

from __future__ import annotations

import logging
import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy
import torch
from msgspec import structs

import sirtaki
from sirtaki.autotune.arms.planners import make_planners
from sirtaki.autotune.knobs import Knobs, KnobSpace
from sirtaki.autotune.meta.session import Remembered, SessionResult
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.trial import Trial
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.plan import GradientLayout, Route
from sirtaki.engine.settings import REGISTRY_OFF, Settings
from sirtaki.errors import PlanError
from sirtaki.machine import host_kind
from sirtaki.measures import LinkModel, counted
from sirtaki.registry.cluster import Topology
from sirtaki.registry.graph import gradients_fingerprint, layout_fingerprint
from sirtaki.registry.model_graph import ModelGraphRecorder
from sirtaki.registry.schema import JobRecord, Provenance, make_key
from sirtaki.registry.warm_start import JobDescription, Neighbour, WarmStart, adapted_all

from .memory import SettingsMemory, stored
from .plans import checked_plans, fixed_knobs

if TYPE_CHECKING:
    from sirtaki.registry.store import Store

logger = logging.getLogger(__name__)

INDIFFERENCE = 0.02
"""Minimum relative error assumed for predicted times.

If the model of latency and bandwidth fits its measurements less well, the error of this fit is used instead.
"""


RENEWED_AFTER_S = 24 * 3600.0
"""Age of a job's record from which a job that confirms its setting stores it again."""


def _age_s(record: JobRecord) -> float:
    return time.time() - record.created_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstProposal:
    """A setting, derived from an earlier job, that the tuner tries first.

    Attributes:
        knobs: communication setting to try.
        arm: name of the search method (arm) that found the setting in the earlier job, or computed it again for this
            job.
        message: text for the log that names the earlier job.
    """

    knobs: Knobs
    arm: str
    message: str


def first_proposals(
    starts: Sequence[WarmStart],
    *,
    layouts: Sequence[GradientLayout],
    space: KnobSpace,
    model: PlanningModel | None,
) -> list[FirstProposal]:
    """Return the settings that the tuner tries first, in this order.

    Args:
        starts: settings of similar jobs, adapted to this job, most similar first.
        layouts: layouts of the flat buffers of this job. Settings that do not fit them are omitted.
        space: settings that this job may try.
        model: cost model of this job, from which planners compute settings. None if it could not be measured. Without a
            model, planners do not compute settings again, and no setting is omitted as too slow.
    """
    planners = {} if model is None else {one.name: one for one in make_planners(space=space, model=model)}

    @cache
    def planned(name: str) -> list[Knobs]:
        return [proposal.knobs for proposal in planners[name].ask()] if name in planners else []

    proposals: list[FirstProposal] = []
    for start in starts:
        proposal = _carried_over(start, layouts)
        arm = start.record.arm
        if start.lost_cuts and (plans := planned(arm)):
            words = f"{start.source}; planned again for this job by {arm}"
            proposal = FirstProposal(knobs=plans[0], arm=arm, message=words)
        if proposal is not None and all(proposal.knobs != other.knobs for other in proposals):
            proposals.append(proposal)
    if model is None or not proposals:
        return proposals
    # The first planner in the list is usually the best one.
    return _promising(proposals, planned(next(iter(planners))), model)


def _carried_over(start: WarmStart, layouts: Sequence[GradientLayout]) -> FirstProposal | None:
    try:
        checked_plans(start.knobs, layouts)
    except PlanError as err:
        logger.warning(
            "Sirtaki ignores the stored tuning result %s, which does not fit this model: %s",
            start.record.id[:8],
            err,
        )
        return None
    return FirstProposal(knobs=start.knobs, arm=start.record.arm, message=start.explanation)


def _promising(
    proposals: Sequence[FirstProposal], rivals: Sequence[Knobs], model: PlanningModel
) -> list[FirstProposal]:
    """Return the proposals whose predicted time is close to the best one, and those without a prediction."""
    expected_s = [model.expected_s(proposal.knobs) for proposal in proposals]
    known_s = [span_s for span_s in [*expected_s, *(model.expected_s(knobs) for knobs in rivals)] if span_s is not None]
    doubt = max([INDIFFERENCE, *(link.residual for link in model.links.values())])
    kept = []
    for proposal, span_s in zip(proposals, expected_s, strict=True):
        if span_s is None or span_s <= (1 + doubt) * min(known_s):
            kept.append(proposal)
        else:
            which = proposal.message.replace("starting from ", "")
            logger.info(
                "the tuner skips the stored setting of another job, because its predicted communication time is "
                "%.2f times that of the best known setting; skipped setting: %s",
                span_s / min(known_s),
                which,
            )
    return kept


OTHER_TIMES, OTHER_TIMES_ON_ONE_HOST = 1.5, 3.0
"""If the communication time with a stored setting differs from the stored time by more than this factor, the network is
taken to have changed.

The factor is larger on one host, because other jobs on its processors slow communication down for a while.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheHit:
    """The registry's entry of this job, which an earlier run of the same job has stored.

    Attributes:
        exact: setting that the earlier run chose, if its warm-up was complete.
        history: settings that the earlier run tried, with their times.
        message: description of the entry, for the log. "" if the registry has no entry of this job.
    """

    exact: Remembered | None = None
    history: tuple[Trial, ...] = ()
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Hardware of a rank.

    Attributes:
        host: kind of host, as returned by `machine.host_kind`.
        device: "cpu", or the name of the GPU.
    """

    host: str
    device: str

    @classmethod
    def here(cls, device: torch.device) -> Hardware:
        """Return the hardware of this process, whose gradients are on `device`. `host` is empty if it is unknown."""
        try:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            return cls(host=_label(host_kind()), device=_label(name))
        except Exception:
            logger.info(
                "Sirtaki cannot read the type of this host or the name of its GPU, so that stored tuning results name "
                "the hardware only %r",
                device.type,
                exc_info=True,
            )
            return cls(host="", device=device.type)


def _label(text: str) -> str:
    """Return the first 200 characters of `text`, without characters that are not allowed in a label of the registry."""
    return "".join(character for character in text if character.isprintable())[:200]


def condition_of(ratio: float) -> str:
    """Return the condition of the network as text: `ratio` rounded to a power of two, such as `4×`.

    Returns "" if the rounded ratio is 1 or unknown.

    Args:
        ratio: communication time with the default setting now, divided by that in the job's record. (Of the job's
            records, the one without a condition of the network.)
    """
    power = round(math.log2(ratio)) if 0.0 < ratio < math.inf else 0
    return f"{2.0**power:g}×" if power else ""


def hosts_by_rank(control: ControlPlane, settings: Settings) -> list[str]:
    """Return the host name of each rank, with the number of its simulated node.

    So each simulated node counts as a host, because it is tuned like one.
    """
    simulated = control.local_size if settings.local_size else control.size
    return [f"{host}/{rank // simulated}" for rank, host in enumerate(control.hosts)]


def cluster_fingerprint(control: ControlPlane, settings: Settings) -> str:
    """Return a hash of the topology (hosts, devices, placement of ranks) of a job on CPUs. Collective."""
    hosts = hosts_by_rank(control, settings)
    kinds = control.all_gather(Hardware.here(torch.device("cpu")))
    return Topology.from_ranks(
        hosts,
        devices=[kind.device for kind in kinds],
        host_kinds={name: kind.host for name, kind in zip(hosts, kinds, strict=True)},
    ).fingerprint()


class TuningCache:
    """Reads the settings that this job and similar jobs have stored, and stores this job's result in the registry.

    No method raises an error.
    """

    def __init__(
        self,
        settings: Settings,
        parameters: Sequence[torch.Tensor],
        hosts: Sequence[str],
        kinds: Sequence[Hardware] = (),
    ) -> None:
        """Start recording the graph of the model, which identifies similar jobs.

        Args:
            settings: settings of this process. They contain the location of the registry.
            parameters: parameters whose gradients are reduced. Their graph is recorded.
            hosts: host name of each rank. Simulated nodes have different names.
            kinds: hardware of each rank. Empty if unknown.
        """
        self._settings = settings
        self._memory = SettingsMemory(settings.registry)
        self._hosts, self._kinds = hosts, kinds
        self._recorder = ModelGraphRecorder()
        self._job: JobDescription | None = None
        self._asked: tuple[Sequence[GradientLayout], KnobSpace] | None = None
        self._own: JobRecord | None = None
        self._disproved: JobRecord | None = None
        self._has_stored = False  # whether this job has stored a record of its own
        # Records of similar jobs. None = the registry was not searched yet.
        self._neighbours: list[Neighbour] | None = None
        self._found_by: dict[Knobs, str] = {}
        if settings.registry is not None and "://" in settings.registry:
            self._memory.load_ahead()  # The look-up in a database needs SQLAlchemy.
        if settings.registry != REGISTRY_OFF:
            self._memory.guard(lambda: self._recorder.start(parameters), None)

    def close(self) -> None:
        """Stop recording the model's graph."""
        self._recorder.stop()

    def look_up(self, layouts: Sequence[GradientLayout], space: KnobSpace) -> CacheHit:
        """Look up the registry's entry of this job, which an earlier run of the same job has stored.

        Call after the first forward pass of the model. For settings of similar jobs, see `first_proposals`.
        """
        self._recorder.stop()
        self._asked = layouts, space

        def look() -> CacheHit:
            job = self._described()
            self._own = None if job is None else self._memory.entry(job.key)
            return CacheHit() if self._own is None else self._hit_of(self._own, layouts, space)

        hit = self._memory.guard(lambda: look() if self._memory.exists else CacheHit(), CacheHit())
        if hit.exact is None or self._own is None or _age_s(self._own) > RENEWED_AFTER_S:
            self._memory.load_ahead()  # for the search for similar jobs, or the new record
        return hit

    def _described(self) -> JobDescription | None:
        """Return the description of this job, computed by the first call. None if no model graph was recorded."""
        # Clear the request for a description of the job, so that a failing computation is not repeated.
        asked, self._asked = self._asked, None
        if asked is not None:
            self._job = self._job_of(*asked)
        return self._job

    def _job_of(self, layouts: Sequence[GradientLayout], space: KnobSpace) -> JobDescription | None:
        graph = self._recorder.graph
        if graph is None:
            return None
        layout = layouts[0]
        topology = Topology.from_ranks(
            self._hosts,
            devices=[kind.device for kind in self._kinds] or None,
            host_kinds={name: kind.host for name, kind in zip(self._hosts, self._kinds, strict=False)},
        )
        return JobDescription(
            key=make_key(
                graph,
                topology,
                dtype=layout.dtype,
                device=layout.device,
                versions={"torch": ".".join(torch.__version__.split(".")[:2]), "sirtaki": sirtaki.__version__},
                gradients=gradients_fingerprint((each.dtype, each.sizes) for each in layouts),
                # Jobs share settings with compression only if they allow the same compressors.
                fixed=fixed_knobs(self._settings, space.lossy),
            ),
            model=graph,
            topology=topology,
            layout=layout_fingerprint(layout.sizes, layout.itemsize_bytes),
            itemsize_bytes=layout.itemsize_bytes,
            space=space,
            name=self._recorder.model_name,
        )

    def _hit_of(self, own: JobRecord, layouts: Sequence[GradientLayout], space: KnobSpace) -> CacheHit:
        same_order = self._job is not None and own.layout == self._job.layout
        origin = f"in the registry {self._memory.name} ({own.reference})"
        history = tuple(trial for trial in own.trials if trial.knobs.cuts is None or same_order)
        if not own.complete:
            return CacheHit(
                history=history,
                message=f"found an unfinished tuning phase of {own.describe()} {origin}: continuing after "
                f"{counted(len(history), 'trial')}",
            )
        knobs = own.knobs
        try:
            if knobs not in space:
                raise PlanError(
                    f"the stored setting {knobs.describe()} uses an option that this job excludes, so it is not used"
                )
            if knobs.cuts is not None and not same_order:
                raise PlanError("this job computes its gradients in another order than the job of the stored setting")
            checked_plans(knobs, layouts)
        except PlanError as err:
            logger.info(
                "the stored tuning result %s of this job cannot be used unchanged (%s); tuning starts from a "
                "similar setting",
                own.id[:8],
                err,
            )
            self._disproved = own
            self._neighbours = [Neighbour(record=own, distance=0.0)]
            return CacheHit()
        self._found_by[knobs] = own.arm
        return CacheHit(
            exact=Remembered(
                knobs=knobs,
                best_s=own.best_span_s,
                default_s=own.default_span_s,
                noise=own.relative_noise,
                gain=own.gain,
                other_times=OTHER_TIMES if own.topology.n_hosts > 1 else OTHER_TIMES_ON_ONE_HOST,
            ),
            history=history,
            message=f"found {own.describe()} {origin}: "
            + (
                "the default, because no setting was proved to be faster"
                if own.best_span_s == own.default_span_s
                else f"{knobs.describe()}; communication against the default: {own.describe_gain()}"
            ),
        )

    def disprove(self) -> None:
        """Allow `keep` to replace this job's stored record with a slower result.

        Called if the stored setting was not fast in this run, or if the network has changed.
        """
        self._disproved = self._own

    def look_again(self) -> None:
        """Make the next `first_proposals` search the registry for similar jobs again.

        Called if the network has changed.
        """
        self._neighbours = None

    def first_proposals(
        self, layouts: Sequence[GradientLayout], space: KnobSpace, model: PlanningModel | None
    ) -> list[FirstProposal]:
        """Return the settings of similar jobs that the tuner tries first.

        Args:
            layouts: gradient layouts of this job.
            space: settings that this job may try.
            model: cost model of this job, from which planners compute settings. None if it could not be measured.
        """
        nothing: list[FirstProposal] = []
        if not self._memory.exists or (self._own is not None and not self._own.complete):
            return nothing

        def propose() -> list[FirstProposal]:
            job = self._described()
            if job is None:
                return nothing
            self._job = job = replace(job, links={} if model is None else model.links, space=space)
            if self._neighbours is None:
                self._neighbours = self._memory.similar(job)
            proposals = first_proposals(adapted_all(self._neighbours, job), layouts=layouts, space=space, model=model)
            self._found_by.update((proposal.knobs, proposal.arm) for proposal in proposals)
            return [replace(one, message=f"{one.message} (registry {self._memory.name})") for one in proposals]

        return self._memory.guard(propose, nothing)

    def keep(
        self,
        result: SessionResult,
        trials: Sequence[Trial],
        *,
        complete: bool,
        links: Mapping[Route, LinkModel],
        condition: str = "",
    ) -> str:
        """Store the result of a search in the registry. Return where it was stored, in words; "" if it was not stored.

        A result that only confirms this job's recent record is not stored again, because the import of SQLAlchemy
        would make all ranks wait.

        Args:
            result: result of the search.
            trials: all settings that the search tried, with their times.
            complete: True if the search was complete, False if it was cut short.
            links: measured model of latency and bandwidth, for each route (transport and algorithm).
            condition: condition of the network in which the result was measured, as text from `condition_of`. A result
                with a condition is stored in addition to the job's own record.
        """
        if not all(0 < span < math.inf for span in (result.best_span_s, result.default_span_s)):
            return ""
        if complete and not condition and self._own is not None and self._is_confirmed(self._own, result, trials):
            return ""

        def store_it(store: Store) -> str:
            job = self._described()
            if job is None:
                return ""
            if condition:
                job = replace(job, key=structs.replace(job.key, condition=condition))
                record = self._record(job, None, result, trials, complete=complete, links=links)
                return stored(record, store) if store.put(record) else ""
            record = self._record(job, self._own, result, trials, complete=complete, links=links)
            before = self._disproved
            kept = store.put(record, disproved=before)
            self._has_stored |= kept
            if kept and before is not None and before.complete and before.key == record.key:
                # The new record replaces the earlier one. Keep the earlier setting in a second record, for the earlier
                # condition of the network, because that condition may return.
                now = condition_of(before.default_span_s / record.default_span_s)
                if now:
                    store.put(structs.replace(before, key=structs.replace(before.key, condition=now)))
            return stored(record, store) if kept else ""

        return self._memory.attempt(store_it, "")

    def _is_confirmed(self, own: JobRecord, result: SessionResult, trials: Sequence[Trial]) -> bool:
        """Return whether a result confirms this job's record, which is recent, and no other settings were tried."""
        tried, before = ({trial.knobs for trial in some} for some in (trials, own.trials))
        recent = own.complete and not self._has_stored and self._disproved is None and _age_s(own) <= RENEWED_AFTER_S
        return recent and result.knobs == own.knobs and tried <= before | {own.knobs}

    def _record(
        self,
        job: JobDescription,
        own: JobRecord | None,
        result: SessionResult,
        trials: Sequence[Trial],
        *,
        complete: bool,
        links: Mapping[Route, LinkModel],
    ) -> JobRecord:
        knobs = result.knobs
        # If this run has confirmed the stored setting, add the number of trials of earlier runs, because their search
        # found the setting.
        checked = own is not None and own.complete and own.knobs == knobs
        earlier = max(0, own.n_trials - len(own.trials)) if checked and own is not None else 0
        link = links.get(knobs.route)
        if link is None and own is not None and own.knobs.route == knobs.route:
            link = own.link
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "sirtaki": sirtaki.__version__,
        }
        return JobRecord(
            key=job.key,
            model=job.model,
            topology=job.topology,
            knobs=knobs,
            best_span_s=result.best_span_s,
            default_span_s=result.default_span_s,
            noise_s=result.noise_s,
            gain=result.gain,
            n_trials=len(trials) + earlier,
            arm=self._found_by.setdefault(knobs, result.arm),
            complete=complete,
            layout=job.layout,
            trials=tuple(trials),
            link=link,
            provenance=Provenance(
                created_s=time.time(),
                model_name=job.name,
                host_kinds=tuple(sorted(set(job.topology.host_kinds))),
                versions=versions,
            ),
        )
