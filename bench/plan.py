"""Accuracy of `sirtaki plan`: jobs are recorded at one place, predicted for other places, and measured there.

    python -m bench.plan [--unseen] [--check] [--save] [--folder DIR]

Takes 15 minutes with --unseen, 22 without, as root. Other programs on the two cores disturb it.

A place is a number of emulated nodes (`bench.lib.cluster`) with one rank each, or two ranks of this host. A job is
tuned for `STEPS` steps and writes its trial log. `sirtaki plan` predicts other places from it. It gets their rates and
latency, or only their number of ranks if the network is the recorded one. Then the same script runs there, with the
untuned setting, the setting that the recorded job kept, and the best plan of a planner. Models that compute run on two
ranks only, because four nodes of one machine share its cores.

The jobs of --unseen were chosen before any measurement, and used for no fit. Their bars: at most 30 % of predictions
are refused, the median half width of an interval is ≤ 15 %, the truth is outside of at most 10 % of the intervals, and
the worst error is ≤ 15 %. Measurements that DIR has are not repeated.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.lib.cluster import MBIT, LabShape, NetLab, need_cluster
from bench.lib.harness import Report, Spread, finish, parser
from bench.lib.models import emulated, lstm, mlp, small_conv, small_resnet, token_transformer, transformer
from bench.lib.ranks import in_turns, run_ranks, start
from bench.lib.workloads import workload
from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.scaling import DEFAULT, KEPT
from sirtaki.cli.__main__ import main as command_line
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.engine.tuning.trial_log import read_log

STEPS = 20
HOST_RANKS = 2
GLOO: Any = {"transport": TransportKind.GLOO, "algorithm": Algorithm.FLAT}
SCATTER, MOST_TRIES = 0.05, 3
"""A step is measured again if the distance of its quartiles exceeds this ratio of the median, up to this number of
times.
"""

EMULATED = {
    "resnet50": ("resnet50", 0.08, 0.12),
    "vgg": ("vgg16", 0.015, 0.1),  # One tensor has three quarters of the elements.
    "densenet": ("densenet201", 0.1, 0.2),  # The network has 604 tensors.
    "bert": ("bert_base", 0.02, 0.15),
    "gpt2": ("gpt2", 0.015, 0.08),
    "inception": ("inception_v4", 0.05, 0.15),
    "xception": ("xception", 0.02, 0.06),  # 1.8 MB
    "resnet152": ("resnet152", 0.03, 0.1),
    "resnet101": ("resnet101", 0.04, 0.15),
    "vgg19": ("vgg19", 0.012, 0.12),
    "densenet169": ("densenet169", 0.12, 0.15),
    "bert_large": ("bert_large", 0.006, 0.2),
    "gpt2_medium": ("gpt2_medium", 0.005, 0.1),
    "xception, longer": ("xception", 0.06, 0.1),
}
"""Networks whose computation sleeps: workload, scale of its gradients, and seconds of computation."""

REAL: Mapping[str, Any] = {
    "conv": small_conv,
    "residual": small_resnet,
    "texts": token_transformer,
    "wide": partial(mlp, (512, 2048, 512), batch=64),
    "deep": partial(mlp, (512,) * 9, batch=32),
    "transformer": transformer,
    "lstm": lstm,
}


def nodes(count: int, link: int, flow: int, delay_ms: float = 0.0) -> LabShape:
    """Return a place: `count` emulated nodes, with rates in Mbit/s."""
    return LabShape(nodes=count, link_bits_per_s=link * MBIT, flow_bits_per_s=flow * MBIT, delay_s=delay_ms * 1e-3)


@dataclass(frozen=True, slots=True)
class RecordedHere:
    """A job that is recorded at one place (None = two ranks of this host), and predicted for others."""

    name: str
    model: str
    at: LabShape | None
    to: tuple[LabShape, ...]


LOOKING = (
    RecordedHere("a1", "resnet50", nodes(2, 200, 100), (nodes(2, 200, 100, 2), nodes(4, 200, 100), nodes(4, 300, 75))),
    RecordedHere("a2", "vgg", nodes(4, 300, 100), (nodes(4, 150, 50), nodes(2, 200, 200), nodes(2, 300, 100))),
    RecordedHere("a3", "conv", nodes(2, 300, 150), (nodes(2, 100, 50), nodes(2, 200, 200))),
    RecordedHere("a4", "densenet", None, (nodes(2, 300, 100), nodes(4, 200, 200))),
    RecordedHere("a5", "bert", nodes(2, 200, 100, 2), (nodes(2, 200, 100), nodes(2, 300, 100, 2))),
    RecordedHere("b1", "gpt2", nodes(2, 300, 100), (nodes(2, 150, 75), nodes(4, 300, 100), nodes(2, 300, 100, 2))),
    RecordedHere("b2", "inception", nodes(2, 250, 250), (nodes(4, 250, 250), nodes(2, 120, 120), nodes(3, 200, 100))),
    RecordedHere("b3", "xception", nodes(4, 200, 100), (nodes(2, 100, 50), nodes(4, 100, 100), nodes(3, 200, 100))),
    RecordedHere("b4", "bert", nodes(3, 250, 125), (nodes(4, 250, 125), nodes(2, 300, 75), nodes(3, 150, 150))),
    RecordedHere("b5", "densenet", nodes(2, 200, 50), (nodes(3, 300, 100), nodes(2, 300, 150), nodes(4, 200, 50))),
    RecordedHere("b6", "vgg", nodes(2, 150, 150), (nodes(2, 300, 100), nodes(4, 200, 200))),
    RecordedHere("b7", "texts", nodes(2, 200, 100), (nodes(2, 300, 300), nodes(2, 100, 100))),
    RecordedHere("b8", "wide", nodes(2, 300, 75), (nodes(2, 200, 200), nodes(2, 150, 50))),
    RecordedHere("b9", "residual", nodes(2, 100, 50), (nodes(2, 200, 100), nodes(2, 50, 50))),
    RecordedHere("b10", "resnet50", nodes(2, 300, 100, 2), (nodes(2, 200, 50, 2), nodes(2, 150, 150))),
    RecordedHere("b11", "gpt2", nodes(4, 200, 50), (nodes(3, 200, 50), nodes(4, 300, 100), nodes(2, 100, 100))),
    RecordedHere("b12", "xception", None, (nodes(2, 150, 50), nodes(4, 100, 100))),
)
"""Jobs whose errors set the width of the intervals."""

UNSEEN = (
    RecordedHere("c1", "resnet152", nodes(2, 250, 125), (nodes(2, 150, 50), nodes(4, 200, 100), nodes(3, 250, 125))),
    RecordedHere("c2", "vgg19", nodes(3, 200, 200), (nodes(2, 200, 100), nodes(4, 200, 200), nodes(3, 120, 60))),
    RecordedHere("c3", "densenet169", nodes(4, 300, 75), (nodes(2, 300, 75), nodes(4, 150, 150), nodes(3, 200, 50))),
    RecordedHere("c4", "bert_large", nodes(2, 200, 50, 2), (nodes(2, 300, 100, 2), nodes(2, 150, 75))),
    RecordedHere("c5", "gpt2_medium", nodes(2, 150, 75), (nodes(4, 300, 75), nodes(2, 250, 250), nodes(3, 150, 75))),
    RecordedHere("c6", "resnet101", nodes(4, 250, 125), (nodes(2, 250, 125), nodes(3, 150, 75), nodes(4, 300, 300))),
    RecordedHere("c7", "xception, longer", nodes(2, 300, 150), (nodes(2, 100, 50), nodes(4, 250, 125))),
    RecordedHere("c8", "inception", nodes(3, 150, 50), (nodes(2, 200, 200), nodes(4, 300, 100))),
    RecordedHere("c9", "deep", nodes(2, 200, 100), (nodes(2, 300, 75), nodes(2, 100, 100))),
    RecordedHere("c10", "transformer", nodes(2, 150, 50), (nodes(2, 300, 100), nodes(2, 200, 200))),
    RecordedHere("c11", "lstm", nodes(2, 100, 100), (nodes(2, 200, 100), nodes(2, 150, 50))),
    RecordedHere("c12", "gpt2", nodes(3, 300, 150), (nodes(4, 200, 100), nodes(2, 150, 50), nodes(3, 200, 200))),
)


# ── on the ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────


def make_model(name: str, rank: int) -> Any:
    """Return a network and its input."""
    if name in REAL:
        return REAL[name](rank=rank)
    network, scale, compute_s = EMULATED[name]
    return emulated(workload(network).scaled(scale), rank=rank, compute_s=compute_s)


def on_rank(comm: Any, options: Mapping[str, Any]) -> None:
    """Run orders, which the starting process writes to files: record a job, or measure steps. Collective."""
    from bench.lib.contenders import Sirtaki

    jobs = dict[str, Any]()
    for number in itertools.count():
        path = Path(options["orders"], f"{number}.order")
        while not path.exists():  # Do not broadcast, because MPI keeps a core busy while it waits.
            time.sleep(0.02)
        if (order := json.loads(path.read_text())) is None:
            return
        make, found = partial(make_model, order["model"], comm.rank), None
        if "log" in order:
            Sirtaki(make, tune=True, trial_log=order["log"], warmup_iterations=STEPS).warm_up()
        else:
            if order["model"] not in jobs:
                jobs[order["model"]] = Sirtaki(make, tune=False)
                for _ in range(3):  # Learn the order of gradients.
                    jobs[order["model"]].step()
            calls = {
                name: partial(step, jobs[order["model"]], Knobs.from_json(knobs))
                for name, knobs in order["settings"].items()
            }
            found = in_turns(calls, comm, rounds=3, block=2)
        if comm.rank == 0:
            write(path.with_suffix(".found"), found)


def step(job: Any, knobs: Knobs) -> None:
    """Run a training step with a setting. Collective."""
    if job.sync.knobs != knobs:
        job.sync.apply(knobs)
    job.step()


# ── in the process that starts ranks ─────────────────────────────────────────────────────────────────────────────────


def write(path: Path, content: Any) -> None:
    """Write JSON to a file that appears when it is complete."""
    path.with_suffix(".new").write_text(json.dumps(content))
    path.with_suffix(".new").rename(path)


class WaitingRanks:
    """Ranks that wait for orders, on this host or in an emulated cluster, whose rates can be changed."""

    def __init__(self, shape: LabShape | None, resources: contextlib.ExitStack) -> None:
        self._folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
        self._lab = None if shape is None else resources.enter_context(NetLab(shape))
        env = {} if shape is None else {"SIRTAKI_TRANSPORT": "gloo"}
        pool, options = resources.enter_context(ThreadPoolExecutor(1)), {"orders": str(self._folder)}
        where = self._lab or HOST_RANKS
        self._job: Future[Any] = pool.submit(run_ranks, "bench.plan", where, options, env=env, timeout_s=3600)
        self._orders = 0
        resources.callback(self._order, None)

    def _order(self, order: Any) -> Path:
        path = self._folder / f"{self._orders}.order"
        write(path, order)
        self._orders += 1
        return path

    def ask(self, shape: LabShape | None, order: Mapping[str, Any]) -> Any:
        """Let the ranks run an order in a network of this shape, and return the result."""
        if self._lab is not None and shape is not None and self._lab.shape != shape:
            self._lab.reshape(shape)
        found = self._order(order).with_suffix(".found")
        while not found.exists():
            if self._job.done():
                raise RuntimeError("the ranks have ended") from self._job.exception()
            time.sleep(0.02)
        return json.loads(found.read_text())


def ask_plan(log: Path, at: LabShape | None, to: LabShape) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of `sirtaki plan` for a place, or no rows and the reason of the refusal."""
    options = ["--ranks", str(to.nodes)]
    if at is None or replace(at, nodes=to.nodes) != to:
        options += ["--link-gbit", f"{to.link_bits_per_s / 1e9:g}", "--flow-gbit", f"{to.flow_bits_per_s / 1e9:g}"]
        for name, shape in (("--hop-us", to), ("--measured-hop-us", at)):
            options += [name, f"{1e6 * shape.delay_s + 20:g}"] if shape is not None else []
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = command_line(["plan", str(log), "--json", *options])
    return (json.loads(out.getvalue()), "") if status == 0 else ([], err.getvalue().strip())


def settings_of(log: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings to measure: those of the rows, or of the log if there are none."""
    if not rows:
        return {KEPT: read_log(log).outcome.knobs.but(**GLOO).to_json()}
    own = {row["planner"]: row["knobs"] for row in rows if row["planner"] in (DEFAULT, KEPT)}
    return own | {"planned": next(row["knobs"] for row in rows if row["planner"] not in own)}


def measure(jobs: Sequence[RecordedHere], folder: Path) -> None:
    """Record all jobs, then measure them at the other places, and write logs and times to a folder.

    Jobs and places that the folder already has are not measured again.
    """
    places = dict[Any, WaitingRanks]()
    with contextlib.ExitStack() as resources:

        def ask(shape: LabShape | None, order: Mapping[str, Any]) -> Any:
            key = shape and (shape.nodes, shape.delay_s)
            if key not in places:
                places[key] = WaitingRanks(shape, resources)
            print(f"{time.strftime('%X')} {order['model']} {shape}, load {os.getloadavg()[0]:.1f}", flush=True)
            return places[key].ask(shape, order)

        for one in jobs:
            if not (log := folder / f"{one.name}.jsonl").exists():
                ask(one.at, {"model": one.model, "log": str(log)})
        found = json.loads((folder / "times.json").read_text()) if (folder / "times.json").exists() else []
        pairs = [(one, to) for one in jobs for to in one.to]
        known = {(one["job"], LabShape(**one["to"])) for one in found}
        for job, to in [(job, to) for job, to in pairs if (job.name, to) not in known]:
            log = folder / f"{job.name}.jsonl"
            settings = settings_of(log, ask_plan(log, job.at, to)[0])
            samples: dict[str, list[float]] = {name: [] for name in settings}
            for _ in range(MOST_TRIES):
                more = ask(to, {"model": job.model, "settings": settings})
                samples = {name: samples[name] + more[name] for name in settings}
                spreads = [Spread.of(times_s) for times_s in samples.values()]
                if all(one.high - one.low <= SCATTER * one.median for one in spreads):
                    break
            found.append({"job": job.name, "to": asdict(to), "settings": settings, "samples_s": samples})
            write(folder / "times.json", found)


def judged(jobs: Sequence[RecordedHere], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield one row for each measured step."""
    recorded = {job.name: job for job in jobs}
    for one in json.loads((folder / "times.json").read_text()):
        job, to = recorded[one["job"]], LabShape(**one["to"])
        rows, reason = ask_plan(folder / f"{job.name}.jsonl", job.at, to)
        at = f"{HOST_RANKS} on one host" if job.at is None else f"{job.at.nodes}, {job.at.describe()}"
        for setting, samples_s in one["samples_s"].items():
            row = {"job": job.model, "recorded": at, "place": f"{to.nodes}, {to.describe()}", "setting": setting}
            row |= {"measured_s": (measured := Spread.of(samples_s)), "samples_s": samples_s}
            answers = [it for it in rows if it["knobs"] == one["settings"][setting]]
            it = next((it for it in answers if it["planner"] == setting), answers[0] if answers else None)
            row |= {name: it and it[name] for name in ("iteration_s", "low_s", "high_s")}
            row |= {"error, %": it and percent(it["iteration_s"] / measured.median)}
            row |= {"half width, %": it and percent((it["high_s"] / it["low_s"]) ** 0.5)}
            row |= {"inside": it and it["low_s"] <= measured.median <= it["high_s"]}
            why = "" if it else reason.split("predict this job: ")[-1] or "not among the predicted plans"
            yield row | {"refused": why if it is None or it["told"] else "the interval is too wide"}


def percent(ratio: float) -> float:
    """Return by how many per cent a ratio differs from one."""
    return round(100 * (ratio - 1), 1)


def main() -> int:
    """Measure, or read the kept measurements, and judge."""
    flags = parser(__doc__)
    flags.add_argument("--unseen", action="store_true", help="the jobs that were not used for fitting")
    flags.add_argument("--folder", type=Path, metavar="DIR", help="logs and times")
    args = flags.parse_args()
    jobs = (UNSEEN if args.unseen else LOOKING)[: 2 if args.quick else None]
    report = Report(name="plan")
    with contextlib.ExitStack() as resources:
        folder = args.folder or Path(resources.enter_context(tempfile.TemporaryDirectory()))
        if not (folder / "notes.txt").exists():
            need_cluster()
            folder.mkdir(parents=True, exist_ok=True)
            begin_s, load = time.monotonic(), os.getloadavg()[0]
            measure(jobs, folder)
            took = f"{time.monotonic() - begin_s:.0f} s; load average {load:.1f} before, {os.getloadavg()[0]:.1f} after"
            (folder / "notes.txt").write_text(f"measured {time.strftime('%FT%TZ', time.gmtime())} in {took}")
        report.notes.append((folder / "notes.txt").read_text())
        report.rows = list(judged(jobs, folder))
    told = [row for row in report.rows if not row["refused"]]
    pairs = sum(len(job.to) for job in jobs)
    report.notes.append(f"{len(jobs)} recordings, {pairs} pairs of places, {len(report.rows)} predictions")
    if told:
        errors = [abs(row["error, %"]) for row in told]
        report.notes.append(f"error of answers: {statistics.fmean(errors):.1f} % on average")
        widths = [row["half width, %"] / 100 for row in told]
        report.bar("predictions that are refused", 1 - len(told) / len(report.rows), 0.30)
        report.bar("half width of the interval, median", statistics.median(widths), 0.15)
        report.bar("steps outside of the interval", statistics.fmean(not row["inside"] for row in told), 0.10)
        report.bar("error of an answer, worst", max(errors) / 100, 0.15)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank))
