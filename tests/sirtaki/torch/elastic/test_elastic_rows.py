"""Sparse gradients on elastic ranks: with every algorithm, training equals one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from elastic_jobs import ElasticJob, Judge, Line
from rank_jobs import Launcher
from ranks.elastic_rows import Model

Play = Callable[..., Judge]
Event = tuple[int, int, str, str, str]

LEARN, PROBE, TRY, KEEP = ("learn", "before"), ("learn", "probe"), ("try", "backward"), ("keep", "backward")
FIXED_STAGES = {"gather": [KEEP], "owner": [KEEP], "blocks": [KEEP], "dense": [KEEP], "hot_cold": [LEARN, PROBE, KEEP]}
GLOO = {"SIRTAKI_TRANSPORT": "gloo"}


def comings_and_goings(moments: list[tuple[str, str]]) -> list[Event]:
    """Return events: at each moment a third rank is added; in the next generation one of the three is killed."""
    workers, events = [0, 1], []
    for number, (stage, phase) in enumerate(moments):
        generation = 1 + 2 * number
        workers.append(2 + number)
        events.append((generation, workers[0], stage, phase, "add"))
        lost = workers.pop(0 if number % 2 else 1)  # the second or the first
        events.append((generation + 1, lost, stage, phase, "kill"))
    return events


@pytest.fixture
def play(launcher: Launcher, tmp_path: Path) -> Play:
    """Return a function that runs a job and compares it with one process in float64."""

    def play(
        way: str,
        moments: list[tuple[str, str]],
        *,
        env: Mapping[str, str] = MappingProxyType({}),
        iterations: int = 40,
        with_set: bool = False,
    ) -> Judge:
        env = {"SIRTAKI_SPARSE": way, "SIRTAKI_WARMUP_ITERATIONS": "4", **env}
        events = comings_and_goings(moments)
        plan = {"events": events, "iterations": iterations, "with_set": with_set}
        with ElasticJob(launcher, tmp_path, ranks=2, env=env, program="elastic_rows.py", **plan) as job:
            judge = job.run(100.0)
        judge.iterations = iterations
        assert [line["action"] for line in judge.lines("event")] == ["add", "kill"] * len(moments), judge.output
        assert len(judge.lines("end")) == 2, judge.output
        history = judge.effective()
        tolerance = 1e-9
        check(history, "weights", "hash", tolerance=tolerance)
        if with_set:
            check([lines[:2] for lines in history], "inner", "inner_hash", tolerance=tolerance)
        return judge

    return play


def check(history: list[list[Line]], weights: str, digest: str, *, tolerance: float) -> None:
    """Check that all ranks have the same weights, and that they equal float64 training with the same members."""
    alone = Model()
    optimizers = alone.optimizers()
    for number, lines in enumerate(history):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.stack([alone.loss(line["rank"], number) for line in lines]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert len({line[digest] for line in lines}) == 1, f"ranks differ after iteration {number}"
        for found, right in zip(lines[0][weights], alone.parameters(), strict=True):
            wanted = right.detach().flatten()
            torch.testing.assert_close(
                torch.tensor(found, dtype=torch.float64), wanted, rtol=tolerance, atol=tolerance,
                msg=lambda text, number=number: f"after iteration {number}: {text}",
            )  # fmt: skip


def last_ways(judge: Judge) -> dict[int, set[str]]:
    """By generation: how rows went in its last iteration."""
    return {line["generation"]: set(line["ways"]) for line in judge.lines("iteration")}


@pytest.mark.slow
@pytest.mark.parametrize("way", list(FIXED_STAGES))
@pytest.mark.parametrize("env", [{}, GLOO], ids=["shared_memory", "gloo"])
def test_each_way(play: Play, way: str, env: dict[str, str]) -> None:
    moments = FIXED_STAGES[way]
    judge = play(way, moments, env=env, iterations=20 + 80 * len(moments))  # some pass until a rank has come
    ways = last_ways(judge)
    assert ways[len(ways)] == {way}
    assert ways[len(ways) - 1] == {way}


@pytest.mark.slow
@pytest.mark.parametrize(("env", "with_set"), [({}, False), (GLOO, True)], ids=["shared_memory", "gloo"])
def test_where_the_way_is_chosen(play: Play, env: dict[str, str], with_set: bool) -> None:
    judge = play("auto", [LEARN, PROBE, TRY, KEEP], env=env, iterations=260, with_set=with_set)
    assert judge.lines("iteration")[-1]["stage"] == "keep"
