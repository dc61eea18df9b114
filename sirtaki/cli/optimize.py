"""`sirtaki optimize`: how a recorded job's gradients should travel, by what a replay says; a plan for the next job."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sirtaki.analysis.global_graph import Part, StepTimes, ms, recorded
from sirtaki.analysis.job_model import histories, job_model
from sirtaki.analysis.memory import Fitting, fit, memory_passes
from sirtaki.analysis.plan_search import EVERY, SEARCH_LIMIT_S, Acceleration, Outcome, optimize
from sirtaki.analysis.recording_files import read
from sirtaki.analysis.what_if import WORTH_A_LINE
from sirtaki.autotune.knobs import format_bytes
from sirtaki.engine.tuning.plans import PLAN_FILE
from sirtaki.errors import ConfigError, ReplayError

DOUBTFUL = 0.05
"""Share of a step by which a replay may be off without a word."""

COMPILED_STAYS = f"The compiled model stays whole: in parts a step is not {100 * WORTH_A_LINE:.0f} % shorter."

MOST_PARTS = 3
"""Of a critical path, so many are shown."""


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def positive(text: str) -> float:
    """An option's value.

    Raises:
        ArgumentTypeError: it is no number above 0, or it is infinite.
    """
    try:
        value = float(text)
    except ValueError as err:
        raise ArgumentTypeError(f"{text!r} is no number") from err
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"it must be positive, not {text}")
    return value


def memory_bytes(text: str) -> int:
    """An option's value such as `6G`, `512M`, `1.5GiB`, or a number of bytes; K, M, G and T are powers of 1024.

    Raises:
        ArgumentTypeError: it is something else, or nothing.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    n_bytes = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if not n_bytes:
        raise ArgumentTypeError(f"{text!r} is no amount of memory: give one such as 6G or 512M")
    return n_bytes


def configure(parser: ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="what `sirtaki profile` has written")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"the plan (DIR/{PLAN_FILE})")
    parser.add_argument(
        "--allow", action="append", default=[], metavar="PASS", help="also change what changes numbers, such as bf16"
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        choices=[one.value for one in Acceleration],
        help="search without this acceleration",
    )
    parser.add_argument(
        "--limit-s", type=positive, default=SEARCH_LIMIT_S, metavar="S", help=f"search no longer ({SEARCH_LIMIT_S:g})"
    )
    parser.add_argument(
        "--memory-budget",
        type=memory_bytes,
        metavar="BYTES",
        help="what a rank may hold, such as 6G; beyond it re-computation and accumulation are looked at",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(options: Namespace) -> int:
    """Searches, says what was found and what it is worth, and writes the plan.

    Raises:
        RecordingError: there is nothing to improve, or memory was not recorded and there is a budget.
        ReplayError: what is there cannot be replayed, or the budget cannot be met.
        ConfigError: a pass does not exist, or the plan cannot be written.
    """
    recording = read(options.folder)
    for problem in recording.problems:
        print(f"sirtaki optimize: {problem}", file=sys.stderr)
    found = histories(recording)
    job = job_model(found)
    fitting = None
    if options.memory_budget is not None:
        fitting = fit(recording, job, memory_passes(), budget_bytes=options.memory_budget)
        if not fitting.is_met:
            raise ReplayError(unmet(fitting))
    outcome = optimize(
        job if fitting is None else fitting.applied_to(job),
        settings=recording.job.settings,
        allowed=options.allow,
        accelerations=EVERY - {Acceleration(name) for name in options.without},
        limit_s=options.limit_s,
    )
    was, now = recorded(found), outcome.as_recorded if fitting is None else fitting.times
    path = options.output or options.folder / PLAN_FILE
    memory = {} if fitting is None else {"memory": memory_as_json(fitting)}
    text = json.dumps({**outcome.plan.to_json(), **memory}, indent=1) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"the plan cannot be written: {err}") from err
    if options.json:
        print(json.dumps({**_as_json(outcome, was, path), **memory}, indent=1))
        return 0
    for line in describe_memory(fitting) if fitting is not None else ():
        print(line)
    for line in [*describe(outcome), "", *worth(outcome, was, now), "", *taking_it(outcome, path)]:
        print(line)
    for note in job.notes:
        print(f"\nNote: {note}.")
    return 0


def describe(outcome: Outcome) -> Iterator[str]:
    """What was found, and why."""
    found = outcome.found
    yield (
        f"Searched {outcome.search_s:.1f} s: {found.replays} replays of {outcome.n_ranks} "
        f"{'rank' if outcome.n_ranks == 1 else 'ranks'}, {found.walks} walks along critical paths"
        + ("." if found.in_time else "; the time was up before it had come to its end.")
    )
    before_s, after_s = outcome.before.iteration_s, outcome.after.iteration_s
    alone = f"without communication it would be {ms(outcome.without_communication_s)}"
    if outcome.gain <= 0:
        yield f"Nothing is faster than what ran: {outcome.recorded_knobs.describe()}, {ms(before_s)} a step; {alone}."
        if outcome.plan.part_bytes == 0:
            yield COMPILED_STAYS
        yield from _path("The step is made of", outcome.parts_before)
        return
    yield f"A step would take {ms(after_s)} instead of {ms(before_s)}, {_percent(outcome.gain)} less; {alone}."
    yield ""
    yield f"It ran   {outcome.recorded_knobs.describe()}"
    yield f"better   {outcome.knobs.describe()}"
    kept = [f"{words} ({count}×)" if count > 1 else words for words, count in found.changes.items()]
    if kept:
        yield f"found by a grid, and on critical paths: {', '.join(kept)}"
    yield from (f"and if   {extra.words}: {extra.line}" for extra in outcome.extras)
    if outcome.plan_alone is not None:
        yield f"(without parts the best plan makes it {ms(outcome.plan_alone.iteration_s)})"
    elif outcome.plan.part_bytes == 0:
        yield COMPILED_STAYS
    yield ""
    yield from _path("Before, the step is made of", outcome.parts_before)
    yield from _path("after it, of", outcome.parts_after)


def _path(words: str, parts: Sequence[Part]) -> Iterator[str]:
    yield f"{words}:"
    yield from (f"  {part.describe()}" for part in parts[:MOST_PARTS])


def worth(outcome: Outcome, was: StepTimes, now: StepTimes | None = None) -> Iterator[str]:
    """How much the answer is worth.

    Args:
        outcome: the answer.
        was: a step as it was recorded.
        now: the same replayed, where the outcome is of a changed job.
    """
    error = (now or outcome.as_recorded).iteration_s / was.iteration_s - 1 if was.iteration_s > 0 else 0.0
    if abs(error) > DOUBTFUL:
        yield (
            f"The replay is {_percent(abs(error))} {'longer' if error > 0 else 'shorter'} than the recording "
            f"({ms(was.iteration_s)}): do not believe the figures above."
        )
    off = abs(outcome.price_error)
    if outcome.gain > 0 and off >= outcome.gain:
        yield (
            f"What units cost by their size is a fit, and it misses the recorded plan by {_percent(off)} of a step, "
            "more than is gained here: worth a trial, no more."
        )
    elif off > DOUBTFUL:
        yield f"What units cost by their size is a fit, and it misses the recorded plan by {_percent(off)} of a step."
    if was.spread_s > outcome.gain * was.iteration_s > 0:
        yield f"Recorded steps differ by more than is gained (± {ms(was.spread_s)})."
    if outcome.gain > 0:
        yield "A replay is a prediction: the job compares the plan with its default before it keeps it."


def taking_it(outcome: Outcome, path: Path) -> Iterator[str]:
    """What to do next."""
    yield f"Wrote {path}. The next job tries it first with"
    yield f"  SIRTAKI_PLAN={path}"
    yield f"and runs nothing else with SIRTAKI_TUNE=0 beside it. It is for {outcome.plan.ranks} ranks and this model."


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _as_json(outcome: Outcome, was: StepTimes, path: Path) -> dict[str, Any]:
    found = outcome.found
    return {
        "plan": str(path),
        "knobs": outcome.knobs.to_json(),
        "recorded_knobs": outcome.recorded_knobs.to_json(),
        "extras": [{"words": extra.words, "line": extra.line} for extra in outcome.extras],
        "recorded_s": was.iteration_s,
        "recorded_spread_s": was.spread_s,
        "replayed_s": outcome.as_recorded.iteration_s,
        "before_s": outcome.before.iteration_s,
        "after_s": outcome.after.iteration_s,
        "gain": outcome.gain,
        "part_bytes": outcome.plan.part_bytes,
        "plan_alone_s": None if outcome.plan_alone is None else outcome.plan_alone.iteration_s,
        "price_error": outcome.price_error,
        "without_communication_s": outcome.without_communication_s,
        "critical_path_before": [{"words": part.words, "share": part.share} for part in outcome.parts_before],
        "critical_path_after": [{"words": part.words, "share": part.share} for part in outcome.parts_after],
        "changes": dict(found.changes),
        "search": {
            "seconds": outcome.search_s,
            "replays": found.replays,
            "walks": found.walks,
            "ranks": outcome.n_ranks,
            "in_time": found.in_time,
        },
    }


def unmet(fitting: Fitting) -> str:
    """One sentence."""
    least = min(fitting.remedies, key=lambda one: one.remedy.peak_bytes, default=None)
    how = "nothing that is known lowers it"
    if least is not None and least.remedy.peak_bytes < fitting.peak_bytes:
        how = f"the least that can be reached is {format_bytes(least.remedy.peak_bytes)}, by {least.remedy.words}"
    return (
        f"a budget of {format_bytes(fitting.budget_bytes)} cannot be met: a rank holds "
        f"{format_bytes(fitting.peak_bytes)} at the peak, and {how}"
    )


def describe_memory(fitting: Fitting) -> Iterator[str]:
    """Whether the job fits, what makes it fit, what that costs, and the lines of code; an empty line at the end."""
    holds = f"At its peak rank {fitting.rank} holds {format_bytes(fitting.peak_bytes)} ({fitting.device})"
    budget = format_bytes(fitting.budget_bytes)
    if fitting.chosen is None:
        yield f"{holds}, within {budget}: nothing need be done about memory."
        yield ""
        return
    yield f"{holds}, more than {budget}. What would do, by replay:"
    yield ""
    yield f"{'peak':>12}{'step':>12}  "
    yield f"{format_bytes(fitting.peak_bytes):>12}{ms(fitting.times.iteration_s):>12}  as it is"
    for one in fitting.remedies:
        not_enough = "" if one.remedy.peak_bytes <= fitting.budget_bytes else ", which is not enough"
        peak, step = format_bytes(one.remedy.peak_bytes), ms(one.times.iteration_s)
        yield f"{peak:>12}{step:>12}  {one.remedy.words}{not_enough}"
    yield ""
    yield f"The fastest that fits is {fitting.chosen.by}:"
    yield ""
    yield from (f"    {line}" for line in fitting.chosen.remedy.lines)
    yield ""
    yield from (f"But: {note}." for note in fitting.chosen.remedy.notes)
    yield "Steps below are with it."
    yield ""


def memory_as_json(fitting: Fitting) -> dict[str, Any]:
    """The same for machines."""
    return {
        "budget_bytes": fitting.budget_bytes,
        "peak_bytes": fitting.peak_bytes,
        "rank": fitting.rank,
        "device": fitting.device,
        "chosen": None if fitting.chosen is None else fitting.remedies.index(fitting.chosen),
        "remedies": [
            {
                "by": one.by,
                "words": one.remedy.words,
                "lines": list(one.remedy.lines),
                "notes": list(one.remedy.notes),
                "peak_bytes": one.remedy.peak_bytes,
                "step_s": one.times.iteration_s,
            }
            for one in fitting.remedies
        ],
    }
