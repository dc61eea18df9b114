"""Strangers at the sockets of a job that trains: nothing crashes, grows, is lost or late."""

import os
import pickle
import random
import signal
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from sirtaki.comm.control.handshake import MAGIC

HELD = 300


class Runs:
    """An object whose unpickling runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Addresses at which these processes listen."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].rpartition(":")
                host = socket.inet_ntoa(struct.pack("<I", int(address, 16))) if name == "tcp" else "::"
                found.add((host, int(port, 16)))
    return found


def greetings(rng: random.Random, trap: Path) -> list[bytes]:
    """Return random bytes, frames with huge lengths, and a well-formed greeting, to others and to the driver."""
    hello = struct.pack("<8sII32s", MAGIC, rng.randrange(9), rng.choice([0, 0, 1, 2**31]), rng.randbytes(32))
    return [
        rng.randbytes(rng.randrange(1, 300)),
        struct.pack("<I", 2**32 - 1) + b"{}",
        struct.pack("<BBxxIQQ", 1, 0, 0, 0, 2**60),
        hello,
        hello + rng.randbytes(32),
        hello[: rng.randrange(1, 48)],
        hello + hello,
        pickle.dumps(Runs(trap)),
        b'{"type":"EndAll","grace_s":0}',
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    ]


def taken(pids: list[int]) -> tuple[int, int]:
    """Pages in memory and descriptors of these processes."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages, sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)


@pytest.mark.parametrize("connections", [400, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(400)])])
def test_strangers_at_each_socket_of_a_job_change_nothing(start: Callable, tmp_path: Path, connections: int) -> None:
    rng, trap = random.Random(7), tmp_path / "trap"
    job = start(
        "-H", "a:1,b:1,c:1", "--min-np", 2, "--on-driver-loss", "go-on", "--agent-command", "{command}",
        "--network-interface", "lo",
    )  # fmt: skip
    first = job.of_size(3)
    pids = [job.process.pid, *job.agents().values(), *(record["pid"] for record in first)]
    places = sorted(listening(pids))
    assert len(places) >= 4  # the driver's and each agent's
    before = taken(pids)
    held: list[socket.socket] = []
    for number in range(connections):
        sock = socket.socket()
        sock.settimeout(0.01)  # an agent answers nobody before it starts a driver
        with suppress(OSError):
            sock.connect(places[number % len(places)])
            for part in rng.choice(greetings(rng, trap)), rng.randbytes(rng.randrange(3)):  # some in two parts
                sock.sendall(part)
        if number % 3 == 0 and len(held) < HELD:
            held.append(sock)  # half-open, or slow
        else:
            if number % 2:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            sock.close()
        for slow in rng.sample(held, min(3, len(held))):
            with suppress(OSError):
                slow.send(b"x")
    killed_s = time.time()
    os.kill(first[1]["pid"], signal.SIGKILL)  # with those that are held
    job.until(lambda: job.generation(2))
    assert max(record["at_s"] for record in job.generation(2)) - killed_s < 2.0
    for sock in held:
        sock.close()
    job.of_size(3)
    there = [pid for pid in pids if pid != first[1]["pid"]]
    gone = taken(pids=[record["pid"] for record in job.generation() if record["pid"] not in pids])
    job.until(lambda: taken(there)[1] + gone[1] <= before[1] + 8)  # no descriptor is lost
    assert taken(there)[0] + gone[0] <= before[0] + 2048  # nor 8 MiB taken
    assert not trap.exists()
    assert set(job.processes()) >= set(there) - {job.process.pid}
    assert job.stop() == 0
    assert max(record["longest_s"] for record in job.records if record["is_"] == "finished") < 2.0
    assert "Traceback" not in job.err


TRAINS = Path(__file__).parents[3] / "ranks" / "visited.py"
PER_S, WINDOW_S = 700, 0.5


def visit(place: tuple[str, int], count: int, trap: Path) -> list[tuple[float, float]]:
    """Connect as `count` strangers, `PER_S` per second, in every other `WINDOW_S`. Return the times."""
    rng, held, windows, number = random.Random(count), list[socket.socket](), list[tuple[float, float]](), 0
    while number < count:
        begun_s = time.monotonic()
        while number < count and (spent_s := time.monotonic() - begun_s) < WINDOW_S:
            if number - len(windows) * PER_S * WINDOW_S > spent_s * PER_S:
                time.sleep(1e-3)
                continue
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(place)
            for part in rng.choice(greetings(rng, trap)), rng.randbytes(rng.randrange(3)):
                with suppress(OSError):
                    sock.send(part)
            held.append(sock)
            if len(held) > HELD:
                gone = held.pop(rng.randrange(len(held)))
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", number % 2, 0))  # or a reset
                gone.close()
            number += 1
        windows.append((begun_s, time.monotonic()))
        time.sleep(WINDOW_S)
    for sock in held:
        sock.close()
    return windows


def admits(place: tuple[str, int]) -> bool:
    """Return whether a connection is accepted."""
    try:
        socket.create_connection(place, timeout=0.5).close()
    except OSError:
        return False
    return True


def steps_of(folder: Path) -> list[tuple[float, float]]:
    """Return start and duration of each step of all ranks."""
    lines = [line.split() for path in folder.glob("*.steps") for line in path.read_text().splitlines()]
    return [(float(line[0]), float(line[1])) for line in lines if len(line) == 2]


@pytest.mark.parametrize("connections", [30, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_strangers_at_each_socket_of_a_job_that_trains_make_no_step_late(
    start: Callable,
    reserve: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    connections: int,
) -> None:
    port = reserve(2)
    settings = {"TRANSPORT": "gloo", "TUNE": "0", "REGISTRY": "off", "METRICS_PORT": str(port)}
    for name, value in settings.items():
        monkeypatch.setenv(f"SIRTAKI_{name}", value)
    job = start("-np", 2, "--min-np", 1, command=[sys.executable, str(TRAINS), str(tmp_path)])
    job.until(lambda: len(list(tmp_path.glob("*.steps"))) == 2 and len(steps_of(tmp_path)) > 40, timeout_s=80.0)
    pids = [job.process.pid, *(int(path.stem) for path in tmp_path.glob("*.steps"))]
    sockets = [(pid, place) for pid in pids for place in sorted(listening([pid]))]
    assert len(sockets) == 5  # the driver's; ports for metrics; streams of Gloo, which admit nobody
    known = {port, port + 1, *(place[1] for pid, place in sockets if pid == job.process.pid)}
    assert not [place for _, place in sockets if place[1] not in known and admits(place)]
    for pid, place in sockets:
        before = taken([pid])
        windows = visit(place, connections, tmp_path / "trap")
        job.until(lambda pid=pid, before=before: taken([pid])[1] <= before[1])
        kib = 4 * (taken([pid])[0] - before[0])
        assert kib <= 8 * 1024
        if connections > 1000:
            here = [step for step in steps_of(tmp_path) if step[0] > windows[0][0]]
            beside = [any(begin_s <= at_s < end_s for begin_s, end_s in windows) for at_s, _ in here]
            step_s, usual_s = (
                statistics.median(took_s for (_, took_s), there in zip(here, beside, strict=True) if there is wanted)
                for wanted in (True, False)
            )
            print(f"{place[1]} of {pid}: {1e3 * step_s:.2f} ms with, {1e3 * usual_s:.2f} ms without, {kib} KiB")
            assert step_s <= 1.1 * usual_s
    assert job.stop() == 0
    assert not (tmp_path / "trap").exists()
    assert "Traceback" not in job.err


def test_a_job_of_one_host_listens_on_loopback_only(start: Callable) -> None:
    job = start("-np", 2, "--min-np", 1)
    first = job.of_size(2)
    pids = [job.process.pid, *job.agents().values(), *(record["pid"] for record in first)]
    assert {host for host, _ in listening(pids)} == {"127.0.0.1"}
    assert job.stop() == 0
