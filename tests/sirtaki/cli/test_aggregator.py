"""`sirtaki aggregator` as a process."""

import json
import signal

import numpy as np
import pytest
from fakes.aggregators import client_of, process

from sirtaki.cli.__main__ import main
from sirtaki.comm.sparse.aggregator import HeatLayout


def test_it_serves_tells_its_counters_and_ends_on_sigterm(capsys: pytest.CaptureFixture[str]) -> None:
    with process("--memory", "64M", "--jobs", "2") as (address, started):
        client = client_of([address], 0, 1, HeatLayout(rows=10, width=2))
        client.sum(np.ones((10, 2), np.float32))
        assert main(["aggregator", "--status", address]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["sums"], told["jobs"], told["memory_limit_bytes"]) == (1, 1, 64 * 2**20)
        client.close()
        started.send_signal(signal.SIGTERM)
        assert started.wait(10) == 0


@pytest.mark.lengthy
def test_an_aggregator_that_does_not_answer_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["aggregator", "--status", "127.0.0.1:9"]) == 1
    assert "no aggregator (server that sums gradients) answers at 127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--port", "70000"], "--port: expected 0 to 65535, found 70000"),
        (["--jobs", "0"], "--jobs: expected at least 1"),
        (["--host", "256.0.0.1"], "cannot listen at 256.0.0.1:9500"),
        (["--status", "nowhere"], "must be HOST:PORT"),
    ],
)
def test_invalid_options_are_one_clear_sentence(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["aggregator", *options]) == 1
    assert reason in capsys.readouterr().err
