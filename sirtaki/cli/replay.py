"""`sirtaki replay`: what a recorded job's step is made of, and how long it would take if something were different."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sirtaki.analysis.global_graph import (
    Part,
    StepTimes,
    communication_s,
    computation_s,
    ms,
    parts,
    play,
    recorded,
    replayed,
)
from sirtaki.analysis.job_model import JobModel, histories, job_model
from sirtaki.analysis.recording_files import read
from sirtaki.analysis.what_if import (
    Answer,
    answer,
    daydream,
    knobs_of,
    price_error,
    price_notes,
    remedies,
    unanswered,
    with_faster_loader,
    with_knobs,
    with_link,
    with_plans,
    with_ranks,
    without_stragglers,
)
from sirtaki.autotune.knobs import MIB
from sirtaki.comm.plan import CommPlan, TransportKind
from sirtaki.errors import ConfigError, ReplayError

from .optimize import positive

BYTES_PER_GBIT = 1e9 / 8
LEAST_SHARE = 0.005
"""Of the step; smaller parts are shown as one."""


def configure(parser: ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="what `sirtaki profile` has written")
    parser.add_argument("--ranks", type=_count, metavar="N", help="as many ranks, like those that were recorded")
    parser.add_argument("--link-gbit", type=positive, metavar="G", help="another rate of the links between hosts")
    parser.add_argument("--unit-mib", type=positive, metavar="M", help="units of another size")
    parser.add_argument("--streams", type=_count, metavar="N", help="another number of streams")
    parser.add_argument(
        "--transport", choices=[kind.value for kind in TransportKind], help="another transport, if it was probed"
    )
    parser.add_argument("--plan", type=Path, metavar="FILE", help="units as in this plan, a JSON file")
    parser.add_argument("--no-straggler", action="store_true", help="no rank slower than the median one")
    parser.add_argument("--loader-times", type=positive, metavar="F", help="a data loader F times as fast")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)


def main(options: Namespace) -> int:
    """Prints recorded times beside replayed ones, what the step is made of, and what would change it.

    Raises:
        RecordingError: there is nothing to show.
        ReplayError: what is there cannot be replayed, or not as it was asked.
        ConfigError: the plan cannot be read.
    """
    recording = read(options.folder)
    for problem in recording.problems:
        print(f"sirtaki replay: {problem}", file=sys.stderr)
    found = histories(recording)
    job = job_model(found)
    played = play(job)
    was, now = recorded(found), replayed(played)
    try:
        rule = daydream(found, job)
    except ReplayError:
        rule = None
    asked = _asked(options, job, now.iteration_s)
    answers = [asked] if asked is not None else list(remedies(job, before_s=now.iteration_s))
    notes = (
        job.notes
        if asked is not None
        else (*job.notes, *unanswered(job), *price_notes(price_error(job, before_s=now.iteration_s)))
    )
    if options.json:
        print(json.dumps(_as_json(was, now, rule, parts(played), answers, notes), indent=1))
        return 0
    print(_head(job, was))
    Console(highlight=False).print(_table(was, now, rule))
    print("\nThe critical path, over all ranks:")
    for line in _path(parts(played)):
        print(f"  {line}")
    alone = [ms(part_s / was.iterations) for part_s in (computation_s(played.graph), communication_s(played.graph))]
    print("\nWithout waiting for others a rank would take {} at most, all communication {}.".format(*alone))
    print("\nWhat if" if answers else "\nNo single remedy would shorten the step by more than 1 %.")
    for one in answers:
        print(f"  {describe(one)}")
    for note in notes:
        print(f"\nNote: {note}.")
    return 0


def _asked(options: Namespace, job: JobModel, before_s: float) -> Answer | None:
    """All that the options say, at once; None if they say nothing."""
    words: list[str] = []
    for said, change in _changes(options):
        words.append(said)
        job = change(job)
    return answer(", ".join(words), job, before_s=before_s) if words else None


def _changes(options: Namespace) -> list[tuple[str, Callable[[JobModel], JobModel]]]:
    found: list[tuple[str, Callable[[JobModel], JobModel]]] = []
    transport = TransportKind(options.transport) if options.transport else None
    unit_bytes = round(options.unit_mib * MIB) if options.unit_mib else None
    if options.plan is not None:
        plan = _plan(options.plan)
        found.append((f"the plan were {options.plan}", lambda job: with_plans(job, {_buffer(job): plan})))
    elif unit_bytes or options.streams or transport:
        asked = [
            f"units of {options.unit_mib:g} MiB" if unit_bytes else "",
            f"{options.streams} streams" if options.streams else "",
            f"over {transport.value}" if transport else "",
        ]

        def cut(job: JobModel) -> JobModel:
            return with_knobs(job, knobs_of(job, unit_bytes=unit_bytes, streams=options.streams, transport=transport))

        found.append((f"the plan were {', '.join(filter(None, asked))}", cut))
    if options.no_straggler:
        found.append(("no rank were slower than most", without_stragglers))
    if options.loader_times:
        found.append(
            (
                f"data came {options.loader_times:g} times as fast",
                lambda job: with_faster_loader(job, options.loader_times),
            )
        )
    if options.link_gbit:
        rate = options.link_gbit * BYTES_PER_GBIT
        found.append((f"links had {options.link_gbit:g} Gbit/s", lambda job: with_link(job, rate)))
    if options.ranks:
        found.append((f"there were {options.ranks} ranks", lambda job: with_ranks(job, options.ranks)))
    return found


def _buffer(job: JobModel) -> int:
    if len(job.buffers) != 1:
        raise ReplayError(f"--plan is of one buffer, and the job has {len(job.buffers)}: use --unit-mib and --streams")
    return job.buffers[0].number


def _plan(path: Path) -> CommPlan:
    try:
        return CommPlan.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as err:
        raise ConfigError(f"the plan cannot be read: {err}") from err
    except (KeyError, TypeError, ValueError) as err:
        raise ConfigError(f"{path} is no plan: {err!r}") from err


def _head(job: JobModel, was: StepTimes) -> str:
    hosts = len(set(job.hosts.values()))
    knobs = job.buffers[0].knobs.describe() if job.buffers else "no gradients exchanged"
    return (
        f"{len(job.ranks)} {_plural(len(job.ranks), 'rank')} on {hosts} {_plural(hosts, 'host')}, "
        f"{was.iterations} {_plural(was.iterations, 'iteration')}; {knobs}\n"
    )


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


def _table(was: StepTimes, now: StepTimes, rule: StepTimes | None) -> Table:
    table = Table("", "recorded", "replayed", "error", "bytes ÷ bandwidth", "its error", box=None)
    for name in ("iteration", "forward", "backward"):
        recorded_s, replayed_s = (getattr(times, f"{name}_s") for times in (was, now))
        told_s = None if rule is None else getattr(rule, f"{name}_s")
        table.add_row(
            name,
            ms(recorded_s) + (f" ± {ms(was.spread_s)}" if name == "iteration" else ""),
            ms(replayed_s),
            _error(replayed_s, recorded_s),
            *(("", "") if told_s is None else (ms(told_s), _error(told_s, recorded_s))),
        )
    return table


def _error(told_s: float, was_s: float) -> str:
    return f"{100 * (told_s / was_s - 1):+.1f} %" if was_s > 0 else ""


def _path(found: Sequence[Part]) -> list[str]:
    shown = [part for part in found if part.share >= LEAST_SHARE]
    rest = sum(part.share for part in found) - sum(part.share for part in shown)
    lines = [part.describe() for part in shown]
    return [*lines, f"{rest:.1%} is all else".replace("%", " %")] if rest > 0 else lines


def describe(one: Answer) -> str:
    """`the links were twice as fast: 320 ms a step, 22 % less`."""
    change = f"{abs(one.gain):.0%} {'less' if one.gain >= 0 else 'more'}".replace("%", " %")
    return f"{one.words}: {ms(one.times.iteration_s)} a step, {change}"


def _as_json(
    was: StepTimes,
    now: StepTimes,
    rule: StepTimes | None,
    path: Sequence[Part],
    answers: Sequence[Answer],
    notes: Sequence[str],
) -> dict[str, Any]:
    return {
        "recorded": _times_json(was),
        "replayed": _times_json(now),
        "daydream": None if rule is None else _times_json(rule),
        "critical_path": [asdict(part) for part in path],
        "what_if": [{"words": one.words, "times": _times_json(one.times), "gain": one.gain} for one in answers],
        "notes": list(notes),
    }


def _times_json(times: StepTimes) -> dict[str, Any]:
    return {
        "iteration_s": times.iteration_s,
        "spread_s": times.spread_s,
        "iterations": times.iterations,
        "phases_s": {phase.value: seconds for phase, seconds in times.phases_s.items()},
    }
