"""Hosts: their names, their access by ssh, and their facts."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.errors import ConfigError
from sirtaki.run.host_check import HostReport, Need, finding_here, interface_problem, problem_here, versions_here
from sirtaki.run.hosts import (
    Host,
    is_by_ssh,
    look_at,
    parse_hosts,
    read_hostfile,
    remedy,
    shared_networks,
    slurm_hosts,
    ssh_arguments,
)

# ── hosts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


names = st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)


hosts = st.lists(
    st.builds(Host, name=names, slots=st.integers(1, 64)), min_size=1, max_size=5, unique_by=lambda h: h.name
)


@given(hosts)
def test_hosts_written_in_any_of_the_three_forms_are_read_alike(tmp_path_factory, expected):
    file = tmp_path_factory.mktemp("hosts") / "hostfile"
    file.write_text("# a comment\n\n" + "".join(f"{host.name} slots={host.slots}  # here\n" for host in expected))
    assert parse_hosts(",".join(f"{host.name}:{host.slots}" for host in expected)) == tuple(expected)
    assert read_hostfile(file) == tuple(expected)
    file.write_text("".join(f"{host.name}:{host.slots}\n" for host in expected))
    assert read_hostfile(file) == tuple(expected)


@pytest.mark.parametrize("text", ["", "a:", "a:4097", "a:0", "a:x", "a:-1", ":2", "a b:2", "a,,b", "[::1]:2"])
def test_an_invalid_host_is_rejected_with_the_expected_form(text):
    with pytest.raises(ConfigError, match="slots"):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a slots=2\nb slots=many\n", "in line 2 of .* expected an integer from 1 to .* found 'many'"),
        ("a slots=2\n\nb max_slots=3 slots=2\n", "line 3"),
        ("# nothing\n", "names no host"),
        ("", "names no host"),
        ("\udcff", "cannot be read"),
    ],
)
def test_a_wrong_hostfile_is_refused_with_its_line(tmp_path, content, message):
    file = tmp_path / "hostfile"
    file.write_text(content, errors="surrogateescape")
    with pytest.raises(ConfigError, match=message):
        read_hostfile(file)


def test_a_slurm_allocation_gives_hosts_and_slots():
    environ = {"SLURM_JOB_NODELIST": "gpu[01-03,7],login", "SLURM_TASKS_PER_NODE": "2(x3),1,4"}
    assert [(host.name, host.slots) for host in slurm_hosts(environ)] == [
        ("gpu01", 2), ("gpu02", 2), ("gpu03", 2), ("gpu7", 1), ("login", 4),
    ]  # fmt: skip


def test_a_sirtakirun_started_by_srun_explains_its_use():
    job = {"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_TASKS": "1"}
    with pytest.raises(
        ConfigError, match="2 nodes, but SLURM_TASKS_PER_NODE='1' is for 1 nodes; start sirtakirun without srun"
    ):
        slurm_hosts(job)
    several = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "a,b"}
    with pytest.raises(ConfigError, match="srun started sirtakirun 2 times; start it once, without srun"):
        slurm_hosts(job | several)


# ── host check ────────────────────────────────────────────────────────────────────────────────────────────────────────


NOTHING = Need(folder="/", script="", interfaces=(), versions={})


def test_versions_must_be_the_same() -> None:
    assert problem_here(replace(NOTHING, versions=versions_here())) == ""
    other = {**versions_here(), "PyTorch": "1.0"}
    assert "but the launcher has 1.0" in problem_here(replace(NOTHING, versions=other))


def test_the_script_must_be_there_seen_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    need = replace(NOTHING, folder=str(tmp_path), script="train.py")
    assert problem_here(need) == ""
    assert problem_here(replace(need, folder="/")).startswith("there is no script /train.py: copy it there")


def test_one_of_the_interfaces_must_be_there() -> None:
    assert interface_problem(("nowhere0", "lo")) == ""
    assert interface_problem(()) == ""
    assert "lo (127.0.0.1)" in interface_problem(("nowhere0",))


def test_as_a_program_it_answers_in_a_line() -> None:
    need = replace(NOTHING, interfaces=("nowhere0",), versions=versions_here())
    words = {**asdict(need), "of another version": 1}
    answer = subprocess.run(
        [sys.executable, "-m", "sirtaki.run.host_check"],
        input=f"{json.dumps(words)}\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    here = asdict(finding_here(need))
    assert here["problem"]
    assert json.loads(answer.stdout) == {**here, "networks": list(here["networks"])}


# ── preflight ─────────────────────────────────────────────────────────────────────────────────────────────────────────


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
        HostReport(problem="", networks=tuple(text.split()), identity=name) for name, text in hosts.items()
    )


@pytest.mark.usefixtures("ssh")
def test_a_host_that_has_all_tells_its_networks_and_another_one_why_it_cannot_be_used() -> None:
    answers = found("bc")
    here = finding_here(Need(folder="/", script="", interfaces=(), versions={}))
    assert answers["b"] == here
    assert answers["c"].problem.endswith("Connection refused: start sshd there, or set its port with --ssh-port")


def test_networks_with_one_address_on_several_hosts_are_ignored() -> None:
    assert shared(a="10.0.0.1/24 172.17.0.1/16", b="10.0.0.2/24 172.17.0.1/16", c="10.0.0.3/24") == ("172.17.0.0/16",)
    assert shared(a="10.0.0.1/24 10.0.0.9/24", b="10.0.0.2/24 10.0.0.9/24") == ()
    host = HostReport(problem="", networks=("10.0.0.1/24",), identity="a")
    assert shared_networks([host, host]) == ()  # two names of one


@pytest.mark.usefixtures("ssh")
def test_with_a_launcher_other_than_ssh_no_host_is_asked() -> None:
    assert is_by_ssh({}, "")
    assert is_by_ssh({"HYDRA_LAUNCHER_EXTRA_ARGS": "-C"}, "--quiet")
    assert not is_by_ssh({"SLURM_JOB_ID": "3"}, "")
    assert not is_by_ssh({"PRTE_MCA_plm_ssh_agent": "my"}, "")
    assert not is_by_ssh({"HYDRA_LAUNCHER": "rsh"}, "")
    assert not is_by_ssh({}, "--prtemca plm_ssh_agent /my/agent")


# ── ssh ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("ssh: connect to host b port 22: Connection refused", "--ssh-port"),
        ("ssh: connect to host b port 22: Connection timed out", "check that it is running"),
        ("ssh: connect to host b port 22: No route to host", "check that it is running"),
        ("root@b: Permission denied (publickey,password).", "`ssh-copy-id b`"),
        ("Host key verification failed.", "`ssh b`"),
        ("ssh: Could not resolve hostname b: Name or service not known", "check the name"),
        ("sh: 1: exec: /opt/python: not found", "with /opt/python"),
        ("env: '/opt/python': No such file or directory", "with /opt/python"),
        ("/opt/python: No module named sirtaki", "install the same version of Sirtaki there for /opt/python"),
        ("(ModuleNotFoundError: No module named 'sirtaki.run')", "the same version"),
    ],
)
def test_each_failure_has_its_remedy(line: str, says: str) -> None:
    assert says in remedy(line, host="b", python="/opt/python")


def test_port_and_key_are_arguments_and_a_key_must_be_there(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    assert ssh_arguments(2222, str(key)) == ("-p", "2222", "-i", str(key))
    assert ssh_arguments(None, None) == ()
    with pytest.raises(ConfigError, match="given with --ssh-identity-file does not exist"):
        ssh_arguments(None, str(tmp_path / "other"))
