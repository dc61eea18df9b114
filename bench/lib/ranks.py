"""Start the ranks of a benchmark on this host or in the emulated cluster, and return rank 0's result.

A script ends in `start(main, on_rank)`. `main` calls `run_ranks`, which starts the same script as several ranks. Each
rank runs `on_rank`, where contenders alternate by `in_turns`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.lib.cluster import LabShape, NetLab
from bench.lib.harness import REPOSITORY, alternate

if TYPE_CHECKING:
    from mpi4py import MPI

# ── in the process that starts ranks ─────────────────────────────────────────────────────────────────────────────────

RESULT_MARK = "BENCH-RESULT "
RANK_ENV = {
    "OMP_NUM_THREADS": "1",
    # Environment with which freed memory stays with the process, as with a GPU's caching allocator. Otherwise page
    # faults of new gradients would slow down contenders by chance.
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "SIRTAKI_REGISTRY": "off",
    "SIRTAKI_LOG_LEVEL": "warning",
}


def rank_env() -> dict[str, str]:
    """Return variables to add to the ranks' environment: `RANK_ENV`, overridden by the user's SIRTAKI_ variables."""
    given = {name: value for name, value in os.environ.items() if name.startswith("SIRTAKI_")}
    return {**RANK_ENV, **given}


def rank_argv(module: str, options: Mapping[str, Any]) -> list[str]:
    """Return the command line of a rank of `module`. `rank_options` parses it."""
    return [sys.executable, "-m", module, "--as-rank", json.dumps(options)]


def rank_options() -> dict[str, Any] | None:
    """Return the options of `rank_argv` if this process was started with it, else None."""
    if len(sys.argv) == 3 and sys.argv[1] == "--as-rank":
        return dict(json.loads(sys.argv[2]))
    return None


def give_result(result: Any) -> None:
    """Pass a JSON-ready result to the process that started the ranks. Call on one rank only."""
    print(RESULT_MARK + json.dumps(result), flush=True)


def take_result(output: str) -> Any:
    """Return the result that `give_result` printed.

    Raises:
        RuntimeError: the output has no result.
    """
    for line in output.splitlines():
        if line.startswith(RESULT_MARK):
            return json.loads(line.removeprefix(RESULT_MARK))
    raise RuntimeError(f"the ranks ended without a result: {output[-2000:]}")


def run_ranks(
    module: str,
    where: int | LabShape | NetLab,
    options: Mapping[str, Any],
    *,
    ranks_per_node: int = 1,
    timeout_s: float = 900.0,
    env: Mapping[str, str] | None = None,
) -> Any:
    """Run `module` on several ranks and return the result of rank 0's `on_rank`.

    Args:
        module: a module that ends in `start`.
        where: number of ranks on this host, or emulated nodes, existing or to be created for this job.
        options: options of `on_rank`. The address of rank 0 is added as "master".
        ranks_per_node: number of ranks per emulated node.
        timeout_s: the job is killed after this time.
        env: added to the ranks' environment.

    Raises:
        RuntimeError: a rank failed or timed out, or the cluster could not be built.
    """
    if isinstance(where, LabShape):
        with NetLab(where) as lab:
            return run_ranks(module, lab, options, ranks_per_node=ranks_per_node, timeout_s=timeout_s, env=env)
    given = {**rank_env(), **(env or {})}
    if isinstance(where, NetLab):
        argv = rank_argv(module, {**options, "master": where.address(0)})
        return take_result(where.run_ranks(argv, ranks_per_node=ranks_per_node, env=given, timeout_s=timeout_s))
    argv = rank_argv(module, {**options, "master": "127.0.0.1"})
    mpiexec = Path(sys.executable).with_name("mpiexec")
    launcher = [str(mpiexec) if mpiexec.exists() else "mpiexec", "--allow-run-as-root", "--bind-to", "none"]
    command = [*launcher, "--map-by", ":OVERSUBSCRIBE", "-np", str(where), *argv]
    environment = {**os.environ, **given}
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as err:
        raise RuntimeError(f"{module} on {where} ranks took longer than {timeout_s:g} s") from err
    if done.returncode != 0:
        raise RuntimeError(f"{module} on {where} ranks ended with status {done.returncode}: {done.stdout[-2000:]}")
    return take_result(done.stdout)


# ── on the ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────


def start(
    main: Callable[[], int],
    on_rank: Callable[[MPI.Comm, dict[str, Any]], Any],
    *,
    init: bool = True,
    gloo: bool = False,
) -> int:
    """Run `main` and return its exit status.

    In a process that `run_ranks` started, run `on_rank` instead, and return 0.

    Args:
        main: starts ranks and returns the exit status.
        on_rank: called with the communicator of all ranks and the options. PyTorch has one thread.
        init: call `hvd.init()` before `on_rank`.
        gloo: open PyTorch's process group over Gloo before `on_rank`.
    """
    options = rank_options()
    if options is None:
        return main()
    import torch
    from mpi4py import MPI

    import sirtaki.torch as hvd
    from bench.lib.contenders import join_gloo

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    if init:
        hvd.init()
    if gloo:
        join_gloo(comm, address=options["master"])
    result = on_rank(comm, options)
    if comm.rank == 0:
        give_result(result)
    comm.Barrier()
    if hvd.is_initialized():
        hvd.shutdown()
    return 0


def in_turns(
    calls: Mapping[str, Callable[[], object]],
    comm: MPI.Comm,
    *,
    rounds: int,
    block: int = 1,
    before: int = 1,
    ends: Mapping[str, Callable[[], object]] | None = None,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Return seconds of a call on the slowest rank, one sample per round, by contender. Collective.

    Args:
        calls: the contenders' calls. They alternate, see `alternate`.
        comm: all ranks.
        rounds: number of rounds.
        block: number of consecutive calls whose mean is a sample.
        before: number of unmeasured calls before a block. They are needed because caches and the congestion windows of
            idle connections shrink while further contenders run.
        ends: functions that are called at the end of a contender's block and measured with it.
        seed: seed of the order.
    """

    def timed(name: str, call: Callable[[], object]) -> Callable[[], float]:
        def measure() -> float:
            for _ in range(before):
                call()
            comm.Barrier()
            begin_s = time.perf_counter()
            for _ in range(block):
                call()
            if ends is not None and name in ends:
                ends[name]()
            return (time.perf_counter() - begin_s) / block

        return measure

    return slowest(alternate({name: timed(name, call) for name, call in calls.items()}, rounds, seed=seed), comm)


def slowest(samples: Mapping[str, list[float]], comm: MPI.Comm) -> dict[str, list[float]]:
    """Return the longest time of each sample over all ranks. Collective."""
    gathered = comm.allgather(dict(samples))
    return {name: [max(ranks) for ranks in zip(*(one[name] for one in gathered), strict=True)] for name in samples}


def payload_bytes_per_s(comm: MPI.Comm, *, flows: int = 16, duration_s: float = 1.5) -> float:
    """Return the payload rate of a link, without headers, on the slowest rank. Collective.

    Every rank sends to the next one over many connections, as a ring all-reduce does.
    """
    from sirtaki.comm.flows import FlowRing

    ring = FlowRing(rank=comm.rank, senders=range(comm.size), all_gather=comm.allgather)
    samples = ring.measure(flows, duration_s=duration_s)
    ring.close()
    return min(one.bytes_per_s for one in samples)
