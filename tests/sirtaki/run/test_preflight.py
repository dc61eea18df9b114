"""Hosts are asked before mpiexec is; the ssh here is a script that runs what it is told, or fails."""

import os
import sys
from pathlib import Path

import pytest

from sirtaki.run.host_check import Finding, Need, finding_here, versions_here
from sirtaki.run.hosts import Host, is_by_ssh, look_at, shared_networks

SSH = """#!/bin/sh
while [ "$1" != b ] && [ "$1" != c ]; do shift; done
if [ "$1" = c ]; then echo 'ssh: connect to host c port 22: Connection refused' >&2; exit 255; fi
echo Welcome
exec sh -c "$2"
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join((str(tmp_path), os.environ["PATH"])))


def found(hosts: str, **changes: object):
    values = {"folder": "/", "script": "", "interfaces": (), "versions": versions_here(), **changes}
    named = [Host(name=name, slots=1) for name in hosts]
    return look_at(named, Need(**values), python=sys.executable, ssh=("-p", "22"), environ=os.environ)


def shared(**hosts: str) -> tuple[str, ...]:
    return shared_networks(
        Finding(problem="", networks=tuple(text.split()), identity=name) for name, text in hosts.items()
    )


@pytest.mark.usefixtures("ssh")
def test_a_host_that_has_all_tells_its_networks_and_another_one_why_it_cannot_be_used() -> None:
    answers = found("bc")
    here = finding_here(Need(folder="/", script="", interfaces=(), versions={}))
    assert answers["b"] == here
    assert answers["c"].problem.endswith("Connection refused: start sshd there, or name its port with --ssh-port")


@pytest.mark.usefixtures("ssh")
def test_what_a_host_lacks_is_said_there() -> None:
    assert found("b", script="train.py")["b"].problem.startswith("there is no script /train.py")


def test_networks_with_one_address_on_several_hosts_join_nobody() -> None:
    assert shared(a="10.0.0.1/24 172.17.0.1/16", b="10.0.0.2/24 172.17.0.1/16", c="10.0.0.3/24") == ("172.17.0.0/16",)
    assert shared(a="10.0.0.1/24 10.0.0.9/24", b="10.0.0.2/24 10.0.0.9/24") == ()


def test_two_names_of_one_host_are_one_host() -> None:
    host = Finding(problem="", networks=("10.0.0.1/24",), identity="a")
    assert shared_networks([host, host]) == ()


@pytest.mark.usefixtures("ssh")
def test_where_something_else_than_ssh_starts_daemons_nobody_is_asked() -> None:
    assert is_by_ssh({}, "")
    assert is_by_ssh({"HYDRA_LAUNCHER_EXTRA_ARGS": "-C"}, "--quiet")
    assert not is_by_ssh({"SLURM_JOB_ID": "3"}, "")
    assert not is_by_ssh({"PRTE_MCA_plm_ssh_agent": "my"}, "")
    assert not is_by_ssh({"HYDRA_LAUNCHER": "rsh"}, "")
    assert not is_by_ssh({}, "--prtemca plm_ssh_agent /my/agent")
