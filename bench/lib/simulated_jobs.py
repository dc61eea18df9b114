"""Simulated training jobs, each a network on a cluster, and how planners would misjudge them."""

import math
from dataclasses import dataclass, replace

import numpy as np

from bench.lib.workloads import FABRICS, RANKS, cluster, workload
from sirtaki.autotune.knobs import KnobLattice, Knobs, KnobSpace
from sirtaki.autotune.model.fits import ContentionModel, RateCurve
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile, Simulator
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.engine.tuning.plans import default_knobs
from sirtaki.measures import LARGEST_UNIT_BYTES, SMALLEST_UNIT_BYTES, LinkModel

ROUTE = (TransportKind.NCCL, Algorithm.FLAT)
THREADS = (512, 1024, 2048, 4096)
# Two networks on each of the twelve clusters, so that each network comes up at least twice.
NETWORKS = (
    "resnet50",
    "vgg16",
    "bert_base",
    "densenet201",
    "resnet101",
    "bert_large",
    "inception_v4",
    "gpt2",
    "xception",
    "resnet152",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """A network on a cluster.

    Attributes:
        name: for tables.
        space: what may be chosen.
        default: what runs untuned.
        model: the truth.
    """

    name: str
    space: KnobSpace
    default: Knobs
    model: PlanningModel

    @property
    def simulator(self) -> Simulator:
        """The truth, replayed."""
        return self.model.simulator(ROUTE)


def jobs(count: int) -> list[Job]:
    """The first `count` jobs; neighbours in the list differ in router, size and network."""
    clusters = [(router, ranks) for ranks in RANKS for router in FABRICS]
    return [simulated_job(NETWORKS[i % len(NETWORKS)], *clusters[i % len(clusters)]) for i in range(count)]


def simulated_job(network: str, router: str, ranks: int) -> Job:
    """One network on one cluster."""
    load = workload(network)
    gpu_threads = "RDMA" in router  # where GPUs communicate by themselves, their threads are a knob
    link = cluster(router, ranks).link()
    space = KnobSpace(
        routes=(ROUTE,),
        unit_bytes=(SMALLEST_UNIT_BYTES, min(LARGEST_UNIT_BYTES, load.layout.total_bytes)),
        threads=THREADS if gpu_threads else (None,),
    )
    model = PlanningModel(
        layout=load.layout,
        profile=load.profile(),
        links={ROUTE: link},
        contention=_contention(link) if gpu_threads else None,
    )
    return Job(
        name=f"{network}, {router}, {ranks} ranks",
        space=space,
        default=default_knobs(space, total_bytes=load.layout.total_bytes, one_node=router == "one host"),
        model=model,
    )


def _contention(link: LinkModel) -> ContentionModel:
    """An assumption of the size that LIBRA's figures 3 and 4 show: 512 threads reach most of the link's rate."""
    rate = link.throughput[0]
    return ContentionModel(
        alpha_1=0.98,
        alpha_2=1.3e-4,
        overlapped=RateCurve(gamma_1=0.95 * rate, gamma_2=0.9 * rate, gamma_3=0.02),
        alone=RateCurve(gamma_1=rate, gamma_2=0.9 * rate, gamma_3=0.03),
    )


def optimum_s(job: Job) -> float:
    """The shortest span of all settings on the fine lattice."""
    simulator = job.simulator
    return min(simulator.run_knobs(knobs).span_s for knobs in KnobLattice(job.space, steps_per_octave=4).points)


def misjudged(model: PlanningModel, *, noise: float, rng: np.random.Generator) -> PlanningModel:
    """The model as it would be measured: every number off by the noise."""

    def off(value: float) -> float:
        return float(value * math.exp(noise * rng.standard_normal()))

    link = model.links[ROUTE]
    contention = model.contention
    if contention is not None:
        contention = replace(
            contention,
            alpha_2=off(contention.alpha_2),
            overlapped=_scaled(contention.overlapped, off(1.0)),
            alone=_scaled(contention.alone, off(1.0)),
        )
    return PlanningModel(
        layout=model.layout,
        profile=Profile.from_durations([off(duration) for duration in model.profile.durations_s]),
        links={ROUTE: replace(link, alpha_s=off(link.alpha_s), throughput=tuple(map(off, link.throughput)))},
        contention=contention,
    )


def _scaled(curve: RateCurve, factor: float) -> RateCurve:
    return replace(curve, gamma_1=factor * curve.gamma_1, gamma_2=factor * curve.gamma_2)
