"""Every benchmark starts, and those that judge by more than one division judge rightly; nothing is measured here."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import memories, recordings
from fakes.memories import LEFT, OUTPUT, THERE
from hypothesis import given
from hypothesis import strategies as st

from bench.aggregator import conflicts, pack
from bench.compiled import ADVISED, EARLY, WHOLE, judge
from bench.elastic import LogEvent, faults, recovered_at_s
from bench.lib.harness import Report
from bench.memory import judge_choices, ways_of
from bench.profile import with_wrong_clock
from bench.reality import grid_settings, random_settings
from sirtaki.analysis.memory import fit
from sirtaki.analysis.what_if import Baseline
from sirtaki.comm.plan import GradientLayout
from sirtaki.comm.sparse.aggregator import HeatLayout

BENCH = Path(__file__).parents[2] / "bench"
NO_BENCHMARKS = ("demo", "gpu_wheels", "tuning_picture")


@pytest.mark.parametrize("script", sorted(path.stem for path in BENCH.glob("*.py") if path.stem not in NO_BENCHMARKS))
def test_the_help_of_every_benchmark_lists_its_flags(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    monkeypatch.delitem(sys.modules, f"bench.{script}", raising=False)
    if script == "registry_transfer":
        script = "registry"
        monkeypatch.setattr(sys, "argv", [script, "--transfer", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"bench.{script}", run_name="__main__")
    assert ended.value.code == 0
    assert "--quick" in capsys.readouterr().out


@pytest.mark.parametrize(("case", "met"), [("capped", False), ("fast", True), ("one-host", True)])
def test_parts_have_to_gain_where_links_are_slow_and_to_cost_next_to_nothing_elsewhere(case: str, met: bool) -> None:
    report = Report(name="compiled")
    samples = {WHOLE: [2.0, 1.0], EARLY: [1.9, 0.99], ADVISED: [1.0, 0.5]}
    result: dict[str, Any] = {"samples": samples, "advice": 5, "setups": {WHOLE: "gloo", EARLY: "gloo"}}
    judge(report, case, result)
    early, advised = report.bars
    assert (early.met, advised.met) == (met, True)


def test_a_remedy_for_memory_must_fit_and_be_the_fastest_that_fits() -> None:
    budget = THERE + 4 * (LEFT + OUTPUT) - LEFT
    fittings = [fit(memories.recording(), Baseline.of(memories.job()), budget_bytes=budget)]
    chosen, other = list(ways_of(fittings))[1:]

    def judged(chosen_s: float, other_s: float, **peaks: int) -> bool:
        report = Report(name="memory")
        peaks_of = {chosen: peaks.get("chosen", budget), other: peaks.get("other", budget)}
        judge_choices(report, "chain", fittings, peaks_of, {chosen: [chosen_s], other: [other_s]})
        return report.bars[0].met

    assert judged(1.0, 2.0)
    assert not judged(2.0, 1.0)
    assert judged(2.0, 1.0, other=2 * budget)
    assert not judged(1.0, 2.0, chosen=2 * budget)


def test_a_wrong_clock_belongs_to_another_host_unless_hosts_are_equal() -> None:
    true = recordings.recording()
    told = with_wrong_clock(true, by_s=0.05, drift=0.0)
    assert told.ranks[1].iterations[0].begin_s == pytest.approx(true.ranks[1].iterations[0].begin_s + 0.05)
    assert told.ranks[1].offset_s == pytest.approx(true.ranks[1].offset_s - 0.05)
    assert with_wrong_clock(true, by_s=0.05, drift=0.0, hosts=False).job == true.job


def test_random_plans_and_the_grid_fit_the_layout_and_are_the_same_on_every_rank() -> None:
    layout = GradientLayout(sizes=(100_000,) * 20)
    settings, again = (random_settings(layout, 12, np.random.default_rng(3)) for _ in range(2))
    assert settings == again
    for number, knobs in enumerate(settings):
        knobs.to_plan(layout)  # checks that it covers every element once
        assert (knobs.cuts is not None) == bool(number % 2)
    grid = grid_settings(layout)
    assert len(set(grid)) == len(grid)


# ── Jobs whose ranks are killed ──────────────────────────────────────────────────────────────────────────────────


def event(kind: str, at_s: float, *, pid: int = 1, step: int = 0, size: int = 3, digest: str = "") -> LogEvent:
    return LogEvent(pid=pid, kind=kind, at_s=at_s, step=step, size=size, digest=digest)


def steps(pid: int, *times_and_sizes: tuple[float, int]) -> list[LogEvent]:
    return [event("step", at_s, pid=pid, step=n, size=size) for n, (at_s, size) in enumerate(times_and_sizes)]


def test_recovery_ends_when_the_last_survivor_has_made_a_step_that_the_dead_cannot_have_been_in() -> None:
    events = {1: steps(1, (1.0, 3), (2.1, 3), (2.5, 2)), 2: steps(2, (1.0, 3), (2.8, 2), (2.9, 2))}
    assert recovered_at_s(events, killed_s=2.0, size=3, last_step=1) == 2.8
    own = steps(1, (1.0, 3), (2.1, 3), (9.0, 3))  # 0, with the one that is killed; 1, that it may have been in; 2
    assert recovered_at_s({1: own[:2]}, killed_s=2.0, size=3, last_step=0) is None
    assert recovered_at_s({1: own}, killed_s=2.0, size=3, last_step=0) == 9.0


@pytest.mark.parametrize(
    ("later", "word"),
    [
        (event("resume", 2.0, pid=2, step=5), None),
        (event("resume", 2.0, pid=2, step=4), "resumes at step 4 after the commit of step 5"),
        (event("commit", 2.0, pid=2, step=5, digest="b"), "2 different sets of parameters were committed at step 5"),
    ],
)
def test_a_lost_and_an_unequal_commit_are_found(later: LogEvent, word: str | None) -> None:
    found = faults({1: [event("commit", 1.0, step=5, digest="a")], 2: [later]})
    assert len(found) == (word is not None)
    assert word is None or word in found[0]


# ── Packets of the aggregator ────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers(0, 300), unique=True, max_size=120), st.integers(1, 40), st.integers(1, 30))
def test_rows_are_packed_as_the_papers_listing_does(rows: list[int], registers: int, capacity: int) -> None:
    packets: list[list[int]] = [[] for _ in range(-(-len(rows) // capacity))]
    left = []
    for row in rows:
        free = (p for p in packets if len(p) < capacity and all(other % registers != row % registers for other in p))
        next(free, left).append(row)
    packets += [left[begin : begin + capacity] for begin in range(0, len(left), capacity)]
    assert pack(rows, registers=registers, capacity=capacity) == [packet for packet in packets if packet]


@given(st.integers(1, 500), st.integers(1, 90), st.integers(1, 64))
def test_of_all_rows_it_makes_packets_of_consecutive_ones_without_conflicts(
    rows: int, width: int, registers: int
) -> None:
    layout = HeatLayout(rows=rows, width=width, registers=registers)
    packed = pack(range(rows), registers=registers, capacity=layout.floats // width)
    assert [row for packet in packed for row in packet] == list(range(rows))
    assert conflicts(packed, registers=registers) == 0
    assert conflicts([[0, 1, 2], [0, 4, 8], [1]], registers=4) == 2
