"""Benefit of the registry for a job that has never run before: leave-one-out on simulated jobs.

    python -m bench.registry --transfer [--without-planners] [--quick] [--check] [--save]

Each of 24 jobs is a network on a cluster, simulated by `autotune.model.simulator`. A measured span is the simulated one
times lognormal noise of 3 or 10 %. Jobs whose default is within 3 % of the optimum are skipped. Each job runs in the
real warm-up session with a budget of 100 training iterations, first cold, and then with a registry. The registry is
real: a SQLite file, model and topology graphs, look-up by edit distance, scaling by the links, the veto of the job's
own model. It holds the results of cold warm-ups under the same noise of

- *sibling*: the next model of the same family on the same cluster, such as ResNet-101 for ResNet-50;
- *size*: the same model on the same fabric with other numbers of ranks (8, 64, 256);
- *link*: the same model on as many ranks of other fabrics;
- *all*: all of these jobs.

The registry never holds the job itself. The job's link and the planners' model are known up to the noise, which
multiplies each of their numbers. *Without planners* stands for jobs that cannot be modelled: only search techniques
compete, and no proposal is vetoed.

- *optimum*: the fastest setting of the lattice of knobs, with units in quarter octaves, by exhaustive search.
- *iterations to 3 %*: training iterations until the setting that the session would keep is within 3 % of the optimum in
  true time; 0 if the default is. Runs that never get there count as 100 iterations in means.
- *regret*: true span of the finally kept setting over the optimum, minus one.
- *tried*: training iterations spent on the registry's proposals, including discarded iterations.
- *excess*: iterations to 3 % with the registry, minus those of the cold start with the same seed, minus tried. An
  excess of at most 0 means that the registry costs no more than its tried proposals. From their first different
  setting on, two runs draw different noise, so a single run's excess is partly luck. Hence the bars: the mean over all
  runs is at most 0, and no job's mean over seeds is above 0 by more than 3 standard errors. A single run tries at most
  3 proposals of at most 5 iterations.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.harness import Bar, Report, finish, parser, processes
from bench.lib.workloads import FABRICS, NETWORKS, RANKS, cluster, workload
from sirtaki.autotune.arms.planners import AscWfbp, AscWfbpN, Dpro, Libra, LibraM, MgWfbp, Planner
from sirtaki.autotune.arms.techniques import OUR_ARMS
from sirtaki.autotune.knobs import KnobLattice, Knobs, KnobSpace
from sirtaki.autotune.meta.bandit import default_arms
from sirtaki.autotune.meta.session import REGISTRY_ARM, Purpose, SessionResult, TuningSession
from sirtaki.autotune.model.fits import ContentionModel, RateCurve
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.autotune.trial import Arm
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.engine.tuning.cache import first_proposals
from sirtaki.engine.tuning.plans import default_knobs
from sirtaki.measures import LARGEST_UNIT_BYTES, SMALLEST_UNIT_BYTES, LinkModel
from sirtaki.registry.cluster import Topology
from sirtaki.registry.graph import ModelGraph, OperationLabel, layout_fingerprint, model_graph
from sirtaki.registry.opening import open_store
from sirtaki.registry.schema import JobRecord, Provenance, make_key
from sirtaki.registry.warm_start import JobDescription, Neighbour, adapted_all, neighbours

ROUTE = (TransportKind.NCCL, Algorithm.FLAT)
THREADS = (512, 1024, 2048, 4096)
# Two networks on each of the twelve clusters. Each network occurs at least twice.
MODELS = (
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
SIBLINGS = {
    "vgg16": "vgg19",
    "resnet50": "resnet101",
    "resnet101": "resnet50",
    "resnet152": "resnet101",
    "densenet201": "densenet169",
    "bert_base": "bert_large",
    "bert_large": "bert_base",
    "gpt2": "gpt2_medium",
}
ASKED = ("sibling", "size")  # Scenarios with a bar on iterations.
SCENARIOS = (*ASKED, "link", "all")
ONE_HOST = "one host"
DTYPE, DEVICE = "float32", "cuda"
PLANNERS: tuple[type[Planner], ...] = (AscWfbpN, Libra, Dpro, AscWfbp, LibraM, MgWfbp)
BUDGET_ITERATIONS = 100
CLOSE = 0.03  # A setting counts as found if it is within this fraction of the optimum.
NOISES = (0.03, 0.10)
OTHER_JOBS_SEED = 10_000  # Added to the seed of the warm-ups in the registry, so that their noise is independent.
MOST_TRIED = 15
CLEAR = 3.0  # Number of standard errors of the bars.


# ── simulated jobs ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class TransferJob:
    """A simulated job: a network on a cluster."""

    network: str
    fabric: str
    ranks: int

    @property
    def name(self) -> str:
        """Return the name for tables."""
        return f"{self.network}, {self.fabric}, {self.ranks} ranks"

    @cached_property
    def model(self) -> PlanningModel:
        """Return the model that gives the true times."""
        load, link = workload(self.network), cluster(self.fabric, self.ranks).link()
        contention = _contention(link) if self._has_threads else None
        return PlanningModel(layout=load.layout, profile=load.profile(), links={ROUTE: link}, contention=contention)

    @property
    def _has_threads(self) -> bool:
        """Return whether the number of GPU threads is a knob, which is so if the GPUs communicate directly (RDMA)."""
        return "RDMA" in self.fabric

    @cached_property
    def space(self) -> KnobSpace:
        """Return the possible settings."""
        largest = min(LARGEST_UNIT_BYTES, self.model.layout.total_bytes)
        threads = THREADS if self._has_threads else (None,)
        return KnobSpace(routes=(ROUTE,), unit_bytes=(SMALLEST_UNIT_BYTES, largest), threads=threads)

    @property
    def default(self) -> Knobs:
        """Return the untuned setting."""
        one_node = self.fabric == ONE_HOST
        return default_knobs(self.space, total_bytes=self.model.layout.total_bytes, one_node=one_node)

    @cached_property
    def _spans_s(self) -> dict[Knobs, float]:
        return {}

    def span_s(self, knobs: Knobs) -> float:
        """Return the true span of a setting in seconds. Each setting is simulated once."""
        if knobs not in self._spans_s:
            self._spans_s[knobs] = self.model.simulator(ROUTE).run_knobs(knobs).span_s
        return self._spans_s[knobs]

    @cached_property
    def optimum_s(self) -> float:
        """Return the shortest span of all settings on the fine lattice, in seconds."""
        return min(map(self.span_s, KnobLattice(self.space, steps_per_octave=4).points))

    def is_close(self, knobs: Knobs) -> bool:
        """Return whether a setting is within 3 % of the optimum."""
        return self.span_s(knobs) <= (1 + CLOSE) * self.optimum_s

    @property
    def graph(self) -> ModelGraph:
        """Return the network as a chain of layers with their parameters, without branches."""
        return _layers(self.network)

    @property
    def topology(self) -> Topology:
        """Return the topology: one GPU per rank, and one kind of host per fabric."""
        names = ["host" if self.fabric == ONE_HOST else f"host{rank}" for rank in range(self.ranks)]
        return Topology.from_ranks(names, devices=["GPU"] * self.ranks, host_kinds=dict.fromkeys(names, self.fabric))

    @property
    def layout(self) -> str:
        """Return the fingerprint of the gradient layout."""
        return layout_fingerprint(self.model.layout.sizes, self.model.layout.itemsize_bytes)

    def others(self, scenario: str) -> list["TransferJob"]:
        """Return the jobs whose results the registry holds in a scenario."""
        known = {
            "sibling": [replace(self, network=SIBLINGS[self.network])] if self.network in SIBLINGS else [],
            "size": [replace(self, ranks=ranks) for ranks in RANKS if ranks != self.ranks],
            "link": [
                replace(self, fabric=fabric)
                for fabric in FABRICS
                if fabric != self.fabric and ONE_HOST not in (fabric, self.fabric)
            ],
        }
        return known[scenario] if scenario in known else [job for some in known.values() for job in some]


def jobs(count: int) -> list[TransferJob]:
    """Return the first `count` jobs. Neighbours in the list differ in fabric, size and network."""
    clusters = [(fabric, ranks) for ranks in RANKS for fabric in FABRICS]
    places = [(MODELS[i % len(MODELS)], *clusters[i % len(clusters)]) for i in range(count)]
    return [TransferJob(network=network, fabric=fabric, ranks=ranks) for network, fabric, ranks in places]


def _contention(link: LinkModel) -> ContentionModel:
    """Return the effect of threads, assumed from LIBRA's figures 3 and 4: 512 threads reach most of the link's rate."""
    rate = link.throughput[0]
    return ContentionModel(
        alpha_1=0.98,
        alpha_2=1.3e-4,
        overlapped=RateCurve(gamma_1=0.95 * rate, gamma_2=0.9 * rate, gamma_3=0.02),
        alone=RateCurve(gamma_1=rate, gamma_2=0.9 * rate, gamma_3=0.03),
    )


@cache
def _layers(network: str) -> ModelGraph:
    nodes = []
    for layer, parameters in groupby(NETWORKS[network](), key=lambda parameter: parameter.name.rpartition(".")[0]):
        sizes = [parameter.numel for parameter in parameters]
        nodes.append(OperationLabel(kind=_kind(layer), detail=",".join(map(str, sizes)), size=sum(sizes)))
    return model_graph(nodes, pairwise(range(len(nodes))))


def _kind(layer: str) -> str:
    last = layer.rpartition(".")[2]
    if "norm" in last or last in ("bn", "ln_1", "ln_2", "ln_f"):
        return "norm"
    return "convolution" if "conv" in last or last.endswith("wise") or layer.startswith("features") else "linear"


def misjudged(model: PlanningModel, *, noise: float, rng: np.random.Generator) -> PlanningModel:
    """Return the model as a job would measure it: every number is multiplied by noise."""

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


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Luck:
    """The random part of a run, and whether planners take part.

    Attributes:
        noise: relative noise of measurements.
        seed: seed of the noise and of the search.
        planners: whether the job can be modelled, so that planners take part.
    """

    noise: float
    seed: int
    planners: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupOutcome:
    """Result of one warm-up.

    Attributes:
        job: the tuned job.
        results: result after each assignment, if the warm-up ended there; the last one is final.
        tried: iterations spent on the registry's proposals.
    """

    job: TransferJob
    results: Sequence[SessionResult]
    tried: int

    @property
    def found_at(self) -> float:
        """Return the number of iterations until the setting to keep is within 3 % of the optimum; infinite if never."""
        if self.job.is_close(self.job.default):
            return 0.0
        return next((one.iterations_used for one in self.results if self.job.is_close(one.knobs)), math.inf)

    @property
    def regret(self) -> float:
        """Return the regret of the finally kept setting."""
        return self.job.span_s(self.results[-1].knobs) / self.job.optimum_s - 1

    @property
    def counted(self) -> float:
        """Return `found_at`, at most the budget."""
        return min(self.found_at, BUDGET_ITERATIONS)


def run(job: TransferJob, luck: Luck, seeds: Sequence[Knobs] = ()) -> WarmupOutcome:
    """Run one warm-up that tries the settings `seeds` first."""
    rng = np.random.default_rng([luck.seed, 2])
    session = TuningSession(
        space=job.space,
        default=job.default,
        arm=_arm(job, luck),
        rng=rng,
        budget_iterations=BUDGET_ITERATIONS,
        seeds=seeds,
    )
    results, tried = list[SessionResult](), 0
    while not session.done:
        now = session.assignment
        chance = np.exp(luck.noise * rng.standard_normal(now.measured_iterations))
        session.record([job.span_s(now.knobs) * factor for factor in chance.tolist()])
        if now.arm == REGISTRY_ARM and now.purpose is Purpose.TRIAL:
            tried += now.discarded_iterations + now.measured_iterations
        results.append(session.result)
    return WarmupOutcome(job=job, results=results, tried=tried)


def _arm(job: TransferJob, luck: Luck) -> Arm:
    """Return the bandit. Planners plan on demand, because most are never asked."""
    model = _measured(job, luck)
    return default_arms(
        space=job.space,
        rng=np.random.default_rng(luck.seed),
        budget_iterations=BUDGET_ITERATIONS,
        names=list(OUR_ARMS),
        planners=[kind(space=job.space, model=model) for kind in PLANNERS] if luck.planners else [],
    )


def _measured(job: TransferJob, luck: Luck) -> PlanningModel:
    """Return the planners' noisy model of the job."""
    return misjudged(job.model, noise=luck.noise, rng=np.random.default_rng([luck.seed, 1]))


@cache
def entry_of(job: TransferJob, luck: Luck) -> JobRecord:
    """Return the registry entry that a cold warm-up of a job writes."""
    result = run(job, luck).results[-1]
    return JobRecord(
        key=make_key(job.graph, job.topology, dtype=DTYPE, device=DEVICE),
        model=job.graph,
        topology=job.topology,
        knobs=result.knobs,
        best_span_s=result.best_span_s,
        default_span_s=result.default_span_s,
        noise_s=result.noise_s,
        n_trials=result.n_trials,
        arm=result.arm,
        layout=job.layout,
        link=_measured(job, luck).links[ROUTE],
        provenance=Provenance(created_s=time.time()),
    )


def proposals(job: TransferJob, entries: Sequence[JobRecord], luck: Luck) -> list[Knobs]:
    """Return the settings that `sirtaki.torch` would try first with these entries in the registry."""
    measured = _measured(job, luck)
    asked = JobDescription(
        key=make_key(job.graph, job.topology, dtype=DTYPE, device=DEVICE),
        model=job.graph,
        topology=job.topology,
        layout=job.layout,
        links={ROUTE: measured.links[ROUTE]} if luck.planners else {},
        space=job.space,
        name=job.network,
    )
    starts = adapted_all(_look_up(asked, entries), asked)
    found = first_proposals(
        starts, layouts=[job.model.layout], space=job.space, model=measured if luck.planners else None
    )
    return [proposal.knobs for proposal in found]


def _look_up(asked: JobDescription, entries: Sequence[JobRecord]) -> list[Neighbour]:
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(str(Path(folder) / "registry.db"))
        store.put_all(entries)
        assert store.get(JobRecord, asked.key) is None, "a job must not find itself"
        found = neighbours(store, asked)
        store.close()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRuns:
    """One job, all of whose runs are made by one process."""

    job: TransferJob
    seeds: tuple[int, ...]
    without_planners: bool


def run_task(task: JobRuns) -> list[dict[str, Any]]:
    """Run a job in all scenarios. Return a JSON-ready row for each; none if the default is close to the optimum."""
    job = task.job
    if job.is_close(job.default):
        return []
    rows = []
    for planners, noise in product((True, False) if task.without_planners else (True,), NOISES):
        lucks = [Luck(noise=noise, seed=seed, planners=planners) for seed in task.seeds]
        cold = [run(job, luck) for luck in lucks]
        for scenario in SCENARIOS if planners else ASKED:
            others = job.others(scenario)
            if not others:
                continue
            warm = []
            for luck in lucks:
                elsewhere = replace(luck, seed=luck.seed + OTHER_JOBS_SEED)
                seeds = proposals(job, [entry_of(other, elsewhere) for other in others], luck)
                warm.append(run(job, luck, seeds))
            rows.append(
                {
                    "job": job.name,
                    "scenario": scenario,
                    "noise": noise,
                    "planners": planners,
                    "cold": [_finite(outcome.found_at) for outcome in cold],
                    "warm": [_finite(outcome.found_at) for outcome in warm],
                    "tried": [outcome.tried for outcome in warm],
                    "excess": [w.counted - c.counted - w.tried for w, c in zip(warm, cold, strict=True)],
                    "cold_regret": [outcome.regret for outcome in cold],
                    "warm_regret": [outcome.regret for outcome in warm],
                }
            )
    return rows


def _finite(iterations: float) -> float | None:
    return None if math.isinf(iterations) else iterations


# ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────────


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians and means over some rows of `run_task`."""

    def all_of(key: str) -> list[float]:
        return [math.inf if value is None else value for row in runs for value in row[key]]

    def mean_iterations(key: str) -> float:
        return statistics.fmean(min(value, BUDGET_ITERATIONS) for value in all_of(key))

    return {
        "median_cold": statistics.median(all_of("cold")),
        "median_warm": statistics.median(all_of("warm")),
        "mean_cold": mean_iterations("cold"),
        "mean_warm": mean_iterations("warm"),
        "mean_tried": statistics.fmean(all_of("tried")),
        "most_tried": max(all_of("tried")),
        "mean_excess": statistics.fmean(all_of("excess")),
        "worst_excess_in_standard_errors": max(standard_errors(row["excess"]) for row in runs),
        "cold_regret": statistics.fmean(all_of("cold_regret")),
        "warm_regret": statistics.fmean(all_of("warm_regret")),
    }


def standard_errors(samples: Sequence[float]) -> float:
    """Return the number of standard errors by which the mean is above 0."""
    mean = statistics.fmean(samples)
    error = statistics.stdev(samples) / math.sqrt(len(samples))
    if error == 0:
        return 0.0 if mean == 0 else math.copysign(math.inf, mean)
    return mean / error


def bars(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """Return the bars of the warm start."""
    asked = [row for row in rows if row["planners"]]
    found = []
    for row in asked:
        where = f"{row['scenario']}, noise {100 * row['noise']:g} %"
        if row["scenario"] in ASKED:
            found.append(Bar(claim=f"{where}: median iterations to 3 %", value=row["median_warm"], limit=5))
        found.append(Bar(claim=f"{where}: mean excess over a cold start", value=row["mean_excess"], limit=0))
        worst = row["worst_excess_in_standard_errors"]
        found.append(Bar(claim=f"{where}: worst job's excess, in standard errors", value=worst, limit=CLEAR))
    most = max(row["most_tried"] for row in asked)
    return [*found, Bar(claim="most iterations that the registry's proposals took", value=most, limit=MOST_TRIED)]


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--transfer", action="store_true", required=True, help="run this benchmark")
    flags.add_argument("--workers", type=int, default=2, help="number of processes (%(default)s)")
    flags.add_argument("--jobs", type=int, default=24)
    flags.add_argument(
        "--without-planners", action="store_true", help="add jobs that cannot be modelled; takes twice as long"
    )
    flags.add_argument("--seeds", type=int, default=8)
    args = flags.parse_args()
    n_jobs, n_seeds = (8, 3) if args.quick else (args.jobs, args.seeds)
    seeds = tuple(range(args.seed, args.seed + n_seeds))
    tasks = [JobRuns(job=job, seeds=seeds, without_planners=args.without_planners) for job in jobs(n_jobs)]
    with processes(args.workers) as pool:
        runs = [row for rows in pool.map(run_task, tasks) for row in rows]
    rows = [
        {"scenario": scenario, "noise": noise, "planners": planners, **summary(some)}
        for planners in (True, False)
        for scenario in SCENARIOS
        for noise in NOISES
        if (some := [r for r in runs if (r["scenario"], r["noise"], r["planners"]) == (scenario, noise, planners)])
    ]
    report = Report(name="registry_transfer", rows=rows, bars=bars(rows), settings={"runs": runs})
    counted = len({row["job"] for row in runs})
    report.notes.append(
        f"a row has {counted} of {n_jobs} jobs (where the default is not close to the optimum) × {n_seeds} seeds"
    )
    return finish(report, args)
