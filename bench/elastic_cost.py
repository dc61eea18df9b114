"""The cost of an elastic job while no rank joins or leaves: steps, commits, and steps during a checkpoint's write.

    python -m bench.elastic_cost [--quick] [--check] [--save] [--ranks 2]

`sirtakirun` starts the same script (`bench.lib.elastic_steady`) with and without `--min-np` alternately, untuned. The
ratio of a round is the ratio of its median steps. Then the script commits 100 MB periodically, and Sirtaki writes
checkpoints to disk. This job runs once with all cores busy, and once with a single rank, which leaves a core to the
writer.

Bars: a step ≤ 1.005 of one with a fixed set of ranks; a commit of 100 MB ≤ 60 ms; a step during a write ≤ 1.05 with a
free core.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench.elastic import environment
from bench.lib.harness import Report, Spread, finish, parser, ratios

STATE_BYTES = 100_000_000
COMMIT_EVERY = 40
STEP_LIMIT, COMMIT_LIMIT_S, BESIDE_LIMIT = 1.005, 0.06, 1.05
UNTUNED = {"SIRTAKI_WARMUP_ITERATIONS": "0", "SIRTAKI_REGISTRY": "off"}


def train(
    ranks: int, *, elastic: bool, seconds: float, commit_every: int = 0, state_bytes: int = 0
) -> Mapping[str, list[float]]:
    """Run a job and return the seconds of rank 0's steps and commits, see `bench.lib.elastic_steady`.

    Raises:
        RuntimeError: the job failed.
    """
    with tempfile.TemporaryDirectory(prefix="sirtaki-bench-") as folder:
        env = environment() | UNTUNED
        if commit_every:
            env |= {"SIRTAKI_CHECKPOINT_DIR": f"{folder}/checkpoints", "SIRTAKI_CHECKPOINT_S": "4"}
        launcher = [sys.executable, "-m", "sirtaki.run", "-np", str(ranks)]
        options = ["--min-np", str(ranks), "--max-np", str(ranks)] if elastic else []
        words = [folder, str(seconds), str(commit_every), str(state_bytes)]
        job = subprocess.run(
            [*launcher, *options, sys.executable, "-m", "bench.lib.elastic_steady", *words],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        if job.returncode != 0:
            raise RuntimeError(f"a job of {ranks} ranks failed:\n{job.stdout[-1000:]}\n{job.stderr[-3000:]}")
        times: Mapping[str, list[float]] = json.loads(Path(folder, "0.json").read_text())
    return times


def steps(report: Report, ranks: int, *, rounds: int, seconds: float) -> None:
    """Compare elastic with static jobs."""
    stay: list[float] = []
    go: list[float] = []
    for number in range(rounds):
        for elastic in (False, True) if number % 2 else (True, False):
            found = statistics.median(train(ranks, elastic=elastic, seconds=seconds)["step"])
            (go if elastic else stay).append(found)
    ratio = ratios(go, stay)
    report.rows += [
        {"what": "step, ranks stay", "ranks": ranks, "time_s": Spread.of(stay), "ratio": None},
        {"what": "step, ranks may go", "ranks": ranks, "time_s": Spread.of(go), "ratio": ratio},
    ]
    report.bar(f"a step where ranks may go, of one where they stay, {ranks} ranks", ratio.median, STEP_LIMIT)


def checkpoints(report: Report, ranks: int, *, seconds: float, core_is_free: bool) -> None:
    """Measure commits, and steps while a checkpoint is written."""
    times = train(ranks, elastic=True, seconds=seconds, commit_every=COMMIT_EVERY, state_bytes=STATE_BYTES)
    beside = statistics.median(times["beside"]) / statistics.median(times["step"])
    report.rows += [
        {"what": "commit of 100 MB", "ranks": ranks, "time_s": Spread.of(times["commit"]), "ratio": None},
        {"what": "the same, to be written", "ranks": ranks, "time_s": Spread.of(times["due"]), "ratio": None},
        {"what": "step, nothing is written", "ranks": ranks, "time_s": Spread.of(times["step"]), "ratio": None},
        {"what": "step beside a write", "ranks": ranks, "time_s": Spread.of(times["beside"]), "ratio": beside},
    ]
    commit_s = Spread.of(times["commit"])
    report.bar(f"commit of 100 MB, {ranks} ranks, median", commit_s.median, COMMIT_LIMIT_S, "s ")
    if core_is_free:
        report.bar(f"a step beside a write, {ranks} ranks", beside, BESIDE_LIMIT)
    else:
        report.notes.append(f"{ranks} ranks keep all cores busy, so a write takes time from the steps: no bar")


def main() -> int:
    """Run all jobs."""
    flags = parser(__doc__)
    flags.add_argument("--ranks", type=int, default=2)
    args = flags.parse_args()
    report = Report(name="elastic_cost", settings={"ranks": args.ranks})
    steps(report, args.ranks, rounds=3 if args.quick else 9, seconds=2.0 if args.quick else 6.0)
    for ranks in dict.fromkeys((1, args.ranks)):
        cores = os.cpu_count() or 1
        checkpoints(report, ranks, seconds=12.0 if args.quick else 40.0, core_is_free=ranks < cores)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
