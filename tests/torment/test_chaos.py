"""After faults of ranks, launchers and disks, jobs end as specified and leave nothing behind."""

from __future__ import annotations

import io
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torment import chaos
from torment.chaos import FAULTS, RANKS, STEPS, Outcome, Strike, draw, judge, why_unavailable

REPOSITORY = Path(__file__).parents[2]
WEIGHTS = np.linspace(0.0, 1.0, 5, dtype=np.float32)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(why_unavailable() is not None, reason=f"no namespaces: {why_unavailable()}")
@pytest.mark.parametrize("seed", range(4))
def test_jobs_that_are_hit_at_random_moments_end_as_they_must_and_leave_nothing(seed: int) -> None:
    command = [sys.executable, chaos.__file__, str(seed), "10"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def saved(weights: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, weights)
    return file.getvalue()


GOOD = dict.fromkeys(range(RANKS), saved(WEIGHTS))
KILLED = {"returncode": 137, "message": "rank 1 was killed; rank 0 waits for the gradients of iteration 60"}


@pytest.mark.parametrize(
    ("fault", "ended", "complaint"),
    [
        ("kill", KILLED, ""),
        ("exit", {**KILLED, "returncode": 77}, ""),
        ("pause", {"weights": GOOD}, ""),
        ("launcher killed", {"returncode": -9}, ""),
        ("kill", {**KILLED, "returncode": None}, "did not end"),
        ("kill", {**KILLED, "returncode": 1}, "exit code 1, not 137"),
        ("kill", {**KILLED, "returncode": 0}, "exit code 0, not 137"),
        ("kill", {**KILLED, "end_s": 60.0}, "took 60.0 s to end"),
        ("kill", {**KILLED, "message": "in iteration 60"}, "rank 1 is not named"),
        ("kill", {**KILLED, "message": "rank 1 was killed"}, "no word of what was not done"),
        ("kill", {**KILLED, "left": ["process python"]}, "1 left: process python"),
        ("pause", {"returncode": 1, "weights": GOOD}, "exit code 1, not 0"),
        ("pause", {"weights": {**GOOD, 2: saved(WEIGHTS + 1)}}, "ranks differ"),
        ("pause", {"weights": dict.fromkeys(range(RANKS), saved(WEIGHTS + 1))}, "weights are off by 1"),
        ("pause", {"weights": {0: saved(WEIGHTS)}}, "exit code 0, and no weights of 2 ranks"),
        ("disk full", {"weights": GOOD, "output": "Traceback"}, "a traceback though nothing ended the job"),
    ],
)
def test_a_wrong_end_is_described(fault: str, ended: dict[str, Any], complaint: str) -> None:
    strike = Strike(fault=fault, rank=1, step=60, delay_s=0.0)
    outcome = replace(Outcome(returncode=0, struck=[(strike, 60)], end_s=1.0), **ended)
    found = judge(outcome, WEIGHTS.astype(np.float64))
    assert complaint in found if complaint else not found


def test_each_fault_is_equally_frequent() -> None:
    drawn = draw(3, 300)
    counts = Counter(strikes[0].fault for strikes in drawn if len(strikes) == 1)
    assert counts == dict.fromkeys(FAULTS, 15)
    assert drawn == draw(3, 300) != draw(4, 300)
    assert any(strike.step == STEPS for strikes in drawn for strike in strikes)
