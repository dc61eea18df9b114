"""The trace that a job leaves, as Perfetto would read it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STATIC = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "0"}


def names_by_rank(path: Path) -> dict[int, list[str]]:
    by_rank: dict[int, list[str]] = {}
    for event in json.loads(path.read_text()):
        by_rank.setdefault(event["pid"], []).append(event["name"])
    return by_rank


def spans(path: Path, rank: int, name: str) -> list[dict[str, Any]]:
    return [
        event
        for event in json.loads(path.read_text())
        if event["pid"] == rank and event["name"].startswith(name) and event["ph"] == "X"
    ]


def assert_spans_nest(path: Path) -> None:
    """Check that spans of one track are nested or disjoint, because Perfetto cannot draw others."""
    by_track: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in json.loads(path.read_text()):
        if event["ph"] == "X":
            track = by_track.setdefault((event["pid"], event["tid"]), [])
            track.append((event["ts"], event["ts"] + event["dur"]))
    for track in by_track.values():
        open_until: list[float] = []
        for begin, end in sorted(track, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin + 0.2:  # rounding
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.2
            open_until.append(end)


@pytest.mark.parametrize(
    "transport", ["shared_memory", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mpi", "gloo"))]
)
def test_every_rank_tells_of_rounds_copies_queues_and_transfers(
    run_ranks: Callable[..., Any], tmp_path: Path, transport: str
) -> None:
    path = tmp_path / "trace.json"
    path.write_text("left by an earlier job")
    env = {**STATIC, "HOROVOD_TIMELINE": str(path), "SIRTAKI_TRANSPORT": transport, "SIRTAKI_UNIT_BYTES": "65536"}
    run_ranks("timeline_program.py", 2, "ends", path, env=env)
    names = names_by_rank(path)
    assert set(names) == {0, 1}
    for rank, found in names.items():
        for wanted in (
            "round",
            "iteration 7",
            "backward",
            "wait",
            "copy ",
            "NEGOTIATE_ALLREDUCE",
            "ALLREDUCE",
            "allreduce.metric.1",
        ):
            assert any(name.startswith(wanted) for name in found), f"rank {rank} has no {wanted}"
        units = spans(path, rank, "5.bias")
        assert units, "a unit is named by the gradients in it"
        assert {event["args"]["bytes"] for event in units} <= set(range(1, 65537))
    assert_spans_nest(path)
    # The clocks agree: both ranks end an iteration at about the same time.
    ends = [{event["name"]: event["ts"] + event["dur"] for event in spans(path, rank, "iteration")} for rank in (0, 1)]
    assert set(ends[0]) == set(ends[1]) == {f"iteration {number}" for number in range(8)}
    apart_us = sorted(abs(ends[0][name] - ends[1][name]) for name in ends[0])
    assert apart_us[len(apart_us) // 2] < 50_000


def test_one_rank_alone_may_start_and_stop(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run_ranks("timeline_program.py", 2, "dynamic", path, env={**STATIC, "HOROVOD_TIMELINE": "DYNAMIC"})
    names = names_by_rank(path)
    assert set(names) == {0}
    assert "CYCLE_START" in names[0]
    assert {name for name in names[0] if name.startswith("iteration ")} == {f"iteration {n}" for n in range(5)}


def test_the_file_is_whole_when_a_rank_is_killed(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    env = {**STATIC, "HOROVOD_TIMELINE": str(path)}
    job = run_ranks("timeline_program.py", 2, "killed", path, env=env, check=False)
    assert job.returncode != 0
    names = names_by_rank(path)
    for rank in (0, 1):
        assert "iteration 7" in names[rank]


def test_a_timeline_wants_init_and_the_variable(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    out = run_ranks("timeline_program.py", 1, "refused", path, env=STATIC).stdout
    assert "refused: Horovod has not been initialized" in out
    assert "refused: start_timeline() requires HOROVOD_TIMELINE" in out
    assert not path.exists()
