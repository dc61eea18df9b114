import errno
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from sirtaki import machine
from sirtaki.errors import ConfigError


@pytest.fixture
def cgroups(monkeypatch, tmp_path):
    """Return a function that builds a cgroup tree: `cgroups(own, {file: content})`, `own` as in /proc/self/cgroup."""

    def build(own, files):
        (tmp_path / "own").write_text(own)
        for name, content in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "own")
        monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "root")

    return build


def test_errors_of_exhausted_threads_and_memory_name_the_limit_with_its_value(cgroups, monkeypatch):
    files = {
        "pids/job/pids.max": "40\n",
        "pids/job/pids.current": "39\n",
        "memory/job/memory.limit_in_bytes": "2147483648",
    }
    cgroups("8:pids:/job\n4:memory:/job\n", files)
    limits = {machine.resource.RLIMIT_NPROC: 50, machine.resource.RLIMIT_AS: machine.resource.RLIM_INFINITY}
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (limits[which], limits[which]))
    assert machine.explained(RuntimeError("can't start new thread")) == (
        "can't start new thread; the limit of threads is ulimit -u 50, pids.max 40 (39 in use); that of memory is "
        "2 GiB of the container: raise it, or start fewer ranks on this host"
    )
    assert "ulimit -u 50" in machine.explained(BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"))
    for error in (
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("can't allocate memory"),
    ):
        assert "the limit of memory is 2 GiB of the container: raise it" in machine.explained(error)
    assert machine.explained(RuntimeError("shapes differ")) == "shapes differ"
    limits = dict.fromkeys(limits, 2**20)
    assert "ulimit -v 1024 kB, 2 GiB of the container" in machine.explained(MemoryError())


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
        with pytest.raises(ConfigError, match="must be HOST:PORT"):
            machine.parse_address(text)


# ── forked children ───────────────────────────────────────────────────────────────────────────────────────────────────


def exit_code_of_child(act):
    """0 if `act` returned in a forked child, 1 if it raised; 9 if it took too long."""
    if (child := os.fork()) == 0:
        signal.alarm(5)
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_exit_handlers_belong_to_the_process_that_has_registered_them():
    program = (
        "import os, sys\n"
        "from sirtaki import machine\n"
        "machine.at_exit(lambda: os.write(1, b'ours '))\n"
        "forgotten = lambda: os.write(1, b'forgotten ')\n"
        "machine.at_exit(forgotten), machine.forget_at_exit(forgotten)\n"
        "import atexit; atexit.register(lambda: os.write(1, b'users '))\n"
        "if child := os.fork():\n"
        "    os.waitpid(child, 0)\n"
        "sys.exit(0)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == ["users", "users", "ours"]


def test_a_finaliser_runs_in_the_process_that_has_made_it_only():
    class Owner:
        pass

    owners, ran = [Owner(), Owner()], []
    for owner in owners:
        machine.finalize(owner, ran.append, 1)
    del owner

    def collect():
        owners.clear()
        assert ran == []

    assert exit_code_of_child(collect) == 0
    owners.clear()
    assert ran == [1, 1]


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock, threading.Condition])
def test_a_lock_that_another_thread_holds_is_free_in_a_forked_child(make):
    lock, held, over = machine.free_in_forked_children(make()), threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            over.wait(30.0)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30.0)

    def take():
        with lock:
            pass

    try:
        assert exit_code_of_child(take) == 0
        assert not lock.acquire(blocking=False)
    finally:
        over.set()
        thread.join()


def test_shared_memory_is_a_private_copy_in_a_forked_child():
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        memory = np.frombuffer(mmap.mmap(file.fileno(), mmap.PAGESIZE), dtype=np.uint8)
        machine.private_in_forked_children(memory, memory.ctypes.data, mmap.PAGESIZE, file.fileno())
    memory[:] = 3

    def write():
        assert (memory == 3).all()
        memory[:] = 4
        assert (memory == 4).all()

    assert exit_code_of_child(write) == 0
    assert (memory == 3).all()


OURS = {"machine.py", "rank.py"}
"""Files that deal with exit handlers themselves."""

LAUNCHERS = {"agent.py", "supervisor.py", "output.py", "executor.py"}
"""Modules of processes without user scripts, whose children execute a program at once."""

FOR_ONE_OPERATION = {"self._in_flight", "self._following", "lock, done"}
"""Locks of operations in flight. A forked child does not wait for them, because its failure board raises first."""


def test_resources_that_a_fork_copies_are_created_by_fork_aware_functions():
    root = Path(machine.__file__).parent
    direct = re.compile(r"(?<!`)\b(atexit\.register|weakref\.finalize|= threading\.(R?Lock|Condition)\()")
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in root.rglob("*.py")
        if path.name not in OURS | LAUNCHERS
        for line in path.read_text().splitlines()
        if direct.search(line)
        and not any(line.strip().startswith(name) for name in FOR_ONE_OPERATION)
        and "Condition(self._lock)" not in line
        and "_leave_before_mpi" not in line
    ]
    assert not found


def test_a_reserved_port_is_free_only_for_a_server_that_requests_its_number() -> None:
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
