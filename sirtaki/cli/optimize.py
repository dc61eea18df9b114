"""`sirtaki optimize`: search for a faster communication plan of a recorded job, by replay (simulation)."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sirtaki.analysis.global_graph import Part, ms, percent, recorded
from sirtaki.analysis.job_model import histories, job_model
from sirtaki.analysis.memory import Fitting, RankedRemedy, fit
from sirtaki.analysis.plan_search import SEARCH_LIMIT_S, ProposedPlan, SearchOutcome, optimize
from sirtaki.analysis.what_if import WORTH_A_LINE, Baseline
from sirtaki.autotune.knobs import format_bytes
from sirtaki.autotune.sharded import SHARDED_FILE, RecordedStep
from sirtaki.engine.tuning.plans import PLAN_FILE
from sirtaki.errors import RecordingError, ReplayError, SirtakiError
from sirtaki.measures import counted

from .output import add_formats, add_recording, memory_bytes, positive, print_table, printed, read_recording, write_file

COMPILED_STAYS = f"The compiled model stays whole: in parts a step is not {100 * WORTH_A_LINE:.0f} % shorter."

DOUBTFUL = 0.05
"""A warning is printed if the replayed (simulated) step time differs from the recorded one by more than this fraction.

The printed confidence intervals include this error.
"""

MOST_PARTS = 3
"""Maximum number of causes of the critical path's duration that are printed."""

UNPROVED = dict.fromkeys(
    (
        "before_s",
        "after_s",
        "gain",
        "plan_alone_s",
        "without_communication_s",
        "critical_path_before",
        "critical_path_after",
        "iteration_s",
        "low_s",
        "high_s",
        "told",
        "sure",
    )
)
"""Fields of the output of `--json` that are null if the memory budget requires a change of the job.

The step time after such a change was not measured.
"""


def configure(parser: ArgumentParser) -> None:
    """Add the options of `sirtaki optimize` to the parser."""
    add_recording(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=f"file to write the plan to (DIR/{PLAN_FILE})"
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PASS",
        help="also try a change that rounds gradients; the only one is bf16 (gradients are sent as bf16)",
    )
    parser.add_argument(
        "--limit-s",
        type=positive,
        default=SEARCH_LIMIT_S,
        metavar="S",
        help=f"longest search in seconds ({SEARCH_LIMIT_S:g})",
    )
    parser.add_argument(
        "--memory-budget",
        type=memory_bytes,
        metavar="BYTES",
        help="largest memory of a rank, such as 6G. If the recorded peak is larger, propose re-computation or "
        "accumulation",
    )
    add_formats(parser)


def main(options: Namespace) -> int:
    """Search for a faster communication plan of a recorded job, print the predicted step times with their uncertainty,
    and write the plan files.

    Raises:
        RecordingError: the recording is empty, or a memory budget was given but memory use was not recorded.
        ReplayError: the recording cannot be replayed, or the memory budget cannot be met.
        ConfigError: no change has the name given with `--allow`, or the plan cannot be written.
    """
    if (options.folder / SHARDED_FILE).exists():
        return _sharded(options)
    recording = read_recording(options)
    found = histories(recording)
    job, was = job_model(found), recorded(found)
    before, fitting = Baseline.of(job, was), None
    if options.memory_budget is not None:
        fitting = fit(recording, before, budget_bytes=options.memory_budget)
        if not fitting.is_met:
            raise ReplayError(_unmet(fitting))
    outcome = optimize(
        before if fitting is None else fitting.after,
        settings=recording.job.settings,
        allowed=options.allow,
        limit_s=options.limit_s,
    )
    memory = {} if fitting is None else {"memory": _memory_json(fitting)}
    timed = fitting is None or fitting.chosen is None
    # Write a plan that is faster. For a compiled model, write a plan in any case: it says into how large parts the
    # backward pass is divided (0 = not divided).
    says_something = outcome.is_faster or outcome.best.plan.part_bytes is not None
    proposals, files = ([outcome.best, *outcome.rivals] if says_something else []), list[Path]()
    for number, one in enumerate(proposals, start=1):
        path = options.output or options.folder / PLAN_FILE
        files.append(path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}"))
        write_file(files[-1], json.dumps({**one.plan.to_json(), **memory}, indent=1) + "\n", "the plan")
    plans = [_plan_json(one, path) for one, path in zip(proposals, files, strict=True)]
    told = {"recorded_s": was.iteration_s, "recorded_spread_s": was.spread_s, **_json(outcome)}
    if not timed:
        told, plans = _unproved(told), [_unproved(one) for one in plans]
    if printed(options, {**told, "plans": plans, **memory}, plans):
        return 0
    if fitting is not None:
        _print_memory(fitting)
    for line in [*_describe(outcome, timed=timed), "", *_worth(outcome, files, timed=timed)]:
        print(line)
    off = before.times.iteration_s / was.iteration_s - 1
    doubts = [f"the simulated step is {percent(abs(off))} {'longer' if off > 0 else 'shorter'} than the recorded one"]
    refused = [
        f"the step time of {count} more plans cannot be predicted, because {why}; the warm-up of a job tries such plans"
        for why, count in outcome.refused.items()
    ]
    for note in [*job.notes, *refused, *(doubts if abs(off) > DOUBTFUL else ())]:
        print(f"\nNote: {note}.")
    return 0


def _sharded(options: Namespace) -> int:
    """Print the predicted step times of sharded training (FSDP) with more or less memory, from the trace of one step
    that `fsdp.attach` has written.

    Raises:
        RecordingError: the trace cannot be read.
    """
    path = options.folder / SHARDED_FILE
    try:
        recorded = msgspec.json.decode(path.read_bytes(), type=RecordedStep)
        before_s = recorded.step.expected_s(recorded.space, recorded.setting)
        found = [(space, one, recorded.step.expected_s(space, one)) for space, one in recorded.by_memory()]
    except (OSError, msgspec.MsgspecError, SirtakiError, LookupError, ValueError, ZeroDivisionError) as err:
        raise RecordingError(
            f"the file {path} does not contain a training step that `fsdp.attach` has traced: {err}; to write "
            "this file again, run the job under `sirtaki profile`"
        ) from err
    rows = [
        {
            "memory_bytes": space.memory_bytes,
            "setting": one.describe(),
            "step_s": span_s,
            "of_untuned": span_s / before_s,
        }
        for space, one, span_s in found
    ]
    if printed(options, {"setting": recorded.setting.describe(), "step_s": before_s, "by_memory": rows}, rows):
        return 0
    print(f"With the untuned setting ({recorded.setting.describe()}), a step is predicted to take {ms(before_s)}.\n")
    titles = ["SIRTAKI_FSDP_MEMORY", "a step", "of untuned", "with"]
    print_table(
        titles,
        (
            (f"{space.memory_bytes / 2**20:.0f} MiB", ms(span_s), f"{span_s / before_s:.2f}", one.describe())
            for space, one, span_s in found
        ),
    )
    print(
        "\nThese times are predicted, not measured. The next job tries the fastest setting first during its warm-up, "
        "and keeps it only if measurements prove that it is faster."
    )
    return 0


# ── the plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _describe(outcome: SearchOutcome, *, timed: bool) -> Iterator[str]:
    """Describe the best communication plan, and why it is faster than the recorded plan. If `timed` is False, omit
    step times.
    """
    best, before_s = outcome.best, outcome.before.times.iteration_s
    yield (
        f"The search took {outcome.search_s:.1f} s and simulated {counted(outcome.replays, 'plan')} on "
        f"{counted(outcome.n_ranks, 'rank')}"
        + ("." if outcome.in_time else "; the time limit (--limit-s) ended it early.")
    )
    alone = f"without communication it would be {ms(outcome.without_communication_s)}"
    if not outcome.is_faster:
        took = f", {ms(before_s)} a step; {alone}" if timed else ""
        yield f"No plan is faster than the recorded one: {outcome.recorded_knobs.describe()}{took}."
        if best.plan.part_bytes == 0:
            yield COMPILED_STAYS
        if timed:
            yield from _path("The step is made of", outcome.parts)
        return
    if timed:
        yield f"Instead of {ms(before_s)}, a step would take {best.answer.describe()}; {alone}."
    yield ""
    yield f"It ran   {outcome.recorded_knobs.describe()}"
    yield f"plan     {best.knobs.describe()}"
    if best.by:
        yield f"proposed by the planner {best.by}"
    yield from (f"and if   {extra.words}: {extra.line}" for extra in best.extras)
    if outcome.plan_alone is not None and timed:
        yield f"(without parts the best plan makes it {ms(outcome.plan_alone.times.iteration_s)})"
    elif best.plan.part_bytes == 0:
        yield COMPILED_STAYS
    if not timed:
        return
    yield ""
    yield from _path("Before, the step is made of", outcome.parts)
    yield from _path("after it, of", best.parts)


def _path(words: str, parts: Sequence[Part]) -> Iterator[str]:
    yield f"{words}:"
    yield from (f"  {part.describe()}" for part in parts[:MOST_PARTS])


def _worth(outcome: SearchOutcome, files: Sequence[Path], *, timed: bool) -> Iterator[str]:
    """Describe how certain it is that the best communication plan is faster, and what the user should do next."""
    if not outcome.is_faster:
        yield (
            f"The plan was written to {files[0]}; with it, early_gradients() does not divide the model."
            if files
            else "No plan is written."
        )
        return
    if not outcome.best.answer.is_sure or not timed:
        yield "The predicted difference from the recorded plan is uncertain; a job that tries both (below) measures it."
    if outcome.rivals:
        yield "The following plans are predicted to be about as fast, so try each:"
        for one, path in zip(outcome.rivals, files[1:], strict=True):
            yield f"  {path}: {one.knobs.describe()}" + (f", {one.answer.describe()}" if timed else "")
    yield f"The plan was written to {files[0]}. A job compares it with its default, and keeps the faster one, with"
    yield f"  SIRTAKI_PLAN={files[0]}"
    ranks = outcome.best.plan.ranks
    yield f"and uses only the plan if SIRTAKI_TUNE=0 is set, too. The plan is for {ranks} ranks and this model."


def _plan_json(one: ProposedPlan, path: Path) -> dict[str, Any]:
    extras = [{"words": extra.words, "line": extra.line} for extra in one.extras]
    return {"plan": str(path), **one.answer.row(), "extras": extras, "knobs": one.knobs.to_json()}


def _json(outcome: SearchOutcome) -> dict[str, Any]:
    best, alone = outcome.best, outcome.plan_alone
    return {
        "faster": outcome.is_faster,
        "knobs": best.knobs.to_json(),
        "recorded_knobs": outcome.recorded_knobs.to_json(),
        "before_s": outcome.before.times.iteration_s,
        "after_s": best.answer.times.iteration_s,
        "gain": outcome.gain,
        "part_bytes": best.plan.part_bytes,
        "plan_alone_s": None if alone is None else alone.times.iteration_s,
        "without_communication_s": outcome.without_communication_s,
        "critical_path_before": [{"words": part.words, "share": part.share} for part in outcome.parts],
        "critical_path_after": [{"words": part.words, "share": part.share} for part in best.parts],
        "proposed_by": best.by or None,
        "search": {
            "seconds": outcome.search_s,
            "replays": outcome.replays,
            "refused": dict(outcome.refused),
            "ranks": outcome.n_ranks,
            "in_time": outcome.in_time,
        },
    }


def _unproved(told: dict[str, Any]) -> dict[str, Any]:
    """Return `told`, the output of `--json`, with the fields of `UNPROVED` set to null.

    They were not measured for a job that is changed to fit into a memory budget.
    """
    return {name: UNPROVED.get(name, one) for name, one in told.items()}


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _unmet(fitting: Fitting) -> str:
    least = min(fitting.remedies, key=lambda one: one.remedy.peak_bytes, default=None)
    how = "no change that Sirtaki knows reduces it"
    if least is not None and least.remedy.peak_bytes < fitting.peak_bytes:
        how = f"the smallest possible peak is {format_bytes(least.remedy.peak_bytes)}, by {least.remedy.words}"
    return (
        f"a budget of {format_bytes(fitting.budget_bytes)} cannot be met: a rank uses "
        f"{format_bytes(fitting.peak_bytes)} at the peak, and {how}"
    )


def _print_memory(fitting: Fitting) -> None:
    """Print whether the job fits into the memory budget.

    If not, print the change of the training script that makes it fit, with its lines of code.
    """
    peak = f"rank {fitting.rank} uses {format_bytes(fitting.peak_bytes)} of memory at its peak ({fitting.device})"
    budget, chosen = format_bytes(fitting.budget_bytes), fitting.chosen
    if chosen is None:
        print(f"The job fits into the memory budget of {budget} without a change: {peak}.\n")
        return
    print(f"The job exceeds the memory budget of {budget} (--memory-budget): {peak}.")
    print("The simulation predicts a lower memory peak with one of these changes, listed by the time that they cost:\n")
    rows = [(format_bytes(fitting.peak_bytes), "as it is")]
    for one in fitting.remedies:
        not_enough = "" if one.remedy.peak_bytes <= fitting.budget_bytes else ", which is not enough"
        rows.append((format_bytes(one.remedy.peak_bytes), f"{one.remedy.words}{not_enough}"))
    print_table(("peak", ""), rows)
    print("\nThe step time with these changes is not predicted; to measure it, run a job with one of them.")
    print(
        f"The fastest change that fits into the memory budget is {chosen.by}; add these lines to the training script:\n"
    )
    for line in chosen.remedy.lines:
        print(f"    {line}")
    print()
    for note in chosen.remedy.notes:
        print(f"But: {note}.")
    print("To use the communication plan below, first add the lines printed above to the training script.\n")


def _memory_json(fitting: Fitting) -> dict[str, Any]:
    def row(one: RankedRemedy) -> dict[str, Any]:
        return {
            "by": one.by,
            "words": one.remedy.words,
            "lines": list(one.remedy.lines),
            "notes": list(one.remedy.notes),
            "peak_bytes": one.remedy.peak_bytes,
        }

    return {
        "budget_bytes": fitting.budget_bytes,
        "peak_bytes": fitting.peak_bytes,
        "rank": fitting.rank,
        "device": fitting.device,
        "chosen": None if fitting.chosen is None else fitting.remedies.index(fitting.chosen),
        "remedies": [row(one) for one in fitting.remedies],
    }
