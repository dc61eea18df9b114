"""What the report says in words, on the page and on the terminal alike."""

from collections import Counter
from collections.abc import Iterator
from statistics import median

from sirtaki.autotune.knobs import Knobs, format_bytes
from sirtaki.autotune.meta.assignment import DEFAULT_ARM, Purpose
from sirtaki.autotune.model.forecast import BELIEVED
from sirtaki.comm.plan import Algorithm
from sirtaki.engine.trial_log_reader import Measurement, Outcome, Retune, TrialLog
from sirtaki.gain import faster

FINALS = (Purpose.FINALS.value, "verify", "guard_winner", "guard_default")  # the latter in logs of older releases


def summary(log: TrialLog) -> Iterator[str]:
    """What was kept, what it gains, the bound, and why it ended so."""
    kept = log.outcome
    yield f"{len(log.measurements)} measurements in {log.last_iteration} training iterations."
    yield f"Kept: {kept.knobs.describe()}, proposed by {kept.arm}."
    yield from _gain(kept)
    yield from _bound(log)
    if kept.reason:
        yield f"Why: {kept.reason}."
    yield from map(_retune, log.retunes)


def _retune(retune: Retune) -> str:
    """Why there was a re-tune and what came of it, in one sentence."""
    took = "was not what it had been" if retune.ratio is None else f"took {retune.ratio:.2g} times as long as before"
    begin = f"After iteration {retune.iteration} communication {took}:"
    found = retune.result
    if found is None:
        return f"{begin} the log ends before another setting was chosen."
    if found.knobs == retune.running:
        return f"{begin} nothing better was found."
    gain = "" if found.default_span_s is None else f", {faster(found.default_span_s, found.span_s)} than what ran"
    return f"{begin} from then on {found.knobs.describe()}{gain}."


def _gain(kept: Outcome) -> Iterator[str]:
    """What tuning has brought."""
    if kept.default_span_s is None:
        yield f"Communication takes {ms(kept.span_s)}."
        return
    before_s, after_s, usual = kept.default_span_s, kept.span_s, kept.usual
    yield f"Communication takes {ms(after_s)}, {ms(before_s)} by default ({faster(before_s, after_s)})."
    if usual is not None:
        yield (
            f"A step takes {ms(usual.step_s(after_s))}, {ms(usual.step_s(before_s))} by default "
            f"({faster(usual.step_s(before_s), usual.step_s(after_s))}); the backward pass does not hide "
            f"{ms(usual.exposed_s(after_s))} of its communication, {ms(usual.exposed_s(before_s))} by default."
        )


def _bound(log: TrialLog) -> Iterator[str]:
    """What can be reached at all; nothing where that is unknown."""
    if log.model is None or log.bound_s is None:
        return
    if log.bound_s < log.model.bound_s:
        yield (
            f"The probes alone would have said that no plan can take less than {ms(log.model.bound_s)}, but "
            f"gradients have travelled faster since, so the bound is drawn at the fastest setting, {ms(log.bound_s)}."
        )
    else:
        yield (
            f"No plan can take less than {ms(log.bound_s)}: the backward pass from its first gradient on, or all bytes "
            "at the best rate that was measured."
        )


def in_words(knobs: Knobs) -> str:
    """What the knobs mean, for people who have not read about units and streams."""
    if knobs.cuts is not None:
        sizes = (
            f"in {len(knobs.cuts)} units whose sizes a planner chose, {format_bytes(knobs.unit_bytes)} in the middle"
        )
    else:
        sizes = f"in units of {format_bytes(knobs.unit_bytes)}: smaller gradients are packed, larger ones cut"
    at_once = "one at a time" if knobs.streams == 1 else f"up to {knobs.streams} at the same time, on as many streams"
    way = (
        "first inside each node, then between nodes" if knobs.algorithm is Algorithm.HIERARCHICAL else "all ranks alike"
    )
    threads = "" if knobs.threads is None else f", with {knobs.threads} GPU threads each"
    return f"Gradients travel {sizes}; {at_once}, over {knobs.transport.value.replace('_', ' ')}, {way}{threads}."


def why_not_the_fastest(log: TrialLog) -> Iterator[str]:
    """Says so where the first of the fastest settings is not what was kept."""
    if log.result is None or fastest(log)[0].knobs == log.result.knobs:
        return
    compared: dict[Knobs, list[float]] = {}
    for trial in log.measurements:
        if trial.succeeded and trial.purpose in FINALS:
            compared.setdefault(trial.knobs, []).append(trial.span_s)
    words = "The first row is not what was kept: of many measurements, one is short by luck."
    if compared:
        times = sorted((median(spans_s), knobs.describe()) for knobs, spans_s in compared.items())
        words += " Therefore the fastest settings and the default ran in turns at the end, and took: "
        words += ", ".join(f"{name} {ms(span_s)}" for span_s, name in times) + "."
    yield words


def fastest(log: TrialLog) -> list[Measurement]:
    """The shortest measurement of each setting, the fastest first."""
    shortest = sorted((trial for trial in log.measurements if trial.succeeded), key=lambda trial: trial.span_s)
    unique = {trial.knobs: trial for trial in reversed(shortest)}
    return sorted(unique.values(), key=lambda trial: trial.span_s)


def in_order(log: TrialLog) -> Iterator[str]:
    """How well the planners' model predicted what was measured; nothing where it did not."""
    predicted = [trial for trial in log.measurements if trial.succeeded and trial.predicted_s is not None]
    if not predicted or predicted[-1].agreement is None or len({trial.knobs for trial in predicted}) < 2:
        return
    times = median(trial.span_s / trial.predicted_s for trial in predicted if trial.predicted_s is not None)
    yield (
        f"Of two settings that ran, the faster one was the one that the planners' model had predicted to be faster in "
        f"{_right(predicted[-1].agreement):.0f} % of the cases (the more they differ the more they count; 50 % is "
        f"guessing). In the median, measured times were {times:.2g} times the predicted ones."
    )
    first_doubted = next((trial for trial in log.measurements if trial.believed is False), None)
    if first_doubted is not None:
        again = "" if log.measurements[-1].believed is False else ", and were asked again later"
        yield (
            f"From iteration {first_doubted.iteration} on it was below {_right(BELIEVED):.0f} %, so planners were not "
            f"asked any more{again}."
        )


def _right(agreement: float) -> float:
    """Pairs in the predicted order, in percent."""
    return 50.0 * (1.0 + agreement)


def who_was_trusted(log: TrialLog) -> Iterator[str]:
    """How often each arm was asked, and what it found."""
    asked = Counter(trial.arm for trial in searching(log))
    found = Counter(trial.arm for trial in searching(log) if trial.was_best)
    each = ", ".join(f"{arm} {count} ({found[arm]})" for arm, count in asked.most_common() if arm != DEFAULT_ARM)
    if each:
        yield f"Settings proposed by each, and how many of them were the best so far: {each}."


def searching(log: TrialLog) -> list[Measurement]:
    """Trials that arms proposed, each once; without any such, all measurements."""
    trials = [trial for trial in log.measurements if trial.purpose == Purpose.TRIAL.value] or log.measurements
    first: dict[tuple[str, Knobs], Measurement] = {}
    for trial in trials:
        before = first.setdefault((trial.arm, trial.knobs), trial)
        if trial.was_best and not before.was_best:
            first[trial.arm, trial.knobs] = trial
    return list(first.values())


def ms(seconds: float) -> str:
    """A time in milliseconds."""
    return f"{1e3 * seconds:.3g} ms"
