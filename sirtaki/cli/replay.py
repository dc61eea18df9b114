"""`sirtaki replay`: print the parts of a recorded job's step time, and predict the step time after changes, such as
another plan.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sirtaki.analysis.global_graph import (
    MeanStepTimes,
    alone_s,
    ms,
    path_lines,
    percent,
    play,
    recorded,
    replayed,
)
from sirtaki.analysis.job_model import JobModel, JobOperation, histories, job_model
from sirtaki.analysis.what_if import (
    Baseline,
    daydream,
    knobs_of,
    limitations,
    plan_refusal,
    with_batches,
    with_faster_loader,
    with_knobs,
    with_plans,
    without_stragglers,
)
from sirtaki.autotune.knobs import MIB
from sirtaki.comm.plan import CommPlan, TransportKind
from sirtaki.engine.tuning.plans import PLAN_FILE
from sirtaki.errors import ConfigError, ReplayError
from sirtaki.measures import counted, milliseconds

from .output import add_formats, add_recording, positive, print_table, printed, read_recording, whole

ELSEWHERE = (
    "`sirtaki plan LOG --ranks N --link-gbit G` predicts other numbers of ranks and other networks, from the job's "
    "trial log (SIRTAKI_TRIAL_LOG), with plans made for them and with the error that the model had for this job"
)
"""Reference to `sirtaki plan`, for predictions of other links, and for questions that a recording cannot answer."""


def configure(parser: ArgumentParser) -> None:
    """Add the options of `sirtaki replay` to the parser."""
    add_recording(parser)
    parser.add_argument("--ranks", type=whole(1), metavar="N", help="refused: `sirtaki plan` answers this question")
    parser.add_argument("--link-gbit", type=positive, metavar="G", help="refused: `sirtaki plan` answers this question")
    parser.add_argument("--unit-mib", type=positive, metavar="M", help="predict the step with units of M MiB")
    parser.add_argument("--streams", type=whole(1), metavar="N", help="predict the step with N streams")
    parser.add_argument(
        "--transport",
        choices=[kind.value for kind in TransportKind],
        help="predict the step over another transport, if the tuning phase has measured that transport",
    )
    parser.add_argument("--plan", type=Path, metavar="FILE", help="predict the step with the units of a plan file")
    parser.add_argument(
        "--no-straggler", action="store_true", help="predict the step if no rank were slower than the median rank"
    )
    parser.add_argument(
        "--loader-times", type=positive, metavar="F", help="predict the step with a data loader F times as fast"
    )
    parser.add_argument(
        "--batches",
        type=positive,
        nargs="+",
        metavar="F",
        help="predict the throughput with batches F times as large. Can be combined with the other options",
    )
    add_formats(parser)


def main(options: Namespace) -> int:
    """Print the recorded and the replayed (simulated) step time, the parts of the critical path, and the predicted step
    time under the conditions that options set.

    Raises:
        RecordingError: the recording is empty.
        ReplayError: the recording cannot be replayed, or the requested conditions cannot be predicted.
        ConfigError: the plan cannot be read.
    """
    found = histories(read_recording(options))
    job, was = job_model(found), recorded(found)
    played = play(job)
    base = Baseline.of(job, was)
    rule = None
    with suppress(ReplayError):
        rule = daydream(found, job)
    words, changed, replanned = _changed(options, base)
    if options.batches:
        return _show_batches(options, base, changed, words, replanned=replanned)
    asked = base.answer(words, changed, replanned=replanned) if words else None
    remedies = base.single_remedies() if asked is None else (asked,)
    answers = [one for one in remedies if one.is_worth_reporting or one is asked]
    open_ones = [one.words for one in remedies if one.is_open and one is not asked]
    elsewhere = (ELSEWHERE,) if any(one.words.startswith("the links") for one in answers) else ()
    notes = (*job.notes, *(limitations(job) if asked is None else ()), *elsewhere)
    path = path_lines(played)
    told = {"recorded": _times(was), "replayed": _times(base.times), "daydream": None if rule is None else _times(rule)}
    what_if = [{**one.row(), "times": _times(one.times)} for one in answers]
    parts = [asdict(part) for part in path]
    shown = {**told, "critical_path": parts, "what_if": what_if, "notes": list(notes)}
    if printed(options, shown, [one.row() for one in answers]):
        return 0
    knobs = job.buffers[0].knobs.describe() if job.buffers else "none, because no gradients were exchanged"
    hosts = len(set(job.hosts.values()))
    print(
        f"The job had {counted(len(job.ranks), 'rank')} on {counted(hosts, 'host')}; "
        f"{counted(was.iterations, 'iteration')} {'was' if was.iterations == 1 else 'were'} recorded."
    )
    print(f"The job's communication plan was: {knobs}.\n")
    print_table(("", "recorded", "replayed", "error", "bytes ÷ bandwidth", "its error"), _table(was, base.times, rule))
    print("\nThe critical path of the recorded iterations, over all ranks, is:")
    for part in path:
        print(f"  {part.describe()}")
    own_s, units_s = (min(part_s, was.iteration_s) for part_s in alone_s(played))
    print(
        f"\nWithout waits for other ranks, the slowest rank needs {ms(own_s)} per step. All communication alone needs "
        f"{ms(units_s)}."
    )
    sure = "is sure to" if open_ones else "would"
    print("\nWhat if" if answers else f"\nNo single remedy {sure} shorten the step by more than 1 %.")
    for one in answers:
        print(f"  {one.words}: {one.describe()}")
    if open_ones:
        print(
            f"\nThe simulation cannot tell whether a step would be shorter if {'; or if '.join(open_ones)}. "
            "To find out, make this change in the job and measure it."
        )
    for note in notes:
        print(f"\nNote: {note}.")
    return 0


def _changed(options: Namespace, base: Baseline) -> tuple[str, JobModel, bool]:
    """Apply the changes that the options request to the recorded job.

    Returns:
        The changes in words; the changed job; and whether a change concerns how gradients are cut into units (buckets)
        or sent.
    """
    if options.link_gbit or options.ranks:
        raise ReplayError(f"a recording does not answer this question: {ELSEWHERE}")
    job, words, replanned = base.job, list[str](), False
    unit_bytes = round(options.unit_mib * MIB) if options.unit_mib else None
    if options.plan is not None:
        if len(job.buffers) != 1:
            raise ReplayError(
                f"--plan supports only jobs with one gradient buffer, and this job has {len(job.buffers)}, e.g. for "
                "several dtypes; use --unit-mib and --streams instead"
            )
        words, replanned = [f"the plan were {options.plan}"], True
        job = with_plans(job, {job.buffers[0].number: _plan(options.plan)})
    elif unit_bytes or options.streams or options.transport:
        transport = TransportKind(options.transport) if options.transport else None
        said = [
            f"units of {options.unit_mib:g} MiB" if unit_bytes else "",
            f"{options.streams} streams" if options.streams else "",
            f"over {options.transport}" if transport else "",
        ]
        words, replanned = [f"the plan were {', '.join(filter(None, said))}"], True
        job = with_knobs(job, knobs_of(job, unit_bytes=unit_bytes, streams=options.streams, transport=transport))
    if (why := plan_refusal(base.job, job.plans)) is not None:
        raise ReplayError(f"the step time cannot be simulated if {words[0]}: {why}; measure this change in a job")
    if options.no_straggler:
        words.append("no rank were slower than most")
        job = without_stragglers(job)
    if options.loader_times:
        words.append(f"data came {options.loader_times:g} times as fast")
        job = with_faster_loader(job, options.loader_times)
    return ", ".join(words), job, replanned


def _for_nothing(one: JobOperation) -> JobOperation:
    return replace(one, fixed_s=0.0, link_s=0.0, host_s=0.0, processor_s=0.0, lag_s=0.0)


def _show_batches(options: Namespace, base: Baseline, changed: JobModel, words: str, *, replanned: bool) -> int:
    """Print the predicted throughput for larger and smaller batches, relative to the recorded batch, and how much of a
    step is communication that computation does not hide.
    """
    rows = list[dict[str, Any]]()
    for factor in sorted({1.0, *options.batches}):
        job = with_batches(changed, factor)
        answer = base.answer(words, job, replanned=replanned)
        apart = replayed(play(job.changed(operation=_for_nothing)))
        rows.append(
            {
                "batch": factor,
                "iteration_s": answer.times.iteration_s,
                "low_s": answer.low_s,
                "high_s": answer.high_s,
                "told": answer.is_precise,
                "throughput": factor * base.times.iteration_s / answer.times.iteration_s,
                "exposed": max(0.0, 1.0 - apart.iteration_s / answer.times.iteration_s),
            }
        )
    if printed(options, {"changed": words, "batches": rows}, rows):
        return 0
    print(f"If {words}:\n" if words else "")
    titles = ("batch", "a step", "from … to, ms", "samples a second", "part of a step that is exposed communication")
    cells = (
        (
            f"{row['batch']:g} ×",
            ms(row["iteration_s"]) if row["told"] else "",
            f"{milliseconds(row['low_s'])} to {milliseconds(row['high_s'])}",
            f"{row['throughput']:.2f} ×" if row["told"] else "only a trial tells",
            percent(row["exposed"]) if row["told"] else "",
        )
        for row in rows
    )
    print_table(titles, cells)
    print(
        "\nThe prediction assumes that forward and backward passes take time in proportion to the batch size. If a "
        "part of this time is constant, larger batches have a higher throughput than predicted, and smaller batches a "
        "lower one."
    )
    return 0


def _plan(path: Path) -> CommPlan:
    try:
        return CommPlan.from_json(json.loads(path.read_text(encoding="utf-8")))
    except IsADirectoryError as err:
        raise ConfigError(
            f"{path} (--plan) is a folder; pass the plan file in it, which `sirtaki optimize` has named {PLAN_FILE}"
        ) from err
    except (OSError, KeyError, TypeError, ValueError) as err:
        raise ConfigError(
            f"the communication plan {path} (--plan) cannot be read ({err!r}); write one with `sirtaki optimize`"
        ) from err


def _table(was: MeanStepTimes, now: MeanStepTimes, rule: MeanStepTimes | None) -> Iterator[list[str]]:
    for name in ("iteration", "forward", "backward"):
        recorded_s = getattr(was, f"{name}_s")
        row = [name, ms(recorded_s) + (f" ± {ms(was.spread_s)}" if name == "iteration" else "")]
        for told in (now, rule):
            told_s = None if told is None else getattr(told, f"{name}_s")
            error = f"{100 * (told_s / recorded_s - 1):+.1f} %" if told_s is not None and recorded_s > 0 else ""
            row += ["" if told_s is None else ms(told_s), error]
        yield row


def _times(times: MeanStepTimes) -> dict[str, Any]:
    return {**asdict(times), "phases_s": {phase.value: seconds for phase, seconds in times.phases_s.items()}}
