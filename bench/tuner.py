"""How fast each search technique, each planner and the bandit find good settings, on simulated jobs.

    python -m bench.tuner [--quick] [--check] [--save]

Each of 24 jobs is a network on a cluster, replayed by `autotune.model.simulator`; a measured span is the simulated
one times lognormal noise of 3 or 10 %. Every contender runs inside the real warm-up session with its budget of 100
training iterations, discarded iterations, guard and all, so an *iteration* here is one of the training job's.

- *iterations to 3 %*: training iterations until the setting that the session would keep, if it ended then, is truly
  within 3 % of the optimum for the first time; 0 where the default is; 100 in means where it never is.
- *regret*: true span of the setting kept at the end over the optimum, less one.
- *optimum*: exhaustive over the lattice of knobs, units in quarter octaves. Planners choose units one by one and can
  be better than that; their regret is then below zero.

Planners do not get the simulator's own numbers but a model of them that is off by the measurement noise in every
number: start-up time, each point of the concurrency curve, each gradient's time, the contention's slopes.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from bench.lib.harness import Bar, Report, finish, parser, processes
from bench.lib.workloads import FABRICS, RANKS, cluster, workload
from sirtaki.autotune.arms.planners import AscWfbp, AscWfbpN, Dpro, Libra, LibraM, MgWfbp, Planner
from sirtaki.autotune.arms.techniques import OUR_ARMS, make_arm
from sirtaki.autotune.knobs import KnobLattice, Knobs, KnobSpace
from sirtaki.autotune.meta.bandit import default_arms
from sirtaki.autotune.meta.session import REGISTRY_ARM, Assignment, SessionResult, WarmupSession
from sirtaki.autotune.model.fits import ContentionModel, RateCurve
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile, Simulator
from sirtaki.autotune.trial import Arm, Proposal, Trial
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.engine.tuning.plans import default_knobs
from sirtaki.measures import LARGEST_UNIT_BYTES, SMALLEST_UNIT_BYTES, LinkModel

# ── Simulated training jobs, each a network on a cluster, and how planners would misjudge them ───────────────────────

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


# ── The benchmark ────────────────────────────────────────────────────────────────────────────────────────────────────

BUDGET_ITERATIONS = 100
CLOSE = 0.03  # share of the optimum within which a setting counts as found
NOISES = (0.03, 0.10)
AS_PRINTED = "bandit as printed"
# The most general first: that is the order in which the bandit tries them.
PLANNERS: tuple[type[Planner], ...] = (AscWfbpN, Libra, Dpro, AscWfbp, LibraM, MgWfbp)


# ── contenders ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Listed:
    """Proposes what it was given, in that order."""

    def __init__(self, name: str, proposals: Sequence[Proposal]) -> None:
        self.name = name
        self._left = list(proposals)

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """The next `n`."""
        return self._left[:n]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Strikes what has been measured."""
        known = {trial.knobs for trial in trials}
        self._left = [proposal for proposal in self._left if proposal.knobs not in known]


def _random(job: Job, noise: float, seed: int) -> Arm:
    points = KnobLattice(job.space).points
    order = np.random.default_rng(seed).permutation(len(points)).tolist()
    return Listed("random", [Proposal(arm="random", knobs=points[i]) for i in order])


@cache
def _plans(kind: type[Planner], job: Job, noise: float, seed: int) -> tuple[Proposal, ...]:
    """What a planner proposes; kept, since planning takes longer than all the rest of a simulated warm-up."""
    model = misjudged(job.model, noise=noise, rng=np.random.default_rng([seed, 1]))
    return tuple(kind(space=job.space, model=model).ask(8))


def _planner(job: Job, noise: float, seed: int, *, kind: type[Planner]) -> Arm:
    return Listed(kind.name, _plans(kind, job, noise, seed))


def _technique(job: Job, noise: float, seed: int, *, name: str) -> Arm:
    return make_arm(name, space=job.space, rng=np.random.default_rng(seed))


MakeContender = Callable[[Job, float, int], Arm]


def contenders() -> dict[str, MakeContender]:
    """Each builds its arm for a job, a noise and a seed."""
    return {
        "bandit": _bandit,
        AS_PRINTED: partial(_bandit, as_given=False),
        "random": _random,
        **{name: partial(_technique, name=name) for name in OUR_ARMS},
        **{kind.name: partial(_planner, kind=kind) for kind in PLANNERS},
    }


def _bandit(job: Job, noise: float, seed: int, *, as_given: bool = True) -> Arm:
    return default_arms(
        space=job.space,
        rng=np.random.default_rng(seed),
        budget_iterations=BUDGET_ITERATIONS,
        names=list(OUR_ARMS),
        planners=[_planner(job, noise, seed, kind=kind) for kind in PLANNERS],
        as_given=as_given,
    )


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run of a contender.

    Attributes:
        found_at: iterations until within 3 %, infinite if never.
        regret: of the setting kept.
        over_default: true span of the setting kept over the default's.
        tried: iterations spent on the registry's proposals.
        result: the session's.
    """

    found_at: float
    regret: float
    over_default: float
    tried: int
    result: SessionResult

    @property
    def iterations(self) -> int:
        """Used in all."""
        return self.result.iterations_used

    @property
    def counted(self) -> float:
        """`found_at`, at most the budget."""
        return min(self.found_at, BUDGET_ITERATIONS)


class Truth:
    """A job's optimum, and the true spans of its settings, each simulated once."""

    def __init__(self, job: Job, *, optimum_s: float) -> None:
        self.job = job
        self.optimum_s = optimum_s
        self._simulator = job.simulator
        self._spans_s: dict[Knobs, float] = {}

    def span_s(self, knobs: Knobs) -> float:
        """Without noise."""
        if knobs not in self._spans_s:
            self._spans_s[knobs] = self._simulator.run_knobs(knobs).span_s
        return self._spans_s[knobs]

    def is_close(self, knobs: Knobs) -> bool:
        """Whether a setting is within 3 % of the optimum."""
        return self.span_s(knobs) <= (1 + CLOSE) * self.optimum_s


def run(truth: Truth, arm: Arm, *, noise: float, seed: int, seeds: Sequence[Knobs] = ()) -> Outcome:
    """One warm-up, which begins with the settings `seeds`."""
    job = truth.job
    rng = np.random.default_rng([seed, 2])
    session = WarmupSession(
        space=job.space, default=job.default, arm=arm, rng=rng, budget_iterations=BUDGET_ITERATIONS, seeds=seeds
    )
    found_at = 0.0 if truth.is_close(job.default) else math.inf
    tried = 0
    for done in play(truth, session, noise=noise, rng=rng):
        if done.arm == REGISTRY_ARM and done.purpose.value == "trial":
            tried += done.discarded_iterations + done.measured_iterations
        if truth.is_close(session.result.knobs):
            found_at = min(found_at, session.result.iterations_used)
    kept_s = truth.span_s(session.result.knobs)
    return Outcome(
        found_at=found_at,
        regret=kept_s / truth.optimum_s - 1,
        over_default=kept_s / truth.span_s(job.default),
        tried=tried,
        result=session.result,
    )


def play(truth: Truth, session: WarmupSession, *, noise: float, rng: np.random.Generator) -> Iterator[Assignment]:
    """Runs a warm-up to its end; each assignment, once its spans are recorded."""
    while not session.done:
        now = session.assignment
        luck = np.exp(noise * rng.standard_normal(now.measured_iterations))
        session.record([truth.span_s(now.knobs) * factor for factor in luck.tolist()])
        yield now


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """All runs of one job, done by one process."""

    job: Job
    contenders: tuple[str, ...]
    seeds: tuple[int, ...]


def run_task(task: Task) -> list[dict[str, Any]]:
    """One JSON-ready row a contender and noise: the runs' outcomes."""
    best_s = optimum_s(task.job)
    truth = Truth(task.job, optimum_s=best_s)
    rows = []
    for name in task.contenders:
        make = contenders()[name]
        for noise in NOISES:
            outcomes = [run(truth, make(task.job, noise, seed), noise=noise, seed=seed) for seed in task.seeds]
            rows.append(
                {
                    "job": task.job.name,
                    "contender": name,
                    "noise": noise,
                    "default_over_optimum": truth.span_s(task.job.default) / best_s,
                    "iterations_to_3_percent": [
                        None if math.isinf(outcome.found_at) else outcome.found_at for outcome in outcomes
                    ],
                    "regret": [outcome.regret for outcome in outcomes],
                    "over_default": [outcome.over_default for outcome in outcomes],
                    "iterations": [outcome.iterations for outcome in outcomes],
                }
            )
    return rows


# ── judgement ────────────────────────────────────────────────────────────────────────────────────────────────────────


def summary(runs: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """One contender over all jobs, noises and seeds; means are means over jobs."""
    mine = [row for row in runs if row["contender"] == name]
    found = [math.inf if at is None else at for row in mine for at in row["iterations_to_3_percent"]]
    regrets = [regret for row in mine for regret in row["regret"]]
    return {
        "contender": name,
        "median_iterations_to_3_percent": statistics.median(found),
        "mean_iterations_to_3_percent": statistics.fmean(min(at, BUDGET_ITERATIONS) for at in found),
        "within_3_percent_at_the_end": statistics.fmean(regret <= CLOSE for regret in regrets),
        "mean_regret": statistics.fmean(regrets),
        "worst_regret": max(regrets),
        "worst_loss_to_default_in_noises": max(
            (over - 1) / row["noise"] for row in mine for over in row["over_default"]
        ),
        "mean_iterations_used": statistics.fmean(used for row in mine for used in row["iterations"]),
    }


def bars(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """What issue 3 asks of the bandit."""
    bandit, *others = rows
    ours = [row for row in others if row["contender"] not in (AS_PRINTED, "random")]
    return [
        Bar(claim="bandit: median iterations to 3 %", value=bandit["median_iterations_to_3_percent"], limit=20),
        Bar(claim="bandit: share of runs not within 3 %", value=1 - bandit["within_3_percent_at_the_end"], limit=0.05),
        Bar(
            claim="bandit: worst loss to the default, in noises",
            value=bandit["worst_loss_to_default_in_noises"],
            limit=1,
        ),
        *(
            Bar(claim=f"bandit: {key.replace('_', ' ')}, less the best single arm's", value=bandit[key] - best, limit=0)
            for key in ("mean_iterations_to_3_percent", "mean_regret")
            for best in [min(row[key] for row in ours)]
        ),
    ]


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--workers", type=int, default=2, help="processes")
    flags.add_argument("--jobs", type=int, default=24)
    flags.add_argument("--seeds", type=int, default=20)
    flags.add_argument("--only", nargs="*", metavar="CONTENDER", help="these besides the bandit")
    args = flags.parse_args()
    n_jobs, n_seeds = (6, 4) if args.quick else (args.jobs, args.seeds)
    names = tuple(name for name in contenders() if args.only is None or name == "bandit" or name in args.only)
    tasks = [
        Task(job=job, contenders=names, seeds=tuple(range(args.seed, args.seed + n_seeds))) for job in jobs(n_jobs)
    ]
    with processes(args.workers) as pool:
        runs = [row for rows in pool.map(run_task, tasks) for row in rows]
    rows = [summary(runs, name) for name in names]
    default_is_best = sum(
        row["default_over_optimum"] <= 1 + CLOSE
        for row in runs
        if row["contender"] == "bandit" and row["noise"] == NOISES[0]
    )
    report = Report(name="tuner", rows=rows, bars=bars(rows) if len(rows) > 1 else [], settings={"runs": runs})
    report.notes.append(
        f"{n_jobs} jobs × {len(NOISES)} noises × {n_seeds} seeds; the default is within 3 % of the optimum on "
        f"{default_is_best} jobs"
    )
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
