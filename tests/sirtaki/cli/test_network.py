"""`sirtaki doctor --network`: the measured network, and what several streams would gain."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sirtaki.cli.__main__
from bench.lib.cluster import MBIT, LabShape, NetLab, why_unavailable
from sirtaki.cli.__main__ import main
from sirtaki.cli.network import FLOWS, NetworkReport, summarise
from sirtaki.comm.flows import FlowSample

MB = 1e6


def report(rates_mb, *, hosts=("a", "b"), ranks=2, busy=0.1, retransmitted=0, rounds=3, links=None) -> NetworkReport:
    """Return the report of a network whose link carries `rates_mb[i]` MB/s with `FLOWS[i]` connections."""
    links = links or [1.0] * len(hosts)
    found = {
        flows: [
            FlowSample(
                bytes_per_s=MB * rate * link, busy=busy, round_trip_s=1e-3, retransmitted=retransmitted, segments=1000
            )
            for link in links
        ]
        for flows, rate in zip(FLOWS, rates_mb, strict=True)
    }
    return summarise([found] * rounds, hosts=hosts, ranks=ranks, round_trip_s=1e-3, model_bytes=100 * MB)


CAPPED, EQUAL = (10, 20, 40, 40, 39), (40, 40, 40, 40, 39)


def test_connections_with_a_limited_rate_make_several_streams_worthwhile_and_the_fewest_are_named():
    found = report(CAPPED)
    assert (found.helps, found.best.flows) == (True, 4)
    assert found.best.all_reduce_s.median == pytest.approx(2.501)  # a round trip of 1 ms, and 100 MB at 40 MB/s
    (gain, size, *_) = found.verdict(None)
    assert gain.startswith("Several streams would help: 4 connections carry 4 times as much as one.")
    assert "takes about 10001 ms over one connection and 2501 ms over 4." in size
    assert "shorter by at most 7500 ms" in size


def test_a_link_that_one_connection_fills_gains_nothing():
    found = report(EQUAL)
    assert (found.helps, found.best.flows) == (False, 1)
    assert found.verdict(1.0)[0].startswith("Several streams would not help")
    assert not any("If a step computes" in sentence for sentence in found.verdict(1.0))


def test_measurements_that_scatter_give_no_verdict():
    rounds = [
        {n: [FlowSample(bytes_per_s=MB * n * (factor if n > 1 else 1), busy=0.1)] for n in FLOWS}
        for factor in (1.0, 0.05, 1.0)
    ]
    found = summarise(rounds, hosts=("a", "b"), ranks=2, round_trip_s=0.0, model_bytes=MB)
    assert found.helps is None
    assert "not clear" in found.verdict(None)[0]


def test_one_extreme_value_of_seven_does_not_widen_the_interval():
    rounds = [{n: [FlowSample(bytes_per_s=MB * (n if turn else 0.1), busy=0.1)] for n in FLOWS} for turn in range(7)]
    found = summarise(rounds, hosts=("a", "b"), ranks=2, round_trip_s=0.0, model_bytes=MB)
    assert {(one.bytes_per_s.low, one.bytes_per_s.high) for one in found.rates} == {(MB * n, MB * n) for n in FLOWS}


def test_loss_a_busy_processor_and_a_slow_link_are_named():
    words = " ".join(report(CAPPED, hosts=("a", "b", "c"), retransmitted=20, busy=0.99, links=(1, 1, 0.5)).verdict(1.0))
    assert "One connection sent 2 % of its segments again" in words
    assert "the processor may have limited these rates" in words
    assert "The link from b to c is the slowest: it carries 50 % of the median link" in words
    words = " ".join(report(CAPPED).verdict(1.0))
    assert not any(part in words for part in ("segments", "processor may", "slowest"))


def test_ranks_of_one_host_get_no_promise():
    found = report(CAPPED, hosts=("a",))
    assert found.helps is None
    assert "shared memory" in found.verdict(1.0)[0]
    assert len(found.verdict(1.0)) == 1


@given(
    rates=st.lists(st.floats(1.0, 100.0), min_size=len(FLOWS), max_size=len(FLOWS)),
    compute_s=st.floats(0.01, 100.0),
    begin=st.floats(0.0, 1.0),
)
def test_the_gain_of_a_step_is_within_the_bounds_however_much_communication_is_hidden(rates, compute_s, begin):
    found = report(rates)
    one_s, best_s = found.rates[0].all_reduce_s.median, found.best.all_reduce_s.median
    before_s, after_s = (max(compute_s, begin * compute_s + seconds) for seconds in (one_s, best_s))
    low, high = found.step_gain(compute_s)
    assert low - 1e-9 <= 1 - after_s / before_s <= high + 1e-9 or one_s < best_s


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--network"], "at least two ranks, but this is one process alone; start it on two hosts: `sirtakirun -np 2"),
        (["--model-mb", "5"], "add --network"),
    ],
)
def test_a_measurement_that_cannot_be_made_is_refused_with_the_command_that_can(words, says, capsys, monkeypatch):
    monkeypatch.setenv("SIRTAKI_CONTROL", "mesh")
    assert main(["doctor", *words]) == 1
    assert says in capsys.readouterr().err


def test_two_ranks_of_one_host_measure_their_loopback_and_only_rank_0_prints(run_ranks):
    program = Path(sirtaki.cli.__main__.__file__)
    done = run_ranks(program, 2, "doctor", "--network", "--json", "--rounds", 1)
    found = json.loads(done.stdout)
    assert [one["flows"] for one in found["rates"]] == list(FLOWS)
    assert all(one["bytes_per_s"]["median"] > MB for one in found["rates"])
    assert all(one["retransmitted"] is not None for one in found["rates"])  # the kernel is Linux
    assert found["ranks"] == 2
    assert len(found["hosts"]) == 1
    assert found["streams_help"] is None


@pytest.mark.integration
@pytest.mark.skipif(why_unavailable() is not None, reason=f"no emulated cluster: {why_unavailable()}")
def test_between_hosts_a_cap_on_each_flow_is_found_and_without_it_no_gain_is_promised(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    command = [sys.executable, "-m", "sirtaki.cli", "doctor", "--network", "--json", "--rounds", "1"]
    with NetLab(LabShape(nodes=2, link_bits_per_s=80 * MBIT, flow_bits_per_s=20 * MBIT)) as lab:
        capped = json.loads(lab.run_ranks(command, timeout_s=60))
        lab.reshape(LabShape(nodes=2, link_bits_per_s=80 * MBIT, flow_bits_per_s=80 * MBIT))
        equal = json.loads(lab.run_ranks(command, timeout_s=60))
    assert capped["hosts"] == ["sirtaki-n0", "sirtaki-n1"]
    assert 3.0 < capped["rates"][2]["times"]["median"] < 5.0
    assert capped["best_flows"] >= 4
    assert 15e6 < 8 * capped["rates"][0]["bytes_per_s"]["median"] < 21e6
    assert equal["rates"][2]["times"]["median"] < 1.3
    assert equal["streams_help"] is not True
