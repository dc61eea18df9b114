"""The command that starts an agent: what it is told, what it writes, and that it ends."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from sirtaki.run.elastic.agent_crew import AdoptedAgent, AgentHandle
from sirtaki.run.host_check import PROBLEM


@pytest.fixture
def handles() -> Iterator[list[AgentHandle]]:
    found: list[AgentHandle] = []
    yield found
    for handle in found:
        handle.wait(0.0)


def start(
    handles: list[AgentHandle], code: str, shown: list[bytes], program: Sequence[str] = (sys.executable, "-c")
) -> AgentHandle:
    def pump(name, stream) -> None:
        with stream:
            shown.extend(stream)

    handles.append(AgentHandle("a", 1, [*program, code], os.environ, b"told\n", pump))
    return handles[-1]


def test_it_is_told_a_line_and_its_output_is_shown(handles: list[AgentHandle]) -> None:
    shown: list[bytes] = []
    handle = start(handles, "print(input() + ' and heard'); raise SystemExit(3)", shown)
    handle.wait(20.0)
    assert shown == [b"told and heard\n"]
    assert handle.exit_code == 3


def test_what_says_why_it_does_not_come_is_kept_and_the_rest_is_shown(
    handles: list[AgentHandle], tmp_path: Path
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\nprintf 'Welcome\\nssh: connect to host a port 22: Connection refused\\n' >&2; exit 255\n"
    )
    ssh.chmod(0o755)
    shown: list[bytes] = []
    handle = start(handles, "", shown, program=[str(ssh)])
    handle.wait(20.0)
    assert shown == [b"Welcome\n"]
    assert handle.why_ended(255) == (
        "ssh: connect to host a port 22: Connection refused: start sshd there, or name its port with --ssh-port"
    )


def test_an_agent_that_finds_its_host_unfit_says_why_itself(handles: list[AgentHandle]) -> None:
    shown: list[bytes] = []
    handle = start(
        handles, f"import sys; print({PROBLEM!r} + 'no script', file=sys.stderr); raise SystemExit(1)", shown
    )
    handle.wait(20.0)
    assert (shown, handle.why_ended(1)) == ([], "no script")


def test_without_a_known_reason_the_exit_code_is_told(handles: list[AgentHandle]) -> None:
    shown: list[bytes] = []
    handle = start(handles, "import sys; sys.exit('so be it')", shown)
    handle.wait(20.0)
    assert shown == [b"so be it\n"]
    assert handle.why_ended(1).endswith("ended with exit code 1")


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
