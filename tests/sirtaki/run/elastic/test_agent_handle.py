"""The command that starts an agent: what it is told, what it writes, and that it ends."""

import os
import sys
import time
from collections.abc import Iterator

import pytest

from sirtaki.run.elastic.agent_handle import AdoptedAgent, AgentHandle


@pytest.fixture
def handles() -> Iterator[list[AgentHandle]]:
    found: list[AgentHandle] = []
    yield found
    for handle in found:
        handle.wait(0.0)


def start(handles: list[AgentHandle], code: str, shown: list[bytes]) -> AgentHandle:
    def pump(name, stream) -> None:
        with stream:
            shown.extend(stream)

    handles.append(AgentHandle("a", 1, [sys.executable, "-c", code], os.environ, b"told\n", pump))
    return handles[-1]


def test_it_is_told_a_line_and_its_output_is_shown(handles: list[AgentHandle]) -> None:
    shown: list[bytes] = []
    handle = start(handles, "print(input() + ' and heard'); raise SystemExit(3)", shown)
    handle.wait(20.0)
    assert shown == [b"told and heard\n"]
    assert handle.exit_code == 3


def test_a_command_that_does_not_end_is_killed(handles: list[AgentHandle]) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    shown: list[bytes] = []
    handle = start(handles, code, shown)
    deadline_s = time.monotonic() + 20.0
    while not shown:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    begin_s = time.monotonic()
    handle.wait(0.1)
    assert time.monotonic() - begin_s < 10.0
    assert handle.exit_code == -9


def test_one_of_another_drivers_has_no_command() -> None:
    adopted = AdoptedAgent(4)
    assert (adopted.number, adopted.host, adopted.exit_code) == (4, "", None)
    adopted.wait(0.0)
