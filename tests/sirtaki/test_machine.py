import os
import socket
import subprocess
import sys

import pytest

from sirtaki import machine
from sirtaki.errors import ConfigError


@pytest.fixture
def cgroups(monkeypatch, tmp_path):
    """Builds a cgroup tree: `cgroups(own, {file: content})`, `own` as in /proc/self/cgroup."""

    def build(own, files):
        (tmp_path / "own").write_text(own)
        for name, content in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "own")
        monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "root")

    return build


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/job/step\n", {"job/cpu.max": "300000 100000\n", "job/step/cpu.max": "max 100000\n"}, 3.0),
        ("0::/host/path\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("4:cpu,x:/c\n", {"cpu,x/c/cpu.cfs_quota_us": "200000", "cpu,x/c/cpu.cfs_period_us": "100000"}, 2.0),
        ("4:cpu:/c\n", {"cpu/c/cpu.cfs_quota_us": "-1", "cpu/c/cpu.cfs_period_us": "100000"}, None),
        ("", {}, None),
    ],
)
def test_the_tightest_cpu_limit_above_this_process_counts(cgroups, own, files, quota):
    cgroups(own, files)
    assert machine.cpu_quota() == quota


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/a\n", {"memory.max": "max", "a/memory.max": "1073741824"}, 2**30),
        ("9:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("9:memory:/a\n", {"memory/a/memory.limit_in_bytes": "4096"}, 4096),
    ],
)
def test_the_tightest_memory_limit_counts(cgroups, own, files, limit):
    cgroups(own, files)
    assert machine.memory_limit_bytes() == limit


def test_a_fraction_of_a_core_is_one_core_and_affinity_limits_too(cgroups, monkeypatch):
    cgroups("0::/\n", {"cpu.max": "20000 100000"})
    assert machine.usable_cores() == 1
    cgroups("0::/\n", {"cpu.max": "1000000 100000"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5, 7})
    assert machine.usable_cores() == 3


def test_a_hosts_kind_is_its_product_its_processor_and_its_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(machine, "_PRODUCT", tmp_path / "product")
    monkeypatch.setattr(machine, "_PROCESSORS", tmp_path / "cpuinfo")
    assert machine.host_kind() == "8 cores"
    (tmp_path / "product").write_text("c5.2xlarge\n")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some  CPU @ 3.00GHz\n\nprocessor\t: 1\n")
    assert machine.host_kind() == "c5.2xlarge, Some CPU @ 3.00GHz, 8 cores"


def test_a_container_with_a_share_of_the_cores_is_a_host_of_another_kind(cgroups, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    kinds = []
    for limit in ("max 100000", "200000 100000", "800000 100000"):
        cgroups("0::/\n", {"cpu.max": limit})
        kinds.append(machine.host_kind())
    assert kinds[0].endswith("8 cores")
    assert kinds[1].endswith("2 of 8 cores")
    assert kinds[2] == kinds[0]


def test_a_process_lives_until_it_ends_and_not_until_its_parent_collects_it():
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert machine.is_alive(child.pid)
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not machine.is_alive(child.pid)
    assert not machine.is_alive(child.pid)


def test_addresses_are_a_host_and_a_port() -> None:
    assert machine.parse_address(" host.example:9500 ") == ("host.example", 9500)
    assert machine.parse_address("[::1]:9500") == ("::1", 9500)
    for text in ("", "9500", "host", "host:", ":9500", "host:x", "host:0", "host:70000", "host:٣"):
        with pytest.raises(ConfigError, match="expected HOST:PORT"):
            machine.parse_address(text)


def test_nobody_gets_a_reserved_port_but_a_server_that_asks_for_it_by_number() -> None:
    with machine.ReservedPorts(3) as ports, machine.ReservedPorts(3) as others:
        own, theirs = (set(range(each.first, each.first + 3)) for each in (ports, others))
        assert not own & theirs
        for port in sorted(own):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
            with socket.create_server(("127.0.0.1", port)):
                socket.create_connection(("127.0.0.1", port)).close()
            with socket.socket() as plain, pytest.raises(OSError, match="in use"):
                plain.bind(("127.0.0.1", port))
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", others.first))
