"""What the registry saves a job that nobody has run before: leave-one-out on the tuner's simulated jobs.

    python -m bench.registry --transfer [--without-planners] [--quick] [--check] [--save]

Jobs, noise, budget and session are `bench.tuner`'s; of its 24 jobs those count where the default is not within 3 % of
the optimum already. Each runs cold, and with a registry (a real one: a SQLite file, model and topology graphs, the
look-up by edit distance, scaling by the links, the veto of the job's own model) that holds what cold warm-ups, under
the same noise, have found for

- *sibling*: the next model of its family on the same cluster, such as ResNet-101 for ResNet-50;
- *size*: the same model on the same fabric with the other two numbers of ranks of 8, 64 and 256;
- *link*: the same model on as many ranks of other fabrics;
- *all*: all of these.

It never holds the job itself. A job knows its link, and planners know the job, up to the noise (`bench.tuner`).
*Without planners* only search techniques compete, and nothing is vetoed: jobs that cannot be modelled.

- *iterations to 3 %* and *regret* are `bench.tuner`'s.
- *tried*: training iterations spent on the registry's proposals, discarded included.
- *excess*: iterations to 3 % with the registry, less those of the cold start under the same seed, less tried; both
  count as the whole budget where it is never reached. Never worse than a cold start by more than the cost of the tried
  proposals means an excess of at most 0. Two runs part ways with their first different setting, and from there on luck
  differs, so a single run's excess is luck to a good part: the bars are that the mean over all runs is at most 0, and
  that no job's mean over seeds lies above 0 by more than 3 of its standard errors. What a single run can be held to is
  tried: at most 3 proposals of at most 5 iterations.
"""

import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.harness import Bar, Report, finish, parser, processes
from bench.lib.workloads import FABRICS, NETWORKS, RANKS
from bench.tuner import (
    BUDGET_ITERATIONS,
    NOISES,
    PLANNERS,
    ROUTE,
    Job,
    Outcome,
    Truth,
    jobs,
    misjudged,
    optimum_s,
    simulated_job,
)
from bench.tuner import run as run_warmup
from sirtaki.autotune.arms.techniques import OUR_ARMS
from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.meta.bandit import default_arms
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.trial import Arm
from sirtaki.engine.tuning.cache import first_proposals, permitted_by, route_names
from sirtaki.registry import warm_start
from sirtaki.registry.entry import Entry, make_key
from sirtaki.registry.graph import ModelGraph, Node, layout_fingerprint, model_graph
from sirtaki.registry.safe_store import open_store
from sirtaki.registry.topology import Topology
from sirtaki.registry.warm_start import Neighbour, adapted_all, neighbours

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
ASKED = ("sibling", "size")  # those with a bar on iterations
SCENARIOS = (*ASKED, "link", "all")
ONE_HOST = "one host"
DTYPE, DEVICE = "float32", "cuda"
OTHER_JOBS_SEED = 10_000  # what others found, they found under other luck
MOST_TRIED = 15
CLEAR = 3.0  # standard errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A network on a cluster, by name."""

    network: str
    fabric: str
    ranks: int

    @classmethod
    def of(cls, job: Job) -> "Place":
        """The one that `simulated_job` made."""
        network, fabric, ranks = job.name.split(", ")
        return cls(network=network, fabric=fabric, ranks=int(ranks.removesuffix(" ranks")))

    def job(self) -> Job:
        """The simulated job."""
        return simulated_job(self.network, self.fabric, self.ranks)

    def model(self) -> ModelGraph:
        """A chain of layers with their parameters, as autograd shows a network, without branches."""
        return _layers(self.network)

    def topology(self) -> Topology:
        """A GPU a rank; hosts of one fabric are of one kind."""
        names = ["host" if self.fabric == ONE_HOST else f"host{rank}" for rank in range(self.ranks)]
        return Topology.from_ranks(names, devices=["GPU"] * self.ranks, host_kinds=dict.fromkeys(names, self.fabric))

    def others(self, scenario: str) -> list["Place"]:
        """The jobs that the registry knows."""
        known = {
            "sibling": [replace(self, network=SIBLINGS[self.network])] if self.network in SIBLINGS else [],
            "size": [replace(self, ranks=ranks) for ranks in RANKS if ranks != self.ranks],
            "link": [
                replace(self, fabric=fabric)
                for fabric in FABRICS
                if fabric != self.fabric and ONE_HOST not in (fabric, self.fabric)
            ],
        }
        return known[scenario] if scenario in known else [place for some in known.values() for place in some]


@cache
def _layers(network: str) -> ModelGraph:
    nodes = []
    for layer, parameters in groupby(NETWORKS[network](), key=lambda parameter: parameter.name.rpartition(".")[0]):
        sizes = [parameter.numel for parameter in parameters]
        nodes.append(Node(kind=_kind(layer), detail=",".join(map(str, sizes)), size=sum(sizes)))
    return model_graph(nodes, pairwise(range(len(nodes))))


def _kind(layer: str) -> str:
    last = layer.rpartition(".")[2]
    if "norm" in last or last in ("bn", "ln_1", "ln_2", "ln_f"):
        return "norm"
    return "convolution" if "conv" in last or last.endswith("wise") or layer.startswith("features") else "linear"


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Luck:
    """What a run's chance depends on.

    Attributes:
        planners: the job can be modelled.
    """

    noise: float
    seed: int
    planners: bool


def run(truth: Truth, luck: Luck, seeds: Sequence[Knobs]) -> Outcome:
    """One warm-up that begins with these settings."""
    return run_warmup(truth, _arm(truth.job, luck), noise=luck.noise, seed=luck.seed, seeds=seeds)


def _arm(job: Job, luck: Luck) -> Arm:
    """As `bench.tuner` builds the bandit, but planners plan when they are asked: most never are."""
    model = _measured(job, luck)
    return default_arms(
        space=job.space,
        rng=np.random.default_rng(luck.seed),
        budget_iterations=BUDGET_ITERATIONS,
        names=list(OUR_ARMS),
        planners=[kind(space=job.space, model=model) for kind in PLANNERS] if luck.planners else [],
    )


def _measured(job: Job, luck: Luck) -> PlanningModel:
    """What this job's planners know, as `bench.tuner` tells them."""
    return misjudged(job.model, noise=luck.noise, rng=np.random.default_rng([luck.seed, 1]))


@cache
def entry_of(place: Place, luck: Luck) -> Entry:
    """What a cold warm-up of another job leaves in the registry."""
    job = place.job()
    result = run(Truth(job, optimum_s=1.0), luck, seeds=()).result
    model, topology = place.model(), place.topology()
    return Entry(
        key=make_key(model, topology, dtype=DTYPE, device=DEVICE),
        model=model,
        topology=topology,
        knobs=result.knobs.to_json(),
        best_span_s=result.best_span_s,
        default_span_s=result.default_span_s,
        noise_s=result.noise_s,
        n_trials=result.n_trials,
        arm=result.arm,
        layout=layout_fingerprint(job.model.layout.sizes, job.model.layout.itemsize_bytes),
        link=_measured(job, luck).links[ROUTE],
    )


def proposals(place: Place, entries: Sequence[Entry], luck: Luck) -> list[Knobs]:
    """What a job tries first if these entries are in the registry: the same steps as in `sirtaki.torch`."""
    job, model, topology = place.job(), place.model(), place.topology()
    measured = _measured(job, luck)
    asked = warm_start.Job(
        key=make_key(model, topology, dtype=DTYPE, device=DEVICE),
        model=model,
        topology=topology,
        layout=layout_fingerprint(job.model.layout.sizes, job.model.layout.itemsize_bytes),
        links={route_names(ROUTE): measured.links[ROUTE]} if luck.planners else {},
        permitted=permitted_by(job.space),
        name=place.network,
    )
    starts = adapted_all(_look_up(asked, entries), asked)
    found = first_proposals(
        starts, layouts=[job.model.layout], space=job.space, model=measured if luck.planners else None
    )
    return [proposal.knobs for proposal in found]


def _look_up(asked: warm_start.Job, entries: Sequence[Entry]) -> list[Neighbour]:
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(str(Path(folder) / "registry.db"))
        store.save_all(entries)
        assert store.lookup(asked.key) is None, "a job must not find itself"
        found = neighbours(store, asked)
        store.close()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """All runs of one job, done by one process."""

    place: Place
    seeds: tuple[int, ...]
    without_planners: bool


def run_task(task: Task) -> list[dict[str, Any]]:
    """One JSON-ready row a scenario, with and without planners; none where the default is close to the optimum."""
    job = task.place.job()
    truth = Truth(job, optimum_s=optimum_s(job))
    if truth.is_close(job.default):
        return []
    rows = []
    for planners, noise in product((True, False) if task.without_planners else (True,), NOISES):
        lucks = [Luck(noise=noise, seed=seed, planners=planners) for seed in task.seeds]
        cold = [run(truth, luck, seeds=()) for luck in lucks]
        for scenario in SCENARIOS if planners else ASKED:
            others = task.place.others(scenario)
            if not others:
                continue
            warm = []
            for luck in lucks:
                elsewhere = replace(luck, seed=luck.seed + OTHER_JOBS_SEED)
                seeds = proposals(task.place, [entry_of(other, elsewhere) for other in others], luck)
                warm.append(run(truth, luck, seeds=seeds))
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


# ── judgement ────────────────────────────────────────────────────────────────────────────────────────────────────────


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Some rows of `run_task` taken together."""

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
    """By how many standard errors the mean lies above 0."""
    mean = statistics.fmean(samples)
    error = statistics.stdev(samples) / math.sqrt(len(samples))
    if error == 0:
        return 0.0 if mean == 0 else math.copysign(math.inf, mean)
    return mean / error


def bars(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """What issue 4 asks of the warm start."""
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
    flags.add_argument("--transfer", action="store_true", required=True, help="this benchmark")
    flags.add_argument("--workers", type=int, default=2, help="processes")
    flags.add_argument("--jobs", type=int, default=24)
    flags.add_argument(
        "--without-planners", action="store_true", help="also jobs that cannot be modelled; twice as long"
    )
    flags.add_argument("--seeds", type=int, default=8)
    args = flags.parse_args()
    n_jobs, n_seeds = (8, 3) if args.quick else (args.jobs, args.seeds)
    seeds = tuple(range(args.seed, args.seed + n_seeds))
    tasks = [Task(place=Place.of(job), seeds=seeds, without_planners=args.without_planners) for job in jobs(n_jobs)]
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
    report.notes.append(f"{counted} of {n_jobs} jobs (on the others the default is close) × {n_seeds} seeds a row")
    return finish(report, args)
