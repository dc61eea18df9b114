"""Sums of frequent rows through `sirtaki aggregator`, compared with an all-reduce over Gloo and a parameter server.

All ranks, the aggregator and the parameter server share this host's processors. Contenders alternate in one job. A
sample is a block of sums on the slowest rank. To emulate loss, the server and every rank drop received packets.
"""

from __future__ import annotations

import argparse
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.lib.harness import Report, Spread, finish, parser, ratios
from bench.lib.ranks import in_turns, run_ranks, start
from sirtaki.comm.sparse.aggregator import Aggregator, AggregatorClient, Bytes, HeatLayout, Wire, table_sum, tables
from sirtaki.errors import ConfigError
from sirtaki.machine import Address, parse_address

# ── A socket that drops received packets with a given probability ────────────────────────────────────────────────────


class LossyWire(Wire):
    """Socket that drops each received packet with the same probability, after the kernel has delivered it."""

    def __init__(self, *, loss: float, seed: int, peer: Address | None = None) -> None:
        """Connect to one peer, or listen on a free port of this host."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        if peer is not None:
            sock.connect(peer)
        else:
            sock.bind(("127.0.0.1", 0))
        super().__init__(sock)
        self._loss, self._random = loss, np.random.default_rng(seed)
        self.lost = 0

    def batches(self, most: int = 64) -> Iterator[tuple[Bytes, Address]]:
        """Yield batches of received packets, without the dropped packets."""
        for rows, address in super().batches(most):
            kept = self._random.random(len(rows)) >= self._loss
            self.lost += len(rows) - int(kept.sum())
            if kept.all():
                yield rows, address
            elif kept.any():
                yield np.ascontiguousarray(rows[kept]), address


# ── Which rows share a packet: Libra (sparse), algorithm 1 ───────────────────────────────────────────────────────────

Packets = list[list[int]]


def pack(rows: Sequence[int], *, registers: int, capacity: int) -> Packets:
    """Pack rows into packets of at most `capacity` rows, so that rows of one register share a packet only if necessary.

    Args:
        rows: indices sorted by frequency, each at most once.
        registers: m; row i is in register i mod m.
        capacity: rows per packet.

    Raises:
        ConfigError: `registers` or `capacity` is not positive.
    """
    if registers < 1 or capacity < 1:
        raise ConfigError(f"{registers} registers and packets of {capacity} rows: both must be 1 or more")
    packets: Packets = [[] for _ in range(-(-len(rows) // capacity))]  # Line 1 of the paper's listing.
    left: list[int] = []  # The paper's G'.
    # A register's next candidate is the packet after its last one: earlier packets are full, or hold a row of this
    # register.
    behind = [0] * registers
    first_open = 0
    for row in rows:  # Line 3 of the listing.
        register = row % registers  # Line 4 of the listing.
        place = max(behind[register], first_open)
        # Line 16 of the listing: full packets are no candidates.
        while place < len(packets) and len(packets[place]) == capacity:
            place += 1
        if place == len(packets):
            left.append(row)  # Line 20 of the listing.
            continue
        packets[place].append(row)  # Lines 13 and 14 of the listing.
        behind[register] = place + 1  # Lines 7 to 9 of the listing.
        while first_open < len(packets) and len(packets[first_open]) == capacity:
            first_open += 1
    packets += [left[begin : begin + capacity] for begin in range(0, len(left), capacity)]  # Line 23 of the listing.
    return [packet for packet in packets if packet]


def conflicts(packets: Sequence[Sequence[int]], *, registers: int) -> int:
    """Return the number of rows that share their register with another row of their packet."""
    return sum(len(packet) - len({row % registers for row in packet}) for packet in packets)


# ── A plain parameter server: every rank sends all its values over TCP and receives all sums ─────────────────────────

_SIZE = struct.Struct("<I")


def serve(listener: socket.socket, ranks: int) -> None:
    """Serve sums to `ranks` connected ranks, with one thread per rank, until a rank disconnects."""
    peers = [listener.accept()[0] for _ in range(ranks)]
    values: list[npt.NDArray[np.float32]] = [np.zeros(0, np.float32)] * ranks
    total = np.zeros(0, np.float32)
    barrier = threading.Barrier(ranks)

    def serve_rank(number: int, peer: socket.socket) -> None:
        nonlocal total
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                (size,) = _SIZE.unpack(_exactly(peer, bytearray(_SIZE.size)))
                if len(values[number]) != size:
                    values[number] = np.zeros(size, np.float32)
                _exactly(peer, values[number])
                if barrier.wait() == 0:
                    total = np.add.reduce(values)
                barrier.wait()
                peer.sendall(total.data)
                barrier.wait()  # All ranks have their sums, so that the next round may replace `total`.
        except (ConnectionError, threading.BrokenBarrierError):
            barrier.abort()
            peer.close()

    threads = [threading.Thread(target=serve_rank, args=each) for each in enumerate(peers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class ParameterServerRank:
    """One rank's connection to the parameter server."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._peer = socket.create_connection(address)
        self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def sum(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the sum over ranks, in the shape of `values`. Collective."""
        total = np.empty_like(values)
        self._peer.sendall(_SIZE.pack(values.size))
        self._peer.sendall(np.ascontiguousarray(values).data.cast("B"))
        _exactly(self._peer, total)
        return total

    def close(self) -> None:
        """Disconnect."""
        self._peer.close()


def _exactly(peer: socket.socket, into: bytearray | npt.NDArray[np.float32]) -> bytearray | npt.NDArray[np.float32]:
    """Fill a buffer from a socket.

    Raises:
        ConnectionError: the peer has disconnected.
    """
    view = memoryview(into).cast("B")
    while view.nbytes:
        got = peer.recv_into(view)
        if not got:
            raise ConnectionError("the peer has closed the connection")
        view = view[got:]
    return into


# ── The benchmark ────────────────────────────────────────────────────────────────────────────────────────────────────

LOSSES = (0.0, 0.001, 0.01)
RANKS = 4


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run one rank: time sums by each contender alternately, and compare them with the exact sum. Collective."""
    import torch
    import torch.distributed as dist

    rank, ranks = comm.rank, comm.size
    layout = HeatLayout(rows=options["rows"], width=options["width"])
    values = np.random.default_rng(rank).standard_normal((layout.rows, layout.width)).astype(np.float32)
    expected = sum(comm.allgather(values.astype(np.float64)))
    plain = ParameterServerRank(("127.0.0.1", options["plain_port"]))

    def client(loss: float, port: int, seed: int) -> AggregatorClient:
        return AggregatorClient(
            [f"127.0.0.1:{port}"],
            job=f"loss {loss}",
            rank=rank,
            ranks=ranks,
            layout=layout,
            connect=lambda address: LossyWire(loss=loss, seed=seed, peer=address),
        )

    def over_gloo() -> np.ndarray[Any, np.dtype[np.float32]]:
        total = torch.from_numpy(values.copy())
        dist.all_reduce(total)
        return total.numpy()

    clients = {loss: client(loss, port, 100 + rank) for loss, port in zip(LOSSES, options["ports"], strict=True)}
    calls: dict[str, Callable[[], Any]] = {
        "all-reduce over Gloo": over_gloo,
        "parameter server over TCP": partial(plain.sum, values),
        **{f"aggregator, loss {100 * loss:g} %": partial(each.sum, values) for loss, each in clients.items()},
    }

    worst = max(float(np.abs(call() - expected).max()) for call in calls.values())
    samples = in_turns(calls, comm, rounds=options["rounds"], block=options["sums"])
    resent = {f"{100 * loss:g}": comm.allreduce(each.resent) for loss, each in clients.items()}
    comm.Barrier()
    for each in (*clients.values(), plain):
        each.close()
    return {"samples": samples, "resent": resent, "worst_error": worst}


def measure_sums(report: Report, args: Any, *, rows: int, width: int) -> None:
    """Add the time of a sum of `rows` rows."""
    servers = [subprocess.Popen([sys.executable, "-m", "bench.aggregator", "--serve", str(loss)],
                                stdout=subprocess.PIPE, text=True) for loss in LOSSES]  # fmt: skip
    listener = socket.create_server(("127.0.0.1", 0))
    plain = threading.Thread(target=serve, args=(listener, RANKS), daemon=True)
    plain.start()
    try:
        ports = [parse_address((server.stdout or sys.stdin).readline())[1] for server in servers]
        options = {
            "rows": rows, "width": width, "ports": ports, "plain_port": listener.getsockname()[1],
            "rounds": args.rounds, "sums": 5 if args.quick else 20,
        }  # fmt: skip
        found = run_ranks("bench.aggregator", RANKS, options)
    finally:
        for server in servers:
            server.terminate()
            server.wait()
        listener.close()
    megabytes = 4e-6 * rows * width
    peer = found["samples"][f"aggregator, loss {100 * LOSSES[0]:g} %"]
    for name, samples in found["samples"].items():
        spread = Spread.of(samples)
        report.rows.append(
            {
                "rows": rows,
                "width": width,
                "contender": name,
                "sum_s": spread,
                "MB_per_s_and_rank": megabytes / spread.median,
                "times_the_aggregator": ratios(samples, peer),
            }
        )
    report.notes.append(
        f"{rows} × {width}: packets sent again, all ranks: "
        + ", ".join(f"{count} at {loss} %" for loss, count in found["resent"].items())
        + f"; largest difference from the float64 sum of {RANKS} ranks: {found['worst_error']:.2g}."
    )


def measure_packing(report: Report, seed: int) -> None:
    """Add conflicts per packet for batches with Zipf's frequencies, counted as in §5.4 of the Libra paper."""
    random, hot, registers, capacity = np.random.default_rng(seed), 30_000, 24, 24
    for exponent in (0.975, 1.024, 1.2):
        weights = 1.0 / np.arange(1, hot + 1) ** exponent
        for name, place in (("by heat", np.arange(hot)), ("at random", random.permutation(hot))):
            found = packets = plain = 0
            for _ in range(20):
                batch = np.unique(random.choice(hot, 4096, p=weights / weights.sum()))
                rows = [int(row) for row in place[batch]]
                packed = pack(rows, registers=registers, capacity=capacity)
                found, packets = found + conflicts(packed, registers=registers), packets + len(packed)
                cut = [rows[begin : begin + capacity] for begin in range(0, len(rows), capacity)]
                plain += conflicts(cut, registers=registers)
            report.rows.append(
                {
                    "layout": name,
                    "zipf": exponent,
                    "conflicts_a_packet_packed": found / packets,
                    "conflicts_a_packet_as_they_come": plain / packets,
                }
            )
            if name == "by heat":
                report.bar(f"conflicts a packet, heat layout and packing, Zipf {exponent}", found / packets, 1.0)


def measure_tables(report: Report, seed: int) -> None:
    """Add the error of sums by tables, for 100 000 sums of two numbers, and as many sums of eight."""
    random = np.random.default_rng(seed)
    for name, low in (("positive, 0 … 1", 0.0), ("signed, -1 … 1", -1.0)):
        for terms in (2, 8):
            numbers = random.uniform(low, 1.0, (terms, 100_000)).astype(np.float32)
            total = numbers[0]
            for each in numbers[1:]:
                total = table_sum(total, each)
            exact = numbers.astype(np.float64).sum(axis=0)
            error = np.abs(total - exact) / np.abs(exact)
            report.rows.append(
                {
                    "table_sum_of": f"{terms} numbers, {name}",
                    "median_error": float(np.median(error)),
                    "mean_error": float(error.mean()),
                    "worst_error": float(error.max()),
                    "mean_error_by_largest_number": float((np.abs(total - exact) / np.abs(numbers).max(axis=0)).mean()),
                }
            )
    # An entry has 16 bits.
    papers_bytes = sum(2 * table.size for name, table in vars(tables()).items() if name != "minus")
    report.notes.append(f"The paper's seven tables take {papers_bytes / 1024:.1f} KiB here, too.")


def serve_with_loss(loss: float) -> int:
    """Run an aggregator that drops received packets. Print its address first."""
    wire = LossyWire(loss=loss, seed=int(1e6 * loss))
    print(f"127.0.0.1:{wire.address[1]}", flush=True)
    Aggregator(wire).serve()
    return 0


def main() -> int:
    """Run all three parts of the benchmark."""
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int)
    flags.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.serve is not None:
        return serve_with_loss(args.serve)
    args.rounds = args.rounds or (7 if args.quick else 21)
    report = Report(name="aggregator")
    for rows, width in ((30_000, 1), (30_000, 16)) if args.quick else ((30_000, 1), (30_000, 16), (30_000, 64)):
        measure_sums(report, args, rows=rows, width=width)
    measure_packing(report, args.seed)
    measure_tables(report, args.seed)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank, init=False, gloo=True))
