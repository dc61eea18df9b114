"""Costs of each rank, and of rank 0, on up to 16 384 ranks: the control plane's real code on a simulated system.

The system of `tests/simulation/system.py` has its own clock, threads, TCP and key-value store. A call takes 10 µs. A
message takes 20 µs on a host, and 50 µs between hosts, which have 8 ranks each. Times are estimates, counts are exact.
"""

from __future__ import annotations

import sys
import tracemalloc
from typing import Any

from bench.lib.harness import REPOSITORY, Report, finish, parser

sys.path.insert(0, str(REPOSITORY / "tests"))

from simulation.control import Run, job, powers

WHOLE, QUICK = (2, 4, 8, 16, 32, 64, 128, 256, 512), (2, 4, 8, 16, 32)
PARTS, QUICK_PARTS = (256, 1024, 4096, 16384), (64, 128)
LONGEST_WATCHED = 64


def both(run: Run, what: str) -> str:
    """Return a resource of rank 0, and the largest of the other ranks."""
    return f"{getattr(run.used[0], what)} / {run.most(what)}"


def checked(run: Run) -> Run:
    """Return a run without errors."""
    if run.errors:
        raise run.errors[0]
    return run


def whole_job(size: int) -> dict[str, Any]:
    """Run a whole job without faults."""
    with job(size) as simulated:
        met, opened, reached = checked(simulated.meet()), checked(simulated.open()), checked(simulated.address())
        agreed = checked(simulated.agree())
        simulated.watch(warning_s=60.0)
        idle = simulated.rest(60.0)
        left = checked(simulated.leave())
    return {
        "ranks": size,
        "store: requests": both(met, "store_requests"),
        "of all": met.total("store_requests"),
        "store: bytes": both(met, "store_bytes"),
        "handshakes": max(each.connects + each.accepts for each in met.used),
        "lost or refused": simulated.system.dropped + int(met.total("connects")) - size * (size - 1) // 2,
        "meeting_s": met.seconds,
        "processor of rank 0_s": met.used[0].cpu_s,
        "hosts: bytes": both(opened, "sent_bytes"),
        "round trips_s": reached.seconds,
        "agreement: messages": both(agreed, "sent"),
        "agreement_s": agreed.seconds,
        "idle minute: messages": both(idle, "sent"),
        "end: messages": both(left, "sent"),
        "log lines": int(sum(run.total("log_lines") for run in (met, opened, agreed, idle, left))),
    }


def faults(size: int) -> dict[str, Any]:
    """Lose a rank, and a host, during an agreement, and let a rank hang."""
    runs = []
    for silently in (False, True):
        with job(size) as simulated:
            simulated.link(lambda rank: range(size))
            runs.append(simulated.lose(size // 2, silently=silently))
    with job(size) as simulated:
        simulated.link(lambda rank: range(size))
        simulated.watch(warning_s=60.0)
        hung = checked(simulated.hang(size // 2, 61.0))
    died, lost = runs
    return {
        "ranks": size,
        "a rank dies: sent": both(died, "sent"),
        "received": both(died, "received"),
        "names": len({each for each in died.results if each}),
        "until all know_s": died.seconds,
        "a host is lost: sent": both(lost, "sent"),
        "until all know, s": round(lost.seconds, 1),
        "a rank hangs: sent": both(hung, "sent"),
        "lines": int(hung.total("log_lines")),
    }


def parts(size: int) -> dict[str, Any]:
    """Run the parts of a job that do not need all connections."""
    with job(size) as simulated:
        exchanged = checked(simulated.exchange())
    with job(size) as simulated:
        first = checked(simulated.connect_one(0, apart_s=1e-3))
    with job(size) as simulated:
        at_once = checked(simulated.connect_one(0))
        lost = simulated.system.dropped + int(at_once.total("connects")) - (size - 1)
    with job(size) as simulated:
        last = checked(simulated.connect_one(size - 1))
    with job(size) as simulated:
        simulated.link(lambda rank: [0, *powers(size)(rank)])
        agreed, idle = checked(simulated.agree()), simulated.rest(60.0)
        died = simulated.lose(size // 2)
    return {
        "ranks": size,
        "store: requests": both(exchanged, "store_requests"),
        "store: bytes": both(exchanged, "store_bytes"),
        "handshakes of rank 0_s": first.used[0].cpu_s,
        "of the last_s": last.used[-1].cpu_s,
        "lost or refused, if all came at once": lost,
        "MB of connections": round(memory_bytes(size) / 1e6, 2),
        "agreement: messages": both(agreed, "sent"),
        "agreement_s": agreed.seconds,
        "idle minute: messages": both(idle, "sent"),
        "a rank dies: received": died.used[0].received,
        "handled by rank 0_s": died.used[0].cpu_s,
    }


def memory_bytes(size: int) -> int:
    """Return the memory of a rank's connections to all others, without the kernel's."""
    from simulation.system import Socket

    from sirtaki.comm.control.mesh import Links

    with job(2) as simulated:
        sockets = {rank: Socket(simulated.ranks[0]) for rank in range(1, size)}
        found: list[int] = []

        def act(_: int) -> None:
            tracemalloc.start()
            links = Links(0, sockets, heartbeat_s=30.0)  # type: ignore[arg-type]
            only = [tracemalloc.Filter(True, f"*/{name}") for name in ("comm/control/*", "sirtaki/machine.py")]
            traces = tracemalloc.take_snapshot().filter_traces(only)
            found.append(sum(each.size for each in traces.statistics("filename")))
            tracemalloc.stop()
            links.close_in_child()

        checked(simulated.on_all(act, ranks=[0]))
    return found[0]


def main() -> int:
    """Simulate jobs of growing numbers of ranks."""
    args = parser(__doc__).parse_args()
    report = Report(name="simulated_scale")
    report.notes.append("a / b: rank 0 / the largest value of the other ranks. Between hosts of 8 ranks each.")
    for size in QUICK if args.quick else WHOLE:
        report.rows.append(whole_job(size))
    report.rows += [faults(size) for size in (QUICK if args.quick else WHOLE) if 16 <= size <= LONGEST_WATCHED]
    for size in QUICK_PARTS if args.quick else PARTS:
        report.rows.append(parts(size))
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
