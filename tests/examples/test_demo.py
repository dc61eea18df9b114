"""What `make demo` prints about measured times."""

from __future__ import annotations

from typing import Any

import pytest

from bench import demo

STEADY = [0.0146, 0.0140, 0.0151, 0.0144, 0.0148, 0.0143, 0.0150, 0.0147]
NOISY = [0.0121, 0.0150, 0.0166, 0.0128, 0.0139, 0.0171, 0.0126, 0.0155]


def test_a_difference_is_printed_only_if_its_interval_excludes_1() -> None:
    slower = [1.4 * seconds for seconds in reversed(STEADY)]
    samples = {"a": STEADY, "b": NOISY, "slow": slower, "short": STEADY[:5]}
    assert demo.compared(samples, "b", "a").startswith("no difference measured (0.")
    assert demo.compared(samples, "a", "slow").startswith("1.4")
    assert demo.compared(samples, "slow", "a").startswith("0.7")
    assert demo.compared(samples, "short", "slow") == "no difference measured (5 rounds, 6 are needed)"


def test_an_incomplete_demonstration_shows_what_was_measured_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    samples = dict.fromkeys((demo.DDP, demo.UNTUNED, demo.TUNED, demo.REMEMBERED), STEADY[:2])
    tuned: dict[str, Any] = {"setting": "gloo flat", "steps": 1, "reason": "because"}
    demo.show(demo.HOST, {"samples": samples, "tuned": tuned, "problem": "the job took longer than 150 s"})
    told = capsys.readouterr().out
    assert "14.3 ms" in told
    assert told.count("no difference measured (2 rounds, 6 are needed)") == 5
    assert "2 rounds of alternating turns" in told
    assert "Tuned: gloo flat, after 1 step (because)." in told
    assert "Incomplete: the job took longer than 150 s. The load of this machine is" in told
    assert "run `make demo` again" in told


def test_an_incomplete_demonstration_without_a_measurement_says_so_in_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    demo.show(demo.HOST, {"samples": {}, "problem": "the job took longer than 150 s"})
    assert capsys.readouterr().out.strip().startswith("Incomplete: ")
