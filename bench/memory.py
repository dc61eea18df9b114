"""The accuracy of peaks and times predicted by `sirtaki optimize --memory-budget`.

    python -m bench.memory [--quick] [--check] [--save] [--models resnet transformer lstm]

Takes 3 minutes per model, with two ranks on this host. The first job is recorded. For each budget (a share of its
peak), `sirtaki optimize` derives remedies from the recording: re-computation of chosen modules, or several passes over
parts of the batch. Then jobs run unchanged and with each remedy. For re-computation they execute the lines of code that
the command prints.

*Peak*: each variant runs in its own job under torch.profiler. The profiler starts before the model is created, so that
the allocator's count includes all allocations. The flat buffers are added, because they are mapped memory and not the
allocator's. Units use sockets. Over shared memory the transport's threads would release gradients, and torch.profiler
sees only the training thread, so its count would grow with each step.

*Time*: variants alternate in one job. Three recordings are made in between. Results are medians of the slowest rank's
steps, and of the predictions from each recording. Because the load of the machine varies, rows show the ratio to the
unchanged step, too. With `--peaks-only` nothing is timed.

Bars: predicted peaks are within 5 % of measured ones; the chosen remedy is the fastest measured one that fits, or at
most 2 % slower.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from bench.lib.harness import Report, Spread, finish, parser
from bench.lib.models import lstm, small_resnet, token_transformer
from bench.lib.ranks import in_turns, run_ranks, start
from sirtaki.analysis.global_graph import play, recorded, replayed
from sirtaki.analysis.job_model import histories, job_model
from sirtaki.analysis.memory import Fitting, fit
from sirtaki.analysis.recording import read_folder as read
from sirtaki.analysis.what_if import Baseline

RANKS = 2
RECORDED = 6
WATCHED = 4
"""Number of steps under torch.profiler. The peak of the last one counts."""

ModelMaker = Callable[..., tuple[nn.Module, torch.Tensor]]
MODELS: Mapping[str, ModelMaker] = {"resnet": small_resnet, "transformer": token_transformer, "lstm": lstm}
RECORDINGS = 3
SHARES = (0.75, 0.5)
"""Budgets, as shares of the recorded peak."""

LIMIT = 0.05
AS_FAST = 1.02
AS_IS = "as it is"

Variant = Mapping[str, Any]
"""A variant of the job: `lines` of code to execute, and `passes` over parts of the batch. Empty = unchanged."""


# ── on the ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────


class RemedyTraining:
    """A training loop of one model with one remedy."""

    def __init__(self, model_name: str, way: Variant) -> None:
        """Create the model and wrap the optimizer. Collective. Call `hvd.init()` first."""
        import sirtaki.torch as hvd

        self.model, self._batch = MODELS[model_name](rank=hvd.rank())
        exec("\n".join(way.get("lines", ())), {"model": self.model})
        self._parts = way.get("passes", 1)
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(self.model.parameters(), lr=1e-5),
            named_parameters=self.model.named_parameters(),
            backward_passes_per_step=self._parts,
        )

    def step(self) -> None:
        """Run one training step. Collective."""
        self._optimizer.zero_grad()
        for part in self._batch.chunk(self._parts):
            (self.model(part).square().mean() / self._parts).backward()
        self._optimizer.step()


def record(options: Mapping[str, Any], trained: RemedyTraining) -> None:
    """Train until a recording is finished. Collective."""
    from sirtaki.analysis.recorder import Stage
    from sirtaki.profiler import profile

    with profile(options["folder"], iterations=RECORDED) as recorder:
        while recorder.stage is not Stage.ENDED:
            trained.step()


def allocated_bytes(profiler: torch.profiler.profile, steps: int) -> int:
    """Return the CPU allocator's peak, in bytes, in the last of `steps` steps."""
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    left, counts, begins = list(results.experimental_event_tree()), [], []
    while left:
        event = left.pop()
        if event.name == "the step":
            begins.append(event.start_time_ns)
        if hasattr(event.extra_fields, "total_allocated"):
            counts.append((event.start_time_ns, event.extra_fields.total_allocated))
        left += event.children
    assert len(begins) == steps
    last_ns = max(begins)
    before = max((at_ns, count) for at_ns, count in counts if at_ns < last_ns)[1]
    return int(max(before, *(count for at_ns, count in counts if at_ns >= last_ns)))


def peak(options: Mapping[str, Any]) -> int:
    """Return this rank's peak in bytes: the allocator's peak and the flat buffers. Collective."""
    import sirtaki.torch as hvd

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        hvd.init()
        trained = RemedyTraining(options["model"], options["way"])
        for _ in range(WATCHED):
            with torch.profiler.record_function("the step"):
                trained.step()
    gradients = [one.grad for one in trained.model.parameters() if one.grad is not None]
    flat = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in gradients}
    return allocated_bytes(profiler, WATCHED) + sum(flat.values())


def times(comm: Any, options: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return seconds of alternating steps of each variant, on the slowest rank. Collective."""
    trained = {name: RemedyTraining(options["model"], way) for name, way in options["ways"].items()}
    steps = {name: one.step for name, one in trained.items()}
    found: dict[str, list[float]] = {name: [] for name in trained}
    for number, folder in enumerate(options["folders"]):
        record({**options, "folder": folder}, trained[AS_IS])
        for name, samples in in_turns(steps, comm, rounds=options["rounds"], seed=number).items():
            found[name] += samples
    return found


def on_rank(comm: Any, options: dict[str, Any]) -> Any:
    """Run the part that `options` selects, on one rank. Collective."""
    import sirtaki.torch as hvd

    if options["what"] == "peak":
        return peak(options)
    hvd.init()
    if options["what"] == "time":
        return times(comm, options)
    record(options, RemedyTraining(options["model"], {}))
    return None


# ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────────


def fittings_for_budgets(folder: Path) -> list[Fitting]:
    """Return the remedies for each budget, from a recording."""
    recording = read(folder)
    base = Baseline.of(job_model(histories(recording)))
    most = fit(recording, base, budget_bytes=1 << 60).peak_bytes
    return [fit(recording, base, budget_bytes=round(share * most)) for share in SHARES]


def ways_of(fittings: Sequence[Fitting]) -> dict[str, tuple[Variant, int]]:
    """Return all remedies of all budgets by name, each with its predicted peak in bytes. Includes the unchanged job."""
    found: dict[str, tuple[Variant, int]] = {AS_IS: ({}, fittings[0].peak_bytes)}
    for fitting in fittings:
        for one in fitting.remedies:
            found[named(one.remedy.words, fitting)] = (way_of(one.remedy.lines), one.remedy.peak_bytes)
    return found


def way_of(lines: Sequence[str]) -> Variant:
    """Split printed lines: lines about the model are executed, lines about the optimizer determine `passes`."""
    passes = re.search(r"backward_passes_per_step=(\d+)", "\n".join(lines))
    about_model = list(takewhile(lambda line: not line.startswith("optimizer ="), lines))
    return {"lines": about_model, "passes": int(passes[1]) if passes else 1}


def named(words: str, fitting: Fitting) -> str:
    """Return the name of a remedy, which includes the budget as a share of the peak."""
    return f"{words}, for {fitting.budget_bytes / fitting.peak_bytes:.0%}".replace("%", " %")


def judge_peaks(report: Report, model: str, fittings: Sequence[Fitting], peaks: Mapping[str, int]) -> None:
    """Add a row and a bar for each variant: predicted and measured peak."""
    for name, (_, predicted_bytes) in ways_of(fittings).items():
        error = predicted_bytes / peaks[name] - 1
        report.rows.append(
            {
                "model": model,
                "way": name,
                "peak, MiB": round(peaks[name] / 2**20, 2),
                "predicted, MiB": round(predicted_bytes / 2**20, 2),
                "off": f"{100 * error:+.2f} %",
            }
        )
        report.bar(f"{model}, {name}: peak off by", abs(error), LIMIT)


def judge_times(
    report: Report, model: str, took_s: Mapping[str, Sequence[float]], expected_s: Mapping[str, float]
) -> None:
    """Add a row for each variant: measured and predicted seconds of a step. The command prints no such predictions."""
    for name, samples in took_s.items():
        measured_ratio, predicted_ratio = (
            median(samples) / median(took_s[AS_IS]),
            expected_s[name] / expected_s[AS_IS],
        )
        error = predicted_ratio / measured_ratio - 1
        report.rows.append(
            {
                "model": model,
                "way": name,
                "step_s": Spread.of(samples),
                "predicted_s": expected_s[name],
                "÷ as it is": round(measured_ratio, 3),
                "predicted ÷ as it is": round(predicted_ratio, 3),
                "off": f"{100 * error:+.1f} %",
                "samples_s": list(samples),
            }
        )


def judge_choices(
    report: Report,
    model: str,
    fittings: Sequence[Fitting],
    peaks: Mapping[str, int],
    took_s: Mapping[str, Sequence[float]],
) -> None:
    """Add a bar for each budget: the chosen remedy's measured step over the fastest step among remedies that fit."""
    for fitting in fittings:
        fits = [
            name
            for one in fitting.remedies
            if peaks[name := named(one.remedy.words, fitting)] <= (1 + LIMIT) * fitting.budget_bytes
        ]
        chosen = "" if fitting.chosen is None else named(fitting.chosen.remedy.words, fitting)
        if not chosen and not fits:
            continue
        slower = float("inf")
        if chosen in fits:
            slower = median(took_s[chosen]) / min(median(took_s[name]) for name in fits)
        share = f"{fitting.budget_bytes / fitting.peak_bytes:.0%}".replace("%", " %")
        report.bar(f"{model}, a budget of {share}: chosen ÷ fastest that fits", slower, AS_FAST)


def predicted_s(folder: Path, fittings: Sequence[Fitting]) -> dict[str, float]:
    """Return the step of each variant in seconds, predicted from a recording."""
    found = histories(read(folder))
    job = job_model(found)
    predicted = {AS_IS: replayed(play(job)).iteration_s}
    for fitting in fittings:
        for one in fitting.remedies:
            predicted[named(one.remedy.words, fitting)] = replayed(play(one.remedy.apply(job))).iteration_s
    return predicted


def run(report: Report, model: str, args: Any) -> None:
    """Run all jobs of one model, and add rows and bars."""
    with tempfile.TemporaryDirectory() as directory:
        first = Path(directory, "alone")
        later = [Path(directory, f"alternating-{number}") for number in range(RECORDINGS)]
        options: dict[str, Any] = {"model": model, "folder": str(first)}
        env = {"SIRTAKI_TUNE": "0", "SIRTAKI_TRANSPORT": "gloo", "KINETO_LOG_LEVEL": "99"}
        ranks = partial(run_ranks, "bench.memory", RANKS, env=env)
        ranks({**options, "what": "record"})
        fittings = fittings_for_budgets(first)
        ways = {name: way for name, (way, _) in ways_of(fittings).items()}
        peaks = {name: ranks({**options, "what": "peak", "way": way}) for name, way in ways.items()}
        judge_peaks(report, model, fittings, peaks)
        if args.peaks_only:
            return
        timed = {**options, "what": "time", "ways": ways, "folders": list(map(str, later))}
        took_s = ranks({**timed, "rounds": 2 if args.quick else 4})
        was = [recorded(histories(read(folder))) for folder in later]
        took = ", ".join(f"{1e3 * one.iteration_s:.4g} ms (± {1e3 * one.spread_s:.2g})" for one in was)
        report.notes.append(f"{model}: recorded steps took {took}")
        predicted = [predicted_s(folder, fittings) for folder in later]
        judge_times(report, model, took_s, {way: median(one[way] for one in predicted) for way in ways})
        judge_choices(report, model, fittings, peaks, took_s)


def main() -> int:
    """Run every model."""
    flags = parser(__doc__)
    flags.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    flags.add_argument("--peaks-only", action="store_true", help="measure peaks only")
    args = flags.parse_args()
    report = Report(name="memory")
    for model in args.models:
        run(report, model, args)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank, init=False))
