"""The command lines that start agents."""

import sys

import pytest

from sirtaki.errors import ConfigError
from sirtaki.run.elastic.agent_crew import AgentStart

AGENT = [sys.executable, "-m", "sirtaki.run.elastic.agent"]


def test_on_this_machine_it_is_a_child() -> None:
    assert AgentStart().is_child("localhost")
    assert AgentStart().words("localhost", {"PYTHONPATH": "x"}) == AGENT


def test_elsewhere_ssh_starts_it_without_asking_for_a_password() -> None:
    words = AgentStart(ssh=("-p", "2222")).words("node1", {"PYTHONPATH": "/my code"})
    assert words[0] == "ssh"
    assert words[-4:-1] == ["-p", "2222", "node1"]
    assert "BatchMode=yes" in words
    assert words[-1] == f"exec env 'PYTHONPATH=/my code' {' '.join(AGENT)}"


def test_within_a_slurm_allocation_srun_does() -> None:
    start = AgentStart(slurm_hosts=frozenset({"node1"}))
    words = start.words("node1", {})
    assert words[0] == "srun"
    assert "--nodelist=node1" in words
    assert words[-3:] == AGENT
    assert "--cpu-bind=none" not in words  # which is a warning where nothing binds
    assert "--cpu-bind=none" in start.words("node1", {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1"})
    assert start.words("node2", {})[0] == "ssh"


def test_a_given_command_gets_host_and_command_at_their_places() -> None:
    start = AgentStart(template="kubectl exec -i pod-{host} -- {command}")
    assert start.words("localhost", {}) == ["kubectl", "exec", "-i", "pod-localhost", "--", *AGENT]
    assert not start.is_child("localhost")
    assert AgentStart(template="sh -c 'cd / && {command}'").words("a", {})[-1] == f"cd / && {' '.join(AGENT)}"


def test_a_command_without_a_place_for_the_agent_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no \{command\}"):
        AgentStart(template="kubectl exec {host}").words("a", {})
