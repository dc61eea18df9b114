"""Sums of hot rows through `sirtaki aggregator`: against Gloo's all-reduce and a plain parameter server, and with loss.

All ranks, the aggregator and the parameter server share this host's processors. Contenders take turns in one job; a
sample is a block of sums on the slowest rank. Loss is made where packets are received, at the server and every rank.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.lib.harness import (
    Bar,
    Report,
    Spread,
    alternate,
    finish,
    give_result,
    main_or_rank,
    parser,
    ratios,
    run_ranks,
)
from bench.lib.lossy_wire import LossyWire
from bench.lib.packing import conflicts, pack
from bench.lib.parameter_server import ParameterServerRank, serve
from sirtaki.aggregator import AggregatorClient, HeatLayout
from sirtaki.aggregator.server import Aggregator, table_sum, tables
from sirtaki.host_port import parse_address

LOSSES = (0.0, 0.001, 0.01)
RANKS = 4


def on_rank(options: Mapping[str, Any]) -> None:
    """Collective: seconds of a sum on the slowest rank, by contender, a sample a round."""
    import torch
    import torch.distributed as dist

    from sirtaki.comm.control.mpi import load_mpi

    comm = load_mpi().COMM_WORLD
    rank, ranks = comm.rank, comm.size
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", options["store_port"], ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
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
            connect=lambda address: LossyWire.towards(address, loss=loss, seed=seed),
        )

    def over_gloo() -> np.ndarray[Any, np.dtype[np.float32]]:
        total = torch.from_numpy(values.copy())
        dist.all_reduce(total)
        return total.numpy()

    clients = {loss: client(loss, port, 100 + rank) for loss, port in zip(LOSSES, options["ports"], strict=True)}
    calls: dict[str, Callable[[], Any]] = {
        "all-reduce over Gloo": over_gloo,
        "parameter server over TCP": lambda: plain.sum(values),
        **{f"aggregator, loss {100 * loss:g} %": _bound(each, values) for loss, each in clients.items()},
    }

    def block(call: Callable[[], Any]) -> Callable[[], float]:
        def measured() -> float:
            call()
            comm.Barrier()
            begin_s = time.perf_counter()
            for _ in range(options["sums"]):
                call()
            return float(comm.allreduce(time.perf_counter() - begin_s, op=load_mpi().MAX)) / options["sums"]

        return measured

    worst = 0.0
    for call in calls.values():
        worst = max(worst, float(np.abs(call() - expected).max()))
    samples = alternate({name: block(call) for name, call in calls.items()}, options["rounds"])
    resent = {f"{100 * loss:g}": comm.allreduce(each.resent) for loss, each in clients.items()}
    comm.Barrier()
    for each in clients.values():
        each.close()
    plain.close()
    dist.destroy_process_group()
    if rank == 0:
        give_result({"samples": samples, "resent": resent, "worst_error": worst})


def _bound(client: AggregatorClient, values: Any) -> Callable[[], Any]:
    return lambda: client.sum(values)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def measure_sums(report: Report, args: Any, *, rows: int, width: int) -> None:
    """Adds the time of a sum of `rows` rows."""
    servers = [subprocess.Popen([sys.executable, "-m", "bench.aggregator", "--serve", str(loss)],
                                stdout=subprocess.PIPE, text=True) for loss in LOSSES]  # fmt: skip
    listener = socket.create_server(("127.0.0.1", 0))
    plain = threading.Thread(target=serve, args=(listener, RANKS), daemon=True)
    plain.start()
    try:
        ports = [parse_address((server.stdout or sys.stdin).readline())[1] for server in servers]
        options = {
            "rows": rows, "width": width, "ports": ports, "plain_port": listener.getsockname()[1],
            "store_port": _free_port(), "rounds": args.rounds, "sums": 5 if args.quick else 20,
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
    slower = ratios(found["samples"]["aggregator, loss 0.1 %"], peer)
    report.bars.append(Bar(claim=f"{rows} × {width}: time at 0.1 % loss ÷ without", value=slower.median, limit=1.03))
    report.notes.append(
        f"{rows} × {width}: packets sent again, all ranks: "
        + ", ".join(f"{count} at {loss} %" for loss, count in found["resent"].items())
        + f"; largest difference from the float64 sum of {RANKS} ranks: {found['worst_error']:.2g}."
    )


def measure_packing(report: Report, seed: int) -> None:
    """Adds conflicts a packet of batches with Zipf's frequencies, as §5.4 counts them."""
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
                claim = f"conflicts a packet, heat layout and packing, Zipf {exponent}"
                report.bars.append(Bar(claim=claim, value=found / packets, limit=1.0))


def measure_tables(report: Report, seed: int) -> None:
    """Adds the precision of sums by tables: of 100 000 pairs, and of 8 numbers one after the other."""
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
    report.notes.append(f"The paper's seven tables take {tables().papers_bytes / 1024:.1f} KiB here, too.")


def serve_with_loss(loss: float) -> int:
    """An aggregator that loses packets which it receives; says where it listens."""
    wire = LossyWire.listening(("127.0.0.1", 0), loss=loss, seed=int(1e6 * loss))
    print(f"127.0.0.1:{wire.address[1]}", flush=True)
    Aggregator(wire).serve()
    return 0


def main() -> int:
    """All three parts."""
    flags = parser(__doc__.split("\n")[0])
    flags.add_argument("--rounds", type=int)
    flags.add_argument("--serve", type=float, help="(for itself)")
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
    sys.exit(main_or_rank(main, on_rank))
