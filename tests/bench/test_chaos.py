import dataclasses
import io
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bench.chaos import judge
from bench.chaos_faults import RANKS, STEPS, TWO, Fault, Scenario, Stage, Strike, draw
from bench.chaos_scene import Outcome, why_unavailable

REPOSITORY = Path(__file__).parents[2]
WEIGHTS = np.linspace(0.0, 1.0, 5, dtype=np.float32)
needs_namespaces = pytest.mark.skipif(why_unavailable() is not None, reason=f"no chaos here: {why_unavailable()}")


def a_strike(fault: Fault, rank: int = 1) -> Strike:
    return Strike(fault=fault, stage=Stage.TRAINING, rank=rank, step=60, delay_s=0.0, lasts_s=1.0, exit_code=7)


def a_scenario(*faults: Fault) -> Scenario:
    strikes = tuple(a_strike(fault) for fault in faults)
    return Scenario(number=0, strikes=strikes, transport=None, shuts_down=False)


def saved(weights: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, weights)
    return file.getvalue()


def complaints(fault: Fault, **ended: object) -> list[str]:
    outcome = Outcome(returncode=0, struck=[(a_strike(fault), 60)], end_s=1.0, life_s=9.0)
    return judge(a_scenario(fault), dataclasses.replace(outcome, **ended), WEIGHTS.astype(np.float64))


GOOD = {rank: saved(WEIGHTS) for rank in range(RANKS)}
KILLED = {"returncode": 137, "said": "rank 1 was killed; rank 0 waits for the gradients of iteration 60"}


@pytest.mark.parametrize(
    ("fault", "ended"),
    [
        (Fault.KILL, KILLED),
        (Fault.EXIT, {**KILLED, "returncode": 7}),
        (Fault.PAUSE, {"weights": GOOD}),
        (Fault.LAUNCHER_KILLED, {"returncode": -9}),
    ],
)
def test_an_end_as_it_must_be_is_right(fault, ended):
    assert complaints(fault, **ended) == []


@pytest.mark.parametrize(
    ("fault", "ended", "complaint"),
    [
        (Fault.KILL, {**KILLED, "returncode": None}, "did not end"),
        (Fault.KILL, {**KILLED, "returncode": 1}, "exit code 1, not 137"),
        (Fault.KILL, {**KILLED, "returncode": 0}, "exit code 0, not 137"),
        (Fault.KILL, {**KILLED, "end_s": 60.0}, "took 60.0 s to end"),
        (Fault.KILL, {**KILLED, "said": "in iteration 60"}, "rank 1 is not named"),
        (Fault.KILL, {**KILLED, "said": "rank 1 was killed"}, "no word of what was not done"),
        (Fault.KILL, {**KILLED, "left": ["process python"]}, "1 left: process python"),
        (Fault.PAUSE, {"returncode": 1, "weights": GOOD}, "exit code 1, not 0"),
        (Fault.PAUSE, {"weights": {**GOOD, 2: saved(WEIGHTS + 1)}}, "ranks differ"),
        (Fault.PAUSE, {"weights": {rank: saved(WEIGHTS + 1) for rank in range(RANKS)}}, "weights are off by 1"),
        (Fault.PAUSE, {"weights": {0: saved(WEIGHTS)}}, "exit code 0, and no weights of 2 ranks"),
        (Fault.DISK_FULL, {"weights": GOOD, "output": "Traceback"}, "a traceback though nothing ended the job"),
    ],
)
def test_what_is_wrong_with_an_end_is_said(fault, ended, complaint):
    assert complaint in complaints(fault, **ended)


def test_a_rank_that_had_perhaps_ended_before_it_was_hit_may_end_well():
    assert complaints(Fault.KILL, struck=[(a_strike(Fault.KILL), STEPS)], weights=GOOD) == []


def test_each_fault_comes_up_equally_often_and_the_seed_decides():
    scenarios = draw(300, seed=3)
    counts = Counter(scenario.name for scenario in scenarios)
    assert counts.pop(TWO) == 30
    assert counts == dict.fromkeys((fault.value for fault in Fault), 15)
    assert scenarios == draw(300, seed=3) != draw(300, seed=4)
    assert scenarios[:12] == draw(12, seed=3)


def run_chaos(*flags: object, timeout_s: float) -> None:
    command = [sys.executable, "-m", "bench.chaos", "--check", *map(str, flags)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.slow
@needs_namespaces
def test_a_rank_that_raises_ends_its_job_and_a_paused_one_does_not():
    run_chaos("--jobs", 20, "--only", "RAISE,PAUSE", timeout_s=110)
