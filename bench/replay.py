"""Accuracy of replays of a recorded job: the recorded step, and changes of its plan, or without a straggler.

    python -m bench.replay [--quick] [--check] [--save] [--models transformer …] [--ranks 2 4] [--cases gloo …]

Takes 20 s per job. In a job, iterations without and with a recording alternate. The replayer gets the recordings. The
iterations that were not recorded are the truth: means over ranks and turns. On a busy machine the two differ. Column
"recording" shows this difference, and column "ratio" the error of a what-if's ratio to the unchanged job.

"gloo", "mpi" and "shared_memory" are on one host. "straggler" is shared memory with a late last rank. "capped" (link
400 Mbit/s, at most 100 per flow) and "equal" (both 200) are emulated nodes (`bench.lib.cluster`), tuned, so that links
are probed. What-if predictions are compared with measurements: of a second optimizer with another plan in the same
processes, or of the same job without its straggler. Errors of Daydream's rule (bytes ÷ bandwidth) are shown for
comparison. `bench.plan` measures predictions of other networks and numbers of ranks.

Bars: error of an iteration 5 % on average, 10 % at worst; error of a what-if 8 %.

    python -m bench.replay --errors [--save]

starts no job. It predicts settings of the kept sweeps (`bench/recorded`) by the replayer's simulator, and fits the
errors in `sirtaki.analysis.what_if.ModelError` by quantile regression. Each question predicts one setting from the
measured steps of another one. An error is |log(true / predicted)|. One part of it comes from the measured steps: their
scatter, and how much they are shorter than predicted. The rest is at most
a + b |log change of the step| + c |log change of the number of units| in nine of ten questions of each job, with a, b
and c fitted to the remaining jobs. Refused questions are shown separately. They are refused by `refusal`, or because
the interval would be wider than `MAX_INTERVAL_RATIO`. `what_if` contains the errors that are fitted to all jobs.
"unseen" jobs are evaluated with these. They were recorded after the fit was final.
Bars: error of a prediction 8 % on average, 15 % at worst; nine of ten are within the interval.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import hstack, identity

from bench.lib.cluster import NETWORKS, LabShape, why_unavailable
from bench.lib.contenders import Sirtaki
from bench.lib.harness import Report, finish, parser
from bench.lib.models import emulated_resnet50, mlp, small_conv, transformer
from bench.lib.ranks import run_ranks, start
from sirtaki.analysis import what_if
from sirtaki.analysis.global_graph import MeanStepTimes, play, recorded, replayed
from sirtaki.analysis.job_model import JobModel, histories, job_model
from sirtaki.analysis.recording import read_folder as read
from sirtaki.analysis.what_if import (
    CONFIDENCE,
    MAX_INTERVAL_RATIO,
    Answer,
    Baseline,
    ModelError,
    daydream,
    half_width,
    knobs_of,
    plan_refusal,
    refusal,
    with_knobs,
    without_stragglers,
)
from sirtaki.autotune.knobs import KIB, Knobs
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.replayer import SharedHost
from sirtaki.comm.plan import TransportKind

RECORDED = Path(__file__).parent / "recorded"
MODELS = ("resnet50", "transformer", "conv", "mlp")
ON_ONE_HOST = ("shared_memory", "gloo", "mpi", "straggler")
COMPUTE_S = 0.06
SCALE = 0.1
"""Scale of the emulated model's gradients, which makes them as small as the real models' gradients."""

LATE_S = 0.04
"""Seconds that a straggler sleeps before each forward pass."""

UNIT_BYTES, STREAMS = 512 * KIB, 2
OTHER_UNIT_BYTES, OTHER_STREAMS = 2048 * KIB, 1
JOB_TIMEOUT_S = 300.0
AS_IT_IS = "as it is"
TIMES = ("iteration", "forward", "backward")

Change = Callable[[JobModel], JobModel]


# ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Timed(Sirtaki):
    """A contender that times the forward and the backward pass of its steps.

    Attributes:
        late_s: seconds that this rank sleeps before each forward pass.
    """

    def __init__(self, make_model: Any, *, tune: bool, changes: Mapping[str, Any], late_s: float) -> None:
        """Create the contender with changed settings. Collective."""
        from sirtaki.engine import job

        current = job.current()
        settings = current.settings
        current.settings = replace(settings, **changes)
        try:
            super().__init__(make_model, tune=tune)
        finally:
            current.settings = settings
        self.late_s = late_s

    def timed_step(self) -> tuple[float, float, float]:
        """Run one step. Return seconds of the step, of its forward pass and of its backward pass. Collective."""
        begin_s = time.perf_counter()
        if self.late_s:
            time.sleep(self.late_s)
        loss = self.forward(self.batch).sum()
        forward_s = time.perf_counter()
        loss.backward()
        backward_s = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin_s, forward_s - begin_s, backward_s - forward_s

    def step(self) -> None:
        """Run one training step. Collective."""
        self.timed_step()
        self.steps += 1


def make_model(name: str, rank: int) -> Any:
    """Return a function that creates the model of that name."""
    if name == "resnet50":
        return lambda: emulated_resnet50(rank=rank, compute_s=COMPUTE_S, scale=SCALE)
    return {
        "transformer": lambda: transformer(rank=rank),
        "conv": lambda: small_conv(rank=rank),
        "mlp": lambda: mlp((512, 1024, 1024, 1024, 1024, 10), rank=rank, batch=64),
    }[name]


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run one rank: alternate unrecorded and recorded iterations, and return the measured times. Collective."""
    straggles = options["straggler"] and comm.rank == comm.size - 1
    maker = make_model(options["model"], comm.rank)
    tuned = options["transport"] is None
    fixed = {} if tuned else {"transport": TransportKind(options["transport"])}
    base_plan = {} if tuned else {"unit_bytes": UNIT_BYTES, "streams": STREAMS, **fixed}
    other_plan = {"unit_bytes": OTHER_UNIT_BYTES, "streams": OTHER_STREAMS, **fixed}
    base = Timed(maker, tune=tuned, changes=base_plan, late_s=0.0)
    contenders = {"base": base}
    for _ in range(4):
        base.step()
    base.warm_up()
    if straggles:
        base.late_s = LATE_S
    if not tuned:
        contenders["plan"] = Timed(maker, tune=False, changes=other_plan, late_s=base.late_s)
        for _ in range(4):
            contenders["plan"].step()
    truth: dict[str, list[list[float]]] = {name: [] for name in contenders}

    for turn in range(options["turns"]):
        for name, contender in contenders.items():
            comm.Barrier()
            contender.step()
            for _ in range(options["steps"]):
                truth[name].append(list(contender.timed_step()))
        comm.Barrier()
        folder = f"{options['folder']}/{turn}"
        base.record(folder, iterations=options["recorded"], operators=options["operators"])
    of_ranks = comm.allgather({name: _means(samples) for name, samples in truth.items()})
    return {"truth": {name: _means([mine[name] for mine in of_ranks]) for name in contenders}}


def _means(samples: list[list[float]]) -> list[float]:
    return [statistics.fmean(column) for column in zip(*samples, strict=True)]


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class FinishedJob:
    """A finished job: measured times and recordings."""

    def __init__(self, result: Mapping[str, Any], folder: Path) -> None:
        self.truth: dict[str, list[float]] = result["truth"]
        recordings = [read(one) for one in sorted(folder.iterdir())]
        self.histories = [histories(one) for one in recordings]
        self.models = [job_model(one) for one in self.histories]
        self.recorded_s = statistics.fmean(recorded(one).iteration_s for one in self.histories)

    @property
    def knobs(self) -> Knobs:
        """Return the knobs with which the job ran."""
        return self.models[0].buffers[0].knobs

    def replayed(self, change: Change = lambda job: job) -> list[float]:
        """Return predicted seconds of iteration, forward and backward pass of the changed job, over all recordings."""
        return _means([_times(replayed(play(change(one)))) for one in self.models])

    def answers(self, change: Change) -> list[Answer]:
        """Return predictions with intervals for the changed job, one per recording."""
        bases = [Baseline.of(model, recorded(one)) for one, model in zip(self.histories, self.models, strict=True)]
        return [base.answer("", change(base.job), replanned=change is with_other_units) for base in bases]

    def by_daydream(self) -> list[float]:
        """Return seconds of iteration, forward and backward pass by Daydream's rule."""
        return _means([_times(daydream(one, model)) for one, model in zip(self.histories, self.models, strict=True)])


def _times(found: MeanStepTimes) -> list[float]:
    return [found.iteration_s, found.forward_s, found.backward_s]


def run(case: str, model: str, ranks: int, args: Any) -> FinishedJob:
    """Run one job and read its recordings."""
    with tempfile.TemporaryDirectory() as directory:
        options = {
            "model": model,
            "folder": directory,
            "turns": args.turns,
            "steps": args.steps,
            "recorded": args.recorded,
            "operators": not args.units_only,
            "straggler": case == "straggler",
            "transport": {"straggler": "shared_memory"}.get(case, case) if case in ON_ONE_HOST else None,
        }
        where: int | LabShape = ranks if case in ON_ONE_HOST else replace(NETWORKS[case], nodes=ranks)
        env = None if case in ON_ONE_HOST else {"SIRTAKI_WARMUP_ITERATIONS": "30"}
        return FinishedJob(run_ranks("bench.replay", where, options, env=env, timeout_s=JOB_TIMEOUT_S), Path(directory))


def measure(report: Report, case: str, model: str, args: Any) -> None:
    """Run all jobs of one case and model, and add rows: the jobs' own steps, and what-ifs between them."""
    jobs = {ranks: run(case, model, ranks, args) for ranks in args.ranks}
    for ranks, job in jobs.items():
        row = {"case": case, "model": model, "ranks": ranks}
        true = job.truth["base"]
        report.rows.append(
            {
                **row,
                "what": AS_IT_IS,
                "measured_s": true[0],
                **_errors(job.replayed(), true),
                "ratio, %": None,
                "Daydream, %": percent(job.by_daydream()[0], true[0]),
                "recording, %": percent(job.recorded_s, true[0]),
            }
        )
        if "plan" in job.truth:
            _what_if(report, row, "another plan", job, with_other_units, job.truth["plan"])
        if case == "straggler":
            even = run("shared_memory", model, ranks, args)
            _what_if(report, row, "no straggler", job, without_stragglers, even.truth["base"])


def with_other_units(job: JobModel) -> JobModel:
    """Return the job with the plan of its second optimizer, whose steps the job measures, too."""
    return with_knobs(job, knobs_of(job, unit_bytes=OTHER_UNIT_BYTES, streams=OTHER_STREAMS))


def _what_if(
    report: Report, row: Mapping[str, Any], what: str, job: FinishedJob, change: Change, true: Sequence[float]
) -> None:
    predicted, answers = job.replayed(change), job.answers(change)
    low_s, high_s = (statistics.fmean(getattr(one, name) for one in answers) for name in ("low_s", "high_s"))
    asked = change(job.models[0]).plans
    refused = change is with_other_units and plan_refusal(job.models[0], asked) is not None
    report.rows.append(
        {
            **row,
            "what": what,
            "measured_s": true[0],
            **_errors(predicted, true),
            "ratio, %": percent(predicted[0] / job.replayed()[0], true[0] / job.truth["base"][0]),
            "Daydream, %": None,
            "recording, %": None,
            "interval, ms": f"{1e3 * low_s:.3g} to {1e3 * high_s:.3g}",
            "inside": "refused" if refused else low_s <= true[0] <= high_s,
        }
    )


def _errors(predicted: Sequence[float], true: Sequence[float]) -> dict[str, float]:
    return {f"{name}, %": percent(mine, right) for name, mine, right in zip(TIMES, predicted, true, strict=True)}


def percent(predicted: float, right: float) -> float:
    """Return the relative error in per cent."""
    return round(100 * (predicted / right - 1), 1)


# ── errors of kept sweeps ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Miss:
    """One question: a setting's step, predicted from a base setting's steps. Figures are logarithms of ratios.

    Attributes:
        kind: kind of job, as in `SHIPPED`.
        job: name of the job and of the transport.
        unseen: whether the job is not in the fit.
        predicted, true: predicted and measured time, relative to the base setting.
        units: number of units, relative to the base setting; absolute value.
        open: uncertainty that comes from the base setting's measured steps.
        refusal: reason for which `what_if` refuses to predict; None = it predicts.
    """

    kind: str
    job: str
    unseen: bool
    predicted: float
    true: float
    units: float
    open: float
    refusal: str | None

    @property
    def error(self) -> float:
        """Return the error of the prediction."""
        return abs(self.true - self.predicted)

    @property
    def beyond(self) -> float:
        """Return the error beyond the uncertainty of the steps, which a `ModelError` must cover."""
        return math.sqrt(max(0.0, self.error**2 - self.open**2))

    def allowance(self, error: ModelError) -> float:
        """Return the largest error that a `ModelError` expects for this question."""
        return error.any_question + error.step * abs(self.predicted) + error.units * self.units

    def width(self, error: ModelError) -> float:
        """Return half the width of the prediction interval."""
        return math.hypot(self.open, self.allowance(error))


SHIPPED = {"between hosts": what_if.BETWEEN_HOSTS, "on one host": what_if.ON_ONE_HOST}
"""Errors that `what_if` uses, by kind of job."""

HALF_MAX_INTERVAL = math.log(MAX_INTERVAL_RATIO) / 2
LEAST_ERROR = 0.01
"""Minimum error of every question, because two sweeps of the same setting differ by as much."""


def misses() -> Iterator[Miss]:
    """Yield the questions of all kept sweeps. A base is a setting with the default number of streams and without cuts.

    A setting and its base have the same, probed route. The simulator predicts a step up to the end of its backward
    pass and communication. The rest of the step is taken from the base's measured step.
    """
    for path in sorted(RECORDED.rglob("*.json")):
        data = json.loads(path.read_text())
        model, default = PlanningModel.from_json(data["model"]), Knobs.from_json(data["default"])
        across = "cluster" in path.stem
        ranks = {"two": 2, "four": 4}.get(path.name.split("-")[0], 0)
        if not across and model.host is None:  # Older sweeps did not record it.
            model = replace(model, host=SharedHost(ranks=ranks, processors=float(data["machine"]["cores"])))
        steps_s: dict[Knobs, list[float]] = {}
        for row in data["rows"]:
            steps_s.setdefault(Knobs.from_json(row["knobs"]), []).extend(row["steps_s"])
        known = {knobs: statistics.median(each) for knobs, each in steps_s.items() if knobs.route in model.links}
        predicted_s = {knobs: model.simulator(knobs.route).run_knobs(knobs).iteration_s for knobs in known}
        plans = {knobs: knobs.to_plan(model.layout) for knobs in known}
        crowded = model.host is not None and model.host.processors < model.host.ranks * model.host.threads
        for route in model.links:
            mine = [knobs for knobs in known if knobs.route == route]
            for base in (knobs for knobs in mine if knobs.streams == default.streams and not knobs.cuts):
                rest_s = max(0.0, known[base] - predicted_s[base])
                deviation = statistics.stdev(steps_s[base]) / statistics.fmean(steps_s[base])
                shorter = max(0.0, math.log(predicted_s[base] / known[base]))
                for knobs in mine:
                    if knobs != base:
                        yield Miss(
                            kind="between hosts" if across else "on one host",
                            job=f"{path.stem.removeprefix('asked-')} {route[0].value}",
                            unseen="unseen" in path.stem,
                            predicted=math.log((predicted_s[knobs] + rest_s) / (predicted_s[base] + rest_s)),
                            true=math.log(known[knobs] / known[base]),
                            units=abs(math.log(len(plans[knobs].units) / len(plans[base].units))),
                            open=math.hypot(half_width(deviation, len(steps_s[base])), shorter),
                            refusal=refusal(
                                [plans[base]],
                                [plans[knobs]],
                                layouts=[model.layout],
                                links=model.links,
                                across=across,
                                crowded=crowded,
                            ),
                        )


def answerable(some: Sequence[Miss]) -> list[Miss]:
    """Return the questions that are not refused and whose measured steps do not already make the interval too wide."""
    return [one for one in some if one.refusal is None and one.open < HALF_MAX_INTERVAL]


def fitted(some: Sequence[Miss]) -> ModelError:
    """Fit errors that cover nine of ten questions, by quantile regression. Jobs have equal weights."""
    count, share = len(some), _shares(some)
    rows = hstack([np.array([[1.0, abs(one.predicted), one.units] for one in some]), identity(count), -identity(count)])
    cost = np.concatenate([np.zeros(3), CONFIDENCE * share, (1 - CONFIDENCE) * share])
    bounds = [(LEAST_ERROR, None), *[(0, None)] * (2 + 2 * count)]
    found = linprog(cost, A_eq=rows, b_eq=[one.beyond for one in some], bounds=bounds).x
    return ModelError(any_question=found[0], step=found[1], units=found[2])


def widened(some: Sequence[Miss]) -> ModelError:
    """Fit errors, and widen them until nine of ten questions of each job are inside a fit without this job.

    The factor is that of the worst job, because there are too few jobs to ignore one in ten of them.
    """
    jobs, error = sorted({one.job for one in some}), fitted(some)
    if len(jobs) == 1:
        return error
    factor = 1.0
    for job in jobs:
        others = fitted([one for one in some if one.job != job])
        ratios = [one.beyond / one.allowance(others) for one in some if one.job == job]
        factor = max(factor, float(np.quantile(ratios, CONFIDENCE)))
    return ModelError(any_question=error.any_question * factor, step=error.step * factor, units=error.units * factor)


def _shares(some: Sequence[Miss]) -> np.ndarray:
    weights = Counter(one.job for one in some)
    return np.array([1 / weights[one.job] / len(weights) for one in some])


def fit_errors(args: Any) -> int:
    """Fit the errors, and add a row for each job: errors of its predictions and of its refused questions."""
    report, by_kind, unseen = Report(name="replay_errors"), dict[str, list[Miss]](), list[Miss]()
    for one in misses():
        if one.unseen:
            unseen.append(one)
        else:
            by_kind.setdefault(one.kind, []).append(one)
    for kind, some in by_kind.items():
        asked, predicted = answerable(some), list[Judged]()
        for job in sorted({one.job for one in some}):
            others = [one for one in asked if one.job != job]
            predicted.append(_add_job(report, [one for one in some if one.job == job], widened(others)))
        _bars(report, kind, predicted)
        error = widened(asked)
        shipped = [one for one in asked if one.width(error) <= HALF_MAX_INTERVAL]
        off = _off(shipped, "off")
        report.notes.append(
            f"{kind}, fitted to all: {error.any_question:.3f} + {error.step:.3f} × step + {error.units:.3f} × units; "
            f"{len(shipped)} predicted, {len(some) - len(shipped)} refused; off by {off['off, %']} % on average, "
            f"{off['off at worst, %']} % at worst; {100 * _inside(shipped, error):.0f} % inside"
        )
    jobs = {one.job: one.kind for one in unseen}
    predicted = [
        _add_job(report, [one for one in unseen if one.job == job], SHIPPED[kind]) for job, kind in sorted(jobs.items())
    ]
    _bars(report, "of an unseen job", predicted)
    return finish(report, args)


Judged = tuple[list[Miss], ModelError]


def _add_job(report: Report, of_job: Sequence[Miss], error: ModelError) -> Judged:
    """Add a row for one job. Return its predicted questions, and the error."""
    known = [one for one in answerable(of_job) if one.width(error) <= HALF_MAX_INTERVAL]
    refused = [one for one in of_job if one not in known]
    report.rows.append(
        {
            "kind": of_job[0].kind,
            "job": of_job[0].job,
            "questions": len(known),
            "inside": round(_inside(known, error), 2) if known else "",
            **_off(known, "off"),
            "refused": len(refused),
            **_off(refused, "would be off"),
        }
    )
    return known, error


def _inside(some: Sequence[Miss], error: ModelError) -> float:
    return statistics.fmean([one.error <= one.width(error) for one in some])


def _bars(report: Report, kind: str, predicted: Sequence[Judged]) -> None:
    errors = [one.error for known, _ in predicted for one in known]
    outside = [one.error > one.width(error) for known, error in predicted for one in known]
    if not errors:
        report.notes.append(f"no predictions {kind}")
        return
    mean, worst = (math.expm1(of(errors)) for of in (statistics.fmean, max))
    report.bar(f"error of a what-if {kind} that is told, mean", 100 * mean, 8.0, "% ")
    report.bar(f"error of a what-if {kind} that is told, worst", 100 * worst, 15.0, "% ")
    report.bar(f"what-ifs {kind} outside the interval that is told", 100 * statistics.fmean(outside), 10.0, "% ")


def _off(some: Sequence[Miss], words: str) -> dict[str, float | str]:
    """Return the mean and the largest error in per cent, by column names that begin with `words`."""
    errors = [one.error for one in some]
    mean, worst = (percent(math.exp(of(errors)), 1.0) if errors else "" for of in (statistics.fmean, max))
    return {f"{words}, %": mean, f"{words} at worst, %": worst}


def main() -> int:
    """Run every case."""
    flags = parser(__doc__)
    flags.add_argument("--models", nargs="+", choices=MODELS, help="default: all, one with --quick")
    flags.add_argument("--cases", nargs="+", choices=[*ON_ONE_HOST, *NETWORKS], help="default: all, gloo with --quick")
    flags.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    flags.add_argument(
        "--turns", type=int, default=5, help="number of turns of steps without and with a recording (%(default)s)"
    )
    flags.add_argument("--steps", type=int, default=8, help="timed steps of a contender per turn (%(default)s)")
    flags.add_argument("--recorded", type=int, default=5, help="iterations per recording (%(default)s)")
    flags.add_argument("--units-only", action="store_true", help="record no operators")
    flags.add_argument("--errors", action="store_true", help="start no job: fit errors to the kept sweeps")
    args = flags.parse_args()
    if args.errors:
        return fit_errors(args)
    args.models = args.models or (["transformer"] if args.quick else list(MODELS))
    args.cases = args.cases or (["gloo"] if args.quick else [*ON_ONE_HOST, *NETWORKS])
    whole = {*args.cases} == {*ON_ONE_HOST, *NETWORKS} and {*args.models} == {*MODELS}
    report = Report(name="replay" if whole else "_".join(["replay", *args.cases]))
    for case in args.cases:
        if case in NETWORKS and (reason := why_unavailable()) is not None:
            report.notes.append(f"{case}: no emulated cluster here, {reason}")
            continue
        for model in ["resnet50"] if case in NETWORKS else args.models:
            try:
                measure(report, case, model, args)
            except RuntimeError as err:  # The job failed or took too long. Go on with the next one.
                report.notes.append(f"{case}, {model}: {str(err).splitlines()[0][:200]}")
    own = [abs(row["iteration, %"]) for row in report.rows if row["what"] == AS_IT_IS]
    others = [row for row in report.rows if row["what"] != AS_IT_IS and row["inside"] != "refused"]
    report.bar("error of an iteration, mean", statistics.fmean(own or [math.nan]), 5.0, "% ")
    report.bar("error of an iteration, worst", max(own, default=math.nan), 10.0, "% ")
    if others:
        worst, of_ratio = (max(abs(row[column]) for row in others) for column in ("iteration, %", "ratio, %"))
        report.bar("error of a what-if, worst", worst, 8.0, "% ")
        report.bar("error of its ratio to the job as it is, worst", of_ratio, 8.0, "% ")
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank))
