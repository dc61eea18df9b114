"""Jobs of several processes that train embeddings through an aggregator, which is killed while they do."""

import random
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest
from fakes.aggregators import process
from rank_jobs import CONTROL

from sirtaki.aggregator.server import ask_status
from sirtaki.aggregator.wire import Wire
from sirtaki.host_port import parse_address

STEPS = 16
THERE, HERE = "hot_cold there, hot_cold there, hot_cold here", "hot_cold here, hot_cold here, hot_cold here"
MESH = {CONTROL: "mesh"}


def environ(addresses: str, **more: str) -> Mapping[str, str]:
    return {"SIRTAKI_AGGREGATOR": addresses, "SIRTAKI_REGISTRY": "off", "SIRTAKI_SPARSE": "hot_cold", **more}


def counted(address: str) -> dict[str, Any]:
    wire = Wire.connected(parse_address(address))
    try:
        return dict(ask_status(wire) or {})
    finally:
        wire.close()


def ways(job: "subprocess.CompletedProcess[str]") -> list[str]:
    return [line.partition("rows went ")[2] for line in job.stdout.splitlines() if "rows went" in line]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_training_through_it_is_right(run_ranks: Any, ranks: int) -> None:
    with process() as (address, _):
        job = run_ranks("aggregated_rows.py", ranks, STEPS, env=environ(address))
        found = counted(address)
    assert ways(job) == [THERE] * ranks
    assert found["sessions"] == 1
    assert found["jobs"] == 0  # all have left
    assert "WARNING" not in job.stderr


@pytest.mark.slow
def test_a_standby_takes_over_and_nothing_is_lost(run_ranks: Any) -> None:
    with process() as (standby, _), process() as (address, first):
        job = run_ranks("aggregated_rows.py", 3, STEPS, first.pid, 11, 0.01, env=environ(f"{address},{standby}"))
        assert counted(standby)["sums"] > 0
    assert ways(job) == [THERE] * 3
    assert "is lost" not in job.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_where_it_is_killed_training_goes_on_without_it(run_ranks: Any, ranks: int) -> None:
    with process() as (address, only):
        job = run_ranks("aggregated_rows.py", ranks, STEPS, only.pid, 11, 0.01, env=environ(address))
    assert ways(job) == [HERE] * ranks
    assert job.stderr.count("is lost, ranks sum all rows themselves from this step on") == 1


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"SIRTAKI_SPARSE": "auto"}, MESH, {"SIRTAKI_TRANSPORT": "gloo"}])
@pytest.mark.parametrize("killed", [False, True])
def test_other_ways_to_train(run_ranks: Any, more: Mapping[str, str], killed: bool) -> None:
    with process() as (address, only):
        kill = (only.pid, 20, 0.01) if killed else ()
        job = run_ranks("aggregated_rows.py", 3, 44, *kill, env=environ(address, **more))
    assert len(set(ways(job))) == 1
    if killed:
        assert "there" not in ways(job)[0]
        assert job.stderr.count("is lost, ranks sum") == 1


@pytest.mark.slow
@pytest.mark.parametrize("where", ["256.1.1.1:7000", "127.0.0.1:9"])
def test_where_there_is_none_training_is_right_and_it_is_said_once(run_ranks: Any, where: str) -> None:
    job = run_ranks("aggregated_rows.py", 3, STEPS, env=environ(where))
    assert ways(job) == [HERE] * 3
    assert job.stderr.count(f"SIRTAKI_AGGREGATOR={where} is not used") == 1


def test_what_is_no_address_is_refused_at_the_start(run_ranks: Any) -> None:
    job = run_ranks("aggregated_rows.py", 1, STEPS, env=environ("somewhere"), check=False)
    assert job.returncode != 0
    assert "SIRTAKI_AGGREGATOR='somewhere' is invalid; accepted: HOST:PORT, or HOST:PORT,HOST:PORT" in job.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fifty_deaths_at_any_moment(run_ranks: Any) -> None:
    chance = random.Random(7)
    for number in range(50):
        with_standby = number % 2 == 0
        with process() as (standby, _), process() as (address, first):
            addresses = f"{address},{standby}" if with_standby else address
            moment = (first.pid, 9 + chance.randrange(4), chance.random() * 0.04)
            job = run_ranks("aggregated_rows.py", 3, STEPS, *moment, env=environ(addresses))
        assert ways(job) == [THERE if with_standby else HERE] * 3, f"job {number} of {moment}: {job.stderr[-3000:]}"
