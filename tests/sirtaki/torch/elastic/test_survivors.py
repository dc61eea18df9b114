"""Under `mpiexec --with-ft ulfm` ranks that are left go on: commits stay, and bits agree with one process."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from elastic_jobs import Judge, read
from rank_jobs import ONLY_OVER_MPI, UNTUNED, Launcher, end, environment
from ranks import elastic_member

Play = Callable[..., Judge]

pytestmark = ONLY_OVER_MPI

TIMEOUT_S = 60.0


@pytest.fixture
def play(launcher: Launcher, mpiexec: list[str], tmp_path: Path) -> Play:
    """Return a function that runs a job and reads the logs of its ranks."""
    if "--map-by" not in mpiexec:
        pytest.skip("this mpiexec is not Open MPI's, which has ULFM")

    def play(ranks: int, *, exit_code: int = 0, **plan: object) -> Judge:
        job = launcher.start(
            "elastic_survivor.py",
            ranks,
            [tmp_path, json.dumps(plan)],
            env=environment(tmp_path / "cache", UNTUNED),
            stderr=subprocess.STDOUT,
            options=["--with-ft", "ulfm"],
        )
        try:
            output, _ = job.communicate(timeout=TIMEOUT_S)
        finally:
            end(job)
        assert job.returncode == exit_code, output
        logs = {worker: read(tmp_path / f"{worker}.log") for worker in range(ranks)}
        codes: dict[int, int | None] = {
            worker: {"end": 0, "fault": -9}.get(log[-1]["what"]) for worker, log in logs.items()
        }
        return Judge(logs=logs, codes=codes, plan=elastic_member.Plan(**plan), output=output)  # type: ignore[arg-type]

    return play


def test_rank_0_and_another_one_are_killed(play: Play) -> None:
    judge = play(4, iterations=20, faults=[(0, 5, "in_step", "kill"), (2, 11, "backward", "kill")])
    judge.check(ended=2, killed=2)
    assert [lines[0]["size"] for lines in judge.effective()][::19] == [4, 2]


@pytest.mark.slow
def test_an_error_of_the_scripts_own_is_recovered_from_by_all(play: Play) -> None:
    judge = play(3, faults=[(1, 5, "before_step", "raise_")])
    judge.check(ended=3)
    assert {line["generation"] for line in judge.lines("iteration")} == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fail", "exit"])
def test_peers_learn_of_a_rank_that_exits_with_an_error(play: Play, how: str) -> None:
    play(3, faults=[(1, 5, "before_step", how)]).check(ended=2, killed=1)


def test_a_job_fails_if_all_its_ranks_fail(play: Play) -> None:
    judge = play(3, exit_code=1, faults=[(rank, 5, "before_step", "fail") for rank in range(3)])
    assert judge.lines("end") == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_ranks_are_killed_at_random(play: Play, seed: int) -> None:
    draw = random.Random(seed)
    phases = ["forward", "backward", "in_step", "step", "commit", "saving", "joined", "met", "callback"]
    victims = draw.sample(range(5), draw.randint(1, 4))
    faults = [(victim, draw.randrange(1, 20), draw.choice(phases), "kill") for victim in victims]
    # Who is to die while others recover lives on where nobody else is lost later.
    judge = play(5, iterations=20, faults=faults)
    killed = sum(log[-1]["what"] == "fault" for log in judge.logs.values())
    judge.check(ended=5 - killed, killed=killed)
