"""What the page and the terminal say in words."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from sirtaki.replay.remedies import WORTH_SAYING, Answer

from ..quantities import ms
from .exposure import exposures
from .findings import Findings
from .kinds import NOT_TOLD_APART, Kind

LEAST_SPREAD_S = 1e-6
"""What steps differ by less is not worth saying."""

WITHOUT_OPERATORS = f"What the script does besides is: {NOT_TOLD_APART}."


def heading(found: Findings) -> str:
    """Which recording it is."""
    buffers = found.histories.recording.job.buffers
    plan = f"; {buffers[0].knobs.describe()}" if buffers else ""
    return f"{found.folder.resolve().name}: {found.lines[0]}{plan}."


def problems(found: Findings) -> Iterator[str]:
    """What is missing or wrong, a sentence each."""
    return (f"{problem[:1].upper()}{problem[1:].rstrip('.')}." for problem in found.problems)


def sentences(found: Findings) -> Iterator[str]:
    """How long a step takes, what most of it is, and what would help most."""
    times, played = found.times, found.played
    spread = f" (± {ms(times.spread_s)} from step to step)" if times.spread_s > LEAST_SPREAD_S else ""
    yield f"A step takes {ms(times.iteration_s)}{spread}."
    exposed_s = statistics.fmean(one.exposed_s for one in exposures(found.histories))
    if exposed_s > 0:
        yield f"{ms(exposed_s)} of it is communication that no computation hides (mean of ranks)."
    if played is None or found.is_far:
        return
    if played.parts:
        yield f"The largest part of the critical path: {played.parts[0].describe()}."
        if not found.has_operators:
            yield WITHOUT_OPERATORS
    if played.best is not None:
        yield f"What would help most: if {played.best.words}, a step would take {gain(played.best)}."


def kind_words(kind: Kind, found: Findings) -> str:
    """Of a kind of time, as far as it was recorded."""
    return NOT_TOLD_APART if kind is Kind.OTHER and not found.has_operators else kind.value


def gain(one: Answer) -> str:
    """`12 % less`; what is too little to be said brings nothing."""
    if abs(one.gain) < WORTH_SAYING:
        return "as long"
    return f"{percent(abs(one.gain))} {'less' if one.gain > 0 else 'longer'}"


def signed_ms(seconds: float) -> str:
    """`+1.2 ms`."""
    return f"{1e3 * seconds:+.3g} ms"


def percent(share: float) -> str:
    """`12 %`, `3.4 %`."""
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"
