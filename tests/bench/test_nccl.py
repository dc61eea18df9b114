"""NCCL's own knobs: the tuner finds the fastest setting of a table of times, and otherwise keeps NCCL's choice."""

import json
import math
from dataclasses import replace

import pytest

from bench.lib.landscapes.landscape import Landscape
from bench.nccl import ALL_WAYS, JOBS, KIB, MIB, THREADS, NcclTimes, in_every_way, job, modelled, tune
from sirtaki.autotune.knobs import Knobs, NcclWays
from sirtaki.comm.nccl_streams.transport import ctas_for
from sirtaki.comm.plan import NcclWay
from sirtaki.engine.tuning.plans import STREAM_COUNTS

EVERY_JOB = pytest.mark.parametrize("name", JOBS)


def only_nccl(landscape: Landscape) -> Landscape:
    """Return the landscape with fixed units and streams, so that only NCCL's knobs are tuned."""
    size = landscape.default.unit_bytes
    landscape.space = replace(landscape.space, unit_bytes=(size, size), streams=(1,), threads=(None,))
    return landscape


@pytest.mark.parametrize(
    ("nodes", "size_bytes", "decided", "fastest"),
    [
        (1, 64 * KIB, NcclWay.RING_LL, NcclWay.RING_LL),
        (1, 8 * MIB, NcclWay.RING_LL128, NcclWay.RING_LL128),
        (1, 64 * MIB, NcclWay.RING_SIMPLE, NcclWay.RING_SIMPLE),
        (2, 64 * KIB, NcclWay.TREE_LL, NcclWay.RING_LL),
        (2, 4 * MIB, NcclWay.TREE_SIMPLE, NcclWay.RING_SIMPLE),
        (2, 64 * MIB, NcclWay.RING_SIMPLE, NcclWay.RING_SIMPLE),
    ],
)
def test_by_its_model_nccl_decides_right_on_one_node_and_not_always_between_two(
    nodes: int, size_bytes: int, decided: NcclWay, fastest: NcclWay
) -> None:
    table = modelled(nodes)
    assert table.of(size_bytes, None, None) == table.of(size_bytes, decided, None)
    assert min(NcclWay, key=lambda way: table.of(size_bytes, way, None)) is fastest


def test_a_table_is_the_same_when_it_is_read_again() -> None:
    table = modelled(2)
    again = NcclTimes.from_json(json.loads(json.dumps(table.to_json())))
    assert again.times_s == table.times_s
    assert table.of(3 * MIB, None, 1) == pytest.approx(again.of(3 * MIB, None, 1))
    assert table.of(2 * MIB, None, 1) < table.of(3 * MIB, None, 1) < table.of(4 * MIB, None, 1)
    assert table.of(8 * MIB, NcclWay.RING_SIMPLE, None) < table.of(8 * MIB, NcclWay.RING_SIMPLE, 1)
    assert math.isinf(table.of(MIB, NcclWay.RING_LL128, None))  # which does not go between nodes


@EVERY_JOB
@pytest.mark.parametrize("seed", range(3))
def test_the_fastest_setting_of_the_table_is_kept(name: str, seed: int) -> None:
    landscape = only_nccl(job(modelled(2), name))
    result = tune(landscape, noise=0.02, seed=seed)
    fastest = min(in_every_way(landscape), key=landscape.span_s)
    assert result.knobs == fastest
    way = {"small gradients": NcclWay.RING_LL, "large gradients": NcclWay.RING_SIMPLE}[name]
    assert result.knobs.nccl == NcclWays.of(result.knobs.unit_bytes, way)
    assert "beat the default" in result.reason


@EVERY_JOB
def test_where_nccl_decides_right_probes_leave_no_settings_to_try(name: str) -> None:
    assert job(modelled(1), name).space.nccl == ()


@EVERY_JOB
def test_where_nccl_decides_right_the_default_stays_after_all_trials(name: str) -> None:
    """But for chance: an equal setting is called faster in at most 3 % of comparisons."""
    landscape = only_nccl(job(modelled(1), name))
    landscape.space = replace(landscape.space, nccl=ALL_WAYS)
    results = [tune(landscape, noise=0.02, seed=seed) for seed in range(8)]
    assert sum(result.knobs != landscape.default for result in results) <= 1
    assert all(result.n_trials > len(NcclWay) / 2 for result in results)


@pytest.mark.lengthy
def test_beside_all_other_knobs_it_is_found_too() -> None:
    landscape = job(modelled(2), "large gradients")
    assert landscape.space.threads == THREADS
    without = job(modelled(2), "large gradients")
    without.space = replace(without.space, nccl=())
    kept, others = (
        sum(one.span_s(tune(one, noise=0.02, seed=seed).knobs) for seed in range(5)) for one in (landscape, without)
    )
    assert kept < 0.97 * others


def nvlink(streams_gain: float) -> Landscape:
    """Return a job on one node, where twice as many streams take `streams_gain` times as long."""
    landscape = job(modelled(1), "large gradients")
    default = landscape.default

    def span_s(knobs: Knobs) -> float:
        units = 1.01 ** max(0.0, abs(math.log2(knobs.unit_bytes / default.unit_bytes)) - 1.0)
        threads = 1.0 if knobs.threads is None else 1.0 + 0.01 * max(0.0, 4.0 - math.log2(ctas_for(knobs.threads) or 1))
        return 6e-3 * units * threads * streams_gain ** math.log2(knobs.streams)

    return replace(landscape, space=replace(landscape.space, streams=STREAM_COUNTS, nccl=()), truth=span_s)


@pytest.mark.parametrize("noise", [0.005, 0.02, 0.05])
@pytest.mark.parametrize("seed", range(2))
def test_if_one_communicator_fills_nvlink_the_search_ends_after_six_settings(seed: int, noise: float) -> None:
    result = tune(nvlink(1.02), noise=noise, seed=seed, one_node=True)
    assert result.knobs == nvlink(1.02).default
    assert result.gain is None
    assert result.n_trials == 6
    assert result.iterations_used <= 35
    assert result.reason == "none of 5 clearly different settings was faster, so the search ended early"


def test_a_gain_of_several_streams_on_one_node_is_still_found() -> None:
    result = tune(nvlink(0.9), noise=0.02, seed=1, one_node=True)
    assert result.knobs.streams > 2
    assert result.gain is not None
