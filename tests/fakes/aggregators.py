"""Aggregators, ranks and lossy networks for tests, in threads of this process or in processes that can be killed."""

import contextlib
import multiprocessing as mp
import random
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from sirtaki.comm.sparse.aggregator import Aggregator, AggregatorClient, HeatLayout, Wire

FORK = mp.get_context("fork")


@contextmanager
def serving(*, batches: bool = True, **options: Any) -> Iterator[tuple[str, Aggregator]]:
    """Run an aggregator in a thread. Yields its address and the aggregator."""
    wire = Wire.bound("127.0.0.1", 0, batches=batches)
    aggregator = Aggregator(wire, **options)
    address = f"127.0.0.1:{wire.address[1]}"
    thread = threading.Thread(target=aggregator.serve)
    thread.start()
    try:
        yield address, aggregator
    finally:
        aggregator.stop()
        thread.join()


@contextmanager
def process(*words: str, port: int = 0) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Run `sirtaki aggregator` as a process. Yields its address and the process."""
    command = [sys.executable, "-m", "sirtaki.cli", "aggregator", "--port", str(port), *words]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert started.stdout is not None
        yield started.stdout.readline().split()[-1], started
    finally:
        started.kill()
        started.wait()
        assert started.stdout is not None
        started.stdout.close()


def on_ranks(ranks: int, act: Callable[[int], Any], *, timeout_s: float = 100.0) -> list[Any]:
    """Call `act(rank)` in one thread per rank. Return the results by rank; an exception is returned, not raised."""
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = act(rank)
        except BaseException as err:
            results[rank] = err

    threads = [threading.Thread(target=run, args=[rank], daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def on_processes(ranks: int, act: Callable[[int], Any], *, timeout_s: float) -> list[Any]:
    """Call `act(rank)` in one forked process per rank. Return the pickled results by rank, or exceptions."""
    results = FORK.SimpleQueue()

    def run(rank: int) -> None:
        try:
            results.put((rank, act(rank)))
        except BaseException as err:
            results.put((rank, err))

    workers = [FORK.Process(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    deadline_s = time.monotonic() + timeout_s
    found: dict[int, Any] = {}
    while len(found) < ranks and time.monotonic() < deadline_s:
        if results.empty():
            time.sleep(0.05)
        else:
            found.update([results.get()])
    for worker in workers:
        worker.kill()
        worker.join()
    results.close()
    return [found.get(rank, TimeoutError(f"rank {rank} took longer than {timeout_s} s")) for rank in range(ranks)]


def values_of(rank: int, step: int, rows: int, width: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the rows that a rank contributes in a step."""
    return np.random.default_rng([rank, step]).standard_normal((rows, width)).astype(np.float32)


def check_sums(sums: Sequence[np.ndarray[Any, Any]], step: int) -> None:
    """Assert that the sums are equal on all ranks, and equal to the float64 sum rounded to float32."""
    rows, width = sums[0].shape
    given = [values_of(rank, step, rows, width).astype(np.float64) for rank in range(len(sums))]
    for each in sums[1:]:
        np.testing.assert_array_equal(sums[0], each)
    allowed = (len(sums) + 1) * 2.0**-24 * sum(np.abs(each) for each in given)
    assert bool((np.abs(sums[0] - sum(given)) <= allowed).all()), f"step {step} is not the sum"


def client_of(addresses: Sequence[str], rank: int, ranks: int, layout: HeatLayout, **options: Any) -> AggregatorClient:
    """Return a client with shorter timeouts than in a real job."""
    given = {"job": "job", "lost_s": 1.0, "stall_s": 60.0, **options}
    return AggregatorClient(addresses, rank=rank, ranks=ranks, layout=layout, **given)


@dataclass(frozen=True)
class Weather:
    """Faults that a bad network adds to packets.

    Attributes:
        loss: probability that a packet is lost.
        twice: probability that a packet is delivered twice.
        late: probability that a packet is delayed until up to 200 later packets have passed it.
    """

    loss: float = 0.01
    twice: float = 0.01
    late: float = 0.01


@contextmanager
def bad_network(to: str, weather: Weather = Weather(), seed: int = 0) -> Iterator[tuple[str, Callable[[], int]]]:
    """Run a lossy relay between ranks and an aggregator, as a process. Yields its address and a packet counter."""
    host, port = to.split(":")
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.bind(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    count = FORK.Value("q", 0)
    carrier = FORK.Process(target=_carry, args=(listener, (host, int(port)), weather, seed, count), daemon=True)
    carrier.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", lambda: int(count.value)
    finally:
        carrier.kill()
        carrier.join()
        listener.close()


def _carry(listener: socket.socket, server: tuple[str, int], weather: Weather, seed: int, count: Any) -> None:
    chance = random.Random(seed)
    ways: dict[tuple[str, int], socket.socket] = {}
    back: dict[int, tuple[socket.socket, tuple[str, int]]] = {}
    held: deque[tuple[int, float, Callable[[], object]]] = deque()
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    number = 0

    def pass_on(send: Callable[[], object]) -> None:
        nonlocal number
        number += 1
        luck = chance.random()
        if luck < weather.loss:
            return
        if luck < weather.loss + weather.late:
            held.append((number + chance.randrange(1, 200), time.monotonic() + 0.02, send))
            return
        send()
        if luck > 1 - weather.twice:
            send()

    while True:
        for descriptor, _ in poll.poll(5):
            sock = listener if descriptor == listener.fileno() else back[descriptor][0]
            for _ in range(200):
                try:
                    data, sender = sock.recvfrom(2048, socket.MSG_DONTWAIT)
                except OSError:
                    break
                if sock is listener:
                    if sender not in ways:
                        way = ways[sender] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                        way.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
                        way.connect(server)
                        back[way.fileno()] = (way, sender)
                        poll.register(way, select.POLLIN)
                    pass_on(lambda way=ways[sender], data=data: _quietly(way.send, data))
                else:
                    pass_on(lambda data=data, to=back[descriptor][1]: _quietly(listener.sendto, data, to))
        now_s = time.monotonic()
        for _ in range(len(held)):
            due, due_s, send = held.popleft()
            if number >= due or now_s >= due_s:
                send()
            else:
                held.append((due, due_s, send))
        count.value = number


def _quietly(send: Callable[..., object], *what: Any) -> None:
    with contextlib.suppress(OSError):
        send(*what)
