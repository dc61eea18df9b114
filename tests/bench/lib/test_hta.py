"""HolisticTraceAnalysis's rule, and the package itself where it is installed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import recordings

from bench.lib import hta


def test_all_ranks_are_moved_alike_so_what_a_clock_is_wrong_by_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hta, "version", lambda: None)
    whole = recordings.recording()
    told = replace(whole, ranks={0: whole.ranks[0], 1: recordings.shifted(whole.ranks[1], by_s=0.05)})
    assert hta.step_ends_s(whole)[0] == pytest.approx([0.1, 0.2, 0.3], abs=1e-6)
    assert hta.step_ends_s(told) == {
        0: pytest.approx([0.1, 0.2, 0.3], abs=1e-6),
        1: pytest.approx([0.15, 0.25, 0.35], abs=1e-6),
    }


def test_the_package_does_as_its_rule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    if hta.version() is None:
        pytest.skip("HolisticTraceAnalysis is not installed")
    whole = recordings.recording()
    told = replace(whole, ranks={0: whole.ranks[0], 1: recordings.shifted(whole.ranks[1], by_s=-0.02)})
    found = hta.step_ends_s(told)
    monkeypatch.setattr(hta, "version", lambda: None)
    assert {rank: pytest.approx(ends_s, abs=2e-6) for rank, ends_s in hta.step_ends_s(told).items()} == found
