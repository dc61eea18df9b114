"""Strangers at the sockets of a job that trains: nothing crashes, grows, is lost or late."""

import os
import pickle
import random
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from sirtaki.comm.control.mesh_rendezvous import MAGIC

HELD = 300


class Runs:
    """What a pickle does to whoever loads it."""

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
    """Random bytes; frames and messages of huge lengths; a greeting of the right form, to others and to the driver."""
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


def test_a_job_of_one_host_listens_on_loopback_only(start: Callable) -> None:
    job = start("-np", 2, "--min-np", 1)
    first = job.of_size(2)
    pids = [job.process.pid, *job.agents().values(), *(record["pid"] for record in first)]
    assert {host for host, _ in listening(pids)} == {"127.0.0.1"}
    assert job.stop() == 0
