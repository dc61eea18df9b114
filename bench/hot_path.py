"""Overhead of synchronisation apart from sending bytes: per gradient, per negotiation round, and when idle.

    python -m bench.hot_path [--quick] [--check] [--save]

*Per gradient*: processor time of the training thread in the backward pass, the synchronisation and the zeroing of
gradients, minus the processor time of the same step without synchronisation, divided by the number of gradients.
Waiting and other threads do not count. Zeroing counts, because it frees tensors that Sirtaki frees earlier. Gradients
are tiny, so that copies and sends take no time. DDP is the reference. *Round*: one bit-vector all-reduce of the
negotiation in its own thread, over MPI and over the mesh. *Idle*: processor time of an idle rank after training, and
bytes that leave its node.

Bars: ≤ 5 µs per gradient, ≤ 100 µs per round over MPI and over the mesh at 4 ranks on one host, no traffic when idle.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import psutil
import torch

from bench.lib.cluster import LabShape, why_unavailable
from bench.lib.contenders import Contender, Ddp, Sirtaki, join_gloo
from bench.lib.harness import Report, Spread, alternate, finish, parser
from bench.lib.models import EmulatedModel
from bench.lib.ranks import run_ranks, slowest, start
from bench.lib.workloads import workload
from sirtaki.comm.control.communicator import Communicator
from sirtaki.machine import ReservedPorts, allowed_processors

ROUND_BITS, ROUND_US = 161, 100.0
IDLE_NODES = 2
IDLE_BYTES_PER_S = 100.0
"""Maximum idle traffic (bar). It allows for address resolution and the launcher's connections."""


def tiny_model() -> tuple[EmulatedModel, torch.Tensor]:
    """Return ResNet-50's 161 gradients at a thousandth of their sizes, without computation."""
    return EmulatedModel(workload("resnet50").scaled(0.001), compute_s=0.0, gradient_value=1.0), torch.zeros(
        1, requires_grad=True
    )


def thread_time_of(contender: Contender, steps: int) -> tuple[float, float]:
    """Return processor seconds of this thread per step: (backward pass, work after it). Collective."""
    backward_s = after_s = 0.0
    for _ in range(steps):
        loss = contender.forward(contender.batch).sum()
        begin_s = time.thread_time()
        loss.backward()
        middle_s = time.thread_time()
        synchronize = getattr(contender.optimizer, "synchronize", None)
        if synchronize is not None:
            synchronize()
        contender.optimizer.zero_grad()
        after_s += time.thread_time() - middle_s
        backward_s += middle_s - begin_s
    return backward_s / steps, after_s / steps


def cost_per_gradient(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all samples of each contender in microseconds per gradient. Collective."""
    model, _ = tiny_model()
    gradients = len(model.layers)
    contenders = {"alone": Contender(tiny_model), "ddp": Ddp(tiny_model), "sirtaki": Sirtaki(tiny_model, tune=False)}
    parts: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}

    def sample(name: str) -> Callable[[], float]:
        def take() -> float:
            thread_time_of(contenders[name], 2)
            parts[name].append(thread_time_of(contenders[name], options["steps"]))
            return sum(parts[name][-1])

        return take

    for contender in contenders.values():
        thread_time_of(contender, 5)
    alternate({name: sample(name) for name in contenders}, options["rounds"], seed=options["seed"])
    alone = parts.pop("alone")

    def microseconds(seconds: float) -> float:
        return 1e6 * seconds / gradients

    return {
        "gradients": gradients,
        "alone_us": [microseconds(sum(own)) for own in alone],
        "contenders": {
            name: {
                "hooks_us": [microseconds(with_[0] - without[0]) for with_, without in zip(own, alone, strict=True)],
                "all_us": [microseconds(sum(with_) - sum(without)) for with_, without in zip(own, alone, strict=True)],
            }
            for name, own in parts.items()
        },
    }


def round_latency(comm: Any, options: Mapping[str, Any]) -> list[float]:
    """Return seconds of a negotiation round on the slowest rank. A sample is the mean of 50 rounds. Collective."""
    from sirtaki.comm.control.communicator import Backend
    from sirtaki.comm.control.mpi import world
    from sirtaki.comm.gradients.negotiation import agree

    ranks = world(comm) if Backend(options["backend"]) is Backend.MPI else mesh_beside(comm)
    ranks.failures.oversubscribed = ranks.size > len(allowed_processors())  # A job sets this when it starts.
    own, samples = ranks.duplicate(), []
    bits = np.ones(ROUND_BITS, dtype=np.bool_)

    def rounds() -> None:
        for _ in range(options["rounds"]):
            agree(bits, comm=own, failures=own.failures)
            begin_s = time.perf_counter()
            for _ in range(50):
                agree(bits, comm=own, failures=own.failures)
            samples.append((time.perf_counter() - begin_s) / 50)

    thread = threading.Thread(target=rounds)
    thread.start()
    thread.join()
    ranks.free()
    return slowest({"round": samples}, comm)["round"]


def mesh_beside(comm: Any) -> Communicator:
    """Return a mesh of the ranks of an MPI communicator. Collective."""
    from sirtaki.comm.control.members import Meeting, meet

    with ReservedPorts() as port:
        meeting = Meeting(rank=comm.rank, size=comm.size, host="127.0.0.1", port=comm.bcast(port.first))
        return meet(meeting, interface=None, secret=None, timeout_s=60.0, heartbeat_s=30.0)


def idle_cost(comm: Any, duration_s: float) -> dict[str, float]:
    """Return processor seconds per second of an idle rank, and bytes per second that leave its node. Collective."""
    comm.Barrier()
    time.sleep(1.0)
    sent_bytes, begin_s, processor_s = bytes_sent(), time.perf_counter(), time.process_time()
    time.sleep(duration_s)
    elapsed_s = time.perf_counter() - begin_s
    share, rate = (time.process_time() - processor_s) / elapsed_s, (bytes_sent() - sent_bytes) / elapsed_s
    return {"processor_share": max(comm.allgather(share)), "sent_bytes_per_s": max(comm.allgather(rate))}


def bytes_sent() -> int:
    """Return the number of bytes that this network namespace has sent through eth0; 0 without eth0."""
    device = psutil.net_io_counters(pernic=True).get("eth0")
    return 0 if device is None else int(device.bytes_sent)


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run the part that `options` selects, on one rank. Collective."""
    import sirtaki.torch as hvd

    if options["part"] == "round":
        return round_latency(comm, options)
    hvd.init()
    if options["part"] == "gradient":
        join_gloo(comm)
        return cost_per_gradient(options)
    contender = Sirtaki(tiny_model, tune=False)
    for _ in range(5):
        contender.step()
    return idle_cost(comm, options["duration_s"])


def measure_gradients(report: Report, args: Any) -> None:
    """Measure the cost per gradient, and add its rows and bar."""
    options = {"part": "gradient", "rounds": args.rounds, "steps": 20, "seed": args.seed}
    result = run_ranks("bench.hot_path", 2, options)
    for name, samples in result["contenders"].items():
        for part, title in (("hooks_us", "backward pass"), ("all_us", "in all")):
            report.figure(f"{name}: {title}, per gradient", Spread.of(samples[part]), "µs")
    report.figure("the same alone, per gradient", Spread.of(result["alone_us"]), "µs")
    ours = Spread.of(result["contenders"]["sirtaki"]["all_us"]).median
    report.bar("hook and bookkeeping per gradient", ours, 5.0, "µs ")


def measure_rounds(report: Report, args: Any) -> None:
    """Measure the latency of negotiation rounds, and add its rows and bars."""
    for backend in ("mpi", "mesh"):
        for ranks in (2, 4):
            times_s = run_ranks("bench.hot_path", ranks, {"part": "round", "rounds": args.rounds, "backend": backend})
            spread = Spread.of([1e6 * one for one in times_s])
            report.figure(f"negotiation round over {backend}, {ranks} ranks on one host", spread, "µs")
        report.bar(f"negotiation round over {backend}, 4 ranks", spread.median, ROUND_US, "µs ")


def measure_idle(report: Report, args: Any) -> None:
    """Measure an idle job on two emulated nodes, and add its rows and bar; a note if there can be no nodes."""
    options = {"part": "idle", "duration_s": 3.0 if args.quick else 10.0}
    if (reason := why_unavailable()) is not None:
        report.notes.append(f"traffic of an idle job was not measured: {reason}")
        return
    result = run_ranks("bench.hot_path", LabShape(nodes=IDLE_NODES), options, ranks_per_node=2)
    report.figure("idle rank: share of a processor", 100 * result["processor_share"], "%")
    report.figure("idle node: sent", result["sent_bytes_per_s"], "bytes/s")
    report.bar("bytes sent when idle", result["sent_bytes_per_s"], IDLE_BYTES_PER_S, "bytes/s ")


def main() -> int:
    """Run all three parts."""
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int)
    args = flags.parse_args()
    args.rounds = args.rounds or (7 if args.quick else 21)
    report = Report(name="hot_path")
    measure_gradients(report, args)
    measure_rounds(report, args)
    measure_idle(report, args)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank, init=False))
