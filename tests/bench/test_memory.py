"""How predictions are judged by what was measured; nothing is measured here."""

from __future__ import annotations

from fakes import memories
from fakes.memories import LEFT, OUTPUT, THERE

from bench.lib.harness import Report
from bench.memory import AS_IS, judge_choices, judge_peaks, judge_times, way_of, ways_of
from sirtaki.analysis.memory import Fitting, fit, memory_passes

WHOLE = THERE + 4 * (LEFT + OUTPUT)


def asked() -> list[Fitting]:
    passes = memory_passes()[:2]
    return [fit(memories.recording(), memories.job(), passes, budget_bytes=WHOLE - LEFT)]


def test_each_way_is_what_a_rank_can_do() -> None:
    unchanged, passes, again = ways_of(asked()).values()
    assert unchanged == ({}, WHOLE)
    assert passes[0] == {"lines": [], "passes": 2}
    assert again[0]["passes"] == 1
    assert again[0]["lines"][1] == "from torch.utils.checkpoint import checkpoint"
    both = way_of([*again[0]["lines"], "optimizer = hvd.DistributedOptimizer(..., backward_passes_per_step=4)", "# 4"])
    assert both == {"lines": again[0]["lines"], "passes": 4}


def test_a_peak_that_is_off_by_more_than_the_bar_misses_it() -> None:
    report, fittings = Report(name="memory"), asked()
    peaks = {name: n_bytes for name, (_, n_bytes) in ways_of(fittings).items()}
    peaks[AS_IS] = round(WHOLE / 1.06)
    judge_peaks(report, "chain", fittings, peaks)
    assert [bar.met for bar in report.bars] == [False, True, True]
    assert report.rows[0]["off"].startswith("+6.0")


def test_times_are_judged_by_how_much_longer_a_step_gets() -> None:
    report = Report(name="memory")
    judge_times(report, "chain", {AS_IS: [1.0, 1.2, 9.0], "again": [1.5], "twice": [1.8]},
                {AS_IS: 0.5, "again": 0.62, "twice": 0.9})  # fmt: skip
    again, twice = report.bars
    assert again.met
    assert not twice.met
    assert round(twice.value, 6) == 0.2


def test_the_choice_must_fit_and_be_the_fastest_of_what_fits() -> None:
    fittings = asked()
    (fitting,) = fittings
    chosen, other = list(ways_of(fittings))[1:]
    peaks = {chosen: fitting.budget_bytes, other: fitting.budget_bytes}

    def judged(took_s: dict[str, list[float]], peaks: dict[str, int]) -> bool:
        report = Report(name="memory")
        judge_choices(report, "chain", fittings, peaks, took_s)
        return report.bars[0].met

    assert judged({chosen: [1.0], other: [2.0]}, peaks)
    assert not judged({chosen: [2.0], other: [1.0]}, peaks)
    assert judged({chosen: [2.0], other: [1.0]}, {**peaks, other: 2 * fitting.budget_bytes})
    assert not judged({chosen: [1.0], other: [2.0]}, {**peaks, chosen: 2 * fitting.budget_bytes})
