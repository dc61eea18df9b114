"""Quantities as people read them."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Iterator
from typing import Any

from sirtaki.autotune.knobs import format_bytes
from sirtaki.autotune.model.replayer import Phase

from .memory import MemoryReplay, Peak
from .memory_budget import Fitting, TimedRemedy
from .recording import Holds, RankRecording

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


def ms(seconds: float) -> str:
    """`198.2 ms`."""
    return f"{1e3 * seconds:.4g} ms"


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


def peak_words(rank: RankRecording, replay: MemoryReplay, peak: Peak) -> str:
    """One sentence: when, how much, and what for."""
    memory = replay.memory
    kinds = Counter[Holds]()
    for place, n_bytes in peak.held.items():
        kinds[memory.allocations[place].holds] += n_bytes
    parts = ", ".join(f"{format_bytes(n_bytes)} {holds.value}" for holds, n_bytes in kinds.most_common(4) if n_bytes)
    when = f"{ms(peak.at_s - memory.begin_s)} into the step"
    return (
        f"At its peak rank {rank.rank} holds {format_bytes(peak.n_bytes)} of {memory.devices[replay.device]}, {when} "
        f"({phase_at(rank, peak.at_s).value}): {parts}."
    )


def phase_at(rank: RankRecording, at_s: float) -> Phase:
    """Of the step whose memory was recorded."""
    assert rank.memory is not None
    number = rank.memory.iteration
    spans = next((one.spans for one in rank.iterations if one.number == number), ())
    return next((span.phase for span in spans if span.begin_s <= at_s <= span.end_s), Phase.OTHER)


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
        yield f"{format_bytes(one.remedy.peak_bytes):>12}{ms(one.times.iteration_s):>12}  {_words(one, fitting)}"
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


def _words(one: TimedRemedy, fitting: Fitting) -> str:
    return one.remedy.words + ("" if one.remedy.peak_bytes <= fitting.budget_bytes else ", which is not enough")
