"""What happens after the warm-up if the network or a node changes: how soon all ranks tune again, and what they find.

    python -m bench.drift [--quick] [--check] [--save] [--cases link cap node]

Takes 20 minutes (as root). Four emulated nodes (`bench.lib.cluster`), one rank each, train the emulated ResNet-50,
scaled down. In each case a job warms up, then the condition changes and later changes back: the link from 400 to
100 Mbit/s; a cap of 10 Mbit/s for each flow; a node whose computation takes 30 times as long. After that, watching
is off, and a sweep of streams and unit sizes runs under both conditions. A step counts on the slowest rank.

A change is answered after so many iterations: from the change until the median of seven steps, and that of all steps
that follow in this condition, is within 10 % of the sweep's best, the kept setting included. Bar: ≤ 40. Where the
machine has other work, steps are slow now and then; so what was found is compared with the best in turns, too.

Hours of training with nothing but noise are given to the detector alone: spans with 10 % noise, a twentieth of them
five times as long, at 10 iterations a second. Bar: no re-tune.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.lib.cluster import LabError, LabShape, NetLab, why_unavailable
from bench.lib.contenders import Sirtaki
from bench.lib.harness import (
    Bar,
    Report,
    Spread,
    finish,
    give_result,
    main_or_rank,
    parser,
    rank_argv,
    rank_env,
    take_result,
)
from bench.lib.models import EmulatedModel, emulated_resnet50
from sirtaki.autotune.knobs import Knobs
from sirtaki.comm.gradients.buffers import Pace
from sirtaki.engine.tuning.warmup import DriftWatch

MBIT = 1_000_000
USUAL = LabShape(nodes=4, link_bits_per_s=400 * MBIT, flow_bits_per_s=400 * MBIT)
CHANGED = {
    "link": replace(USUAL, link_bits_per_s=100 * MBIT, flow_bits_per_s=100 * MBIT),
    "cap": replace(USUAL, flow_bits_per_s=10 * MBIT),
    "node": USUAL,
}
WORDS = {
    "link": "link 400 → 100 Mbit/s",
    "cap": "flows capped at 10 Mbit/s",
    "node": "one node computes 30 times as long",
}
SLOWED = 30.0
STREAMS = (1, 2, 4, 8, 16, 24)
UNIT_BYTES = (128 << 10, 512 << 10, 2 << 20)
SWEEP_STEPS = 4
"""Of each setting in a turn, the first of which does not count."""

FINALISTS, TURNS = 3, 3
"""The fastest of the sweep and the kept setting run again, in turns, as one of many is fast by luck."""

WITHIN, LIMIT = 1.10, 40
COMPUTE_S = 0.15
JOB_TIMEOUT_S = 1800.0
HOUR = 36_000


class Scene:
    """What changes the conditions outside, as the ranks of a job see it."""

    def __init__(self, folder: Path, comm: Any, model: EmulatedModel) -> None:
        self._folder, self._comm, self._model = folder, comm, model
        self._usual_s = list(model.durations_s)
        self._number = 0

    def change(self, case: str, *, changed: bool) -> None:
        """Collective: the case's condition begins, or the usual one."""
        self._number += 1
        self._comm.Barrier()
        if case == "node":
            slow = changed and self._comm.rank == self._comm.size - 1
            self._model.durations_s = [(SLOWED if slow else 1.0) * duration_s for duration_s in self._usual_s]
        elif self._comm.rank == 0:
            (self._folder / f"want{self._number}").write_text(case if changed else "usual")
            while not (done := self._folder / f"done{self._number}").exists():
                time.sleep(0.05)
            if problem := done.read_text():
                raise LabError(problem)
        self._comm.Barrier()


def steps(contender: Sirtaki, count: int) -> tuple[list[float], list[bool]]:
    """Collective: this rank's time of each step, and whether it belonged to a search."""
    times_s, tuning = [], []
    assert contender._sync is not None
    for _ in range(count):
        begin_s = time.perf_counter()
        contender.step()
        times_s.append(time.perf_counter() - begin_s)
        tuning.append(contender._sync.tuning)
    return times_s, tuning


def sweep(contender: Sirtaki, comm: Any, kept: Knobs) -> dict[str, list[float]]:
    """Collective: steps of the setting kept under this condition and of the fastest ones, on the slowest rank."""
    tuned = contender._sync
    assert tuned is not None

    def turn(knobs: Knobs) -> list[float]:
        tuned._apply(knobs)
        times_s, _ = steps(contender, SWEEP_STEPS)
        slowest_s: list[float] = np.max(comm.allgather(times_s), axis=0)[1:].tolist()
        return slowest_s

    grid = [replace(kept, cuts=None, streams=n, unit_bytes=size) for n in STREAMS for size in UNIT_BYTES]
    once = {knobs: median(turn(knobs)) for knobs in grid}
    field = list(dict.fromkeys([kept, *sorted(once, key=once.__getitem__)[:FINALISTS]]))
    again: dict[str, list[float]] = {knobs.describe(): [] for knobs in field}
    for _ in range(TURNS):
        for knobs in field:
            again[knobs.describe()] += turn(knobs)
    tuned._apply(kept)
    return again


def on_rank(options: Mapping[str, Any]) -> None:
    """What each rank does: warms up, goes through the conditions, sweeps both, gives the result."""
    from mpi4py import MPI

    import sirtaki.torch as hvd

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    hvd.init()
    models: list[EmulatedModel] = []

    def make() -> Any:
        model, batch = emulated_resnet50(rank=comm.rank, compute_s=options["compute_s"], scale=options["scale"])
        models.append(model)
        return model, batch

    job = Sirtaki(make, tune=True)
    assert job._sync is not None
    scene = Scene(Path(options["folder"]), comm, models[0])
    for _ in range(2):
        job.step()
    job.warm_up()
    phases, kept = [], {}
    for changed in (None, True, False):
        if changed is not None:
            scene.change(options["case"], changed=changed)
        before = job._sync.knobs.describe()
        times_s, tuning = steps(job, options["quiet"] if changed is None else options["steps"])
        slowest_s = np.max(comm.allgather(times_s), axis=0).tolist()
        kept[changed] = job._sync.knobs
        after = kept[changed].describe()
        phases.append({"steps_s": slowest_s, "tuning": tuning, "before": before, "after": after})
    job._sync._drift = None
    sweeps = {}
    for changed in (False, True):
        scene.change(options["case"], changed=changed)
        sweeps[str(changed)] = sweep(job, comm, kept[changed])
    job.check_average((comm.size + 1) / 2)
    if comm.rank == 0:
        give_result({"phases": phases, "sweeps": sweeps, "warmup_steps": job.warmup_steps})
    comm.Barrier()
    hvd.shutdown()


def change_as_asked(lab: NetLab, folder: Path, over: threading.Event) -> None:
    """Gives the links the shape that the job asks for, until it is over; where it cannot, it says so to the job."""
    number = 1
    while not over.wait(0.05):
        wanted = folder / f"want{number}"
        if wanted.exists() and (name := wanted.read_text()):
            problem = ""
            try:
                lab.reshape(CHANGED.get(name, USUAL))
            except LabError as err:
                problem = str(err)
            (folder / f"done{number}.part").write_text(problem)
            (folder / f"done{number}.part").rename(folder / f"done{number}")
            number += 1


def run(case: str, options: Mapping[str, Any]) -> Any:
    """The result of one case's job."""
    with NetLab(USUAL) as lab, tempfile.TemporaryDirectory() as name:
        over = threading.Event()
        changer = threading.Thread(target=change_as_asked, args=[lab, Path(name), over])
        changer.start()
        env = {"SIRTAKI_WARMUP_ITERATIONS": "40", **rank_env()}
        try:
            argv = rank_argv("bench.drift", {**options, "case": case, "folder": name})
            return take_result(lab.run_ranks(argv, env=env, timeout_s=JOB_TIMEOUT_S))
        finally:
            over.set()
            changer.join()


def answered_after(steps_s: Sequence[float], best_s: float) -> int | None:
    """Iterations until steps are, and stay, within 10 % of the best; None = not in this condition."""
    for number in range(len(steps_s) - 6):
        if max(median(steps_s[number : number + 7]), median(steps_s[number:])) <= WITHIN * best_s:
            return number
    return None


def measure(report: Report, case: str, options: Mapping[str, Any]) -> None:
    """Adds the rows and bars of one case."""
    result = run(case, options)
    usual, *answers = result["phases"]
    for phase, condition, name in zip(answers, ("True", "False"), (WORDS[case], f"{WORDS[case]}: over"), strict=True):
        settings = result["sweeps"][condition]
        best_s = min(median(times_s) for times_s in settings.values())
        searching = [number for number, tuning in enumerate(phase["tuning"]) if tuning]
        answered = answered_after(phase["steps_s"], best_s)
        in_turns = median(settings[phase["after"]]) / best_s
        report.rows.append(
            {
                "change": name,
                "usual_s": Spread.of(usual["steps_s"][-20:]),
                "at_first_s": Spread.of(phase["steps_s"][: searching[0] if searching else 20]),
                "in_the_end_s": Spread.of(phase["steps_s"][-20:]),
                "sweeps_best_s": best_s,
                "re_tune": f"{searching[0]} – {searching[-1] + 1}" if searching else "none",
                "within_10_percent_after": answered,
                "kept_of_best_in_turns": in_turns,
                "before": phase["before"],
                "after": phase["after"],
                "steps_s": phase["steps_s"],
                "sweep_s": settings,
            }
        )
        value = float("nan") if answered is None else float(answered)
        report.bars.append(Bar(claim=f"{name}: iterations to within 10 % of the best", value=value, limit=LIMIT))
        claim = f"{name}: the setting found, in turns with the sweep's best"
        report.bars.append(Bar(claim=claim, value=in_turns, limit=WITHIN))


def quiet_hour(seed: int) -> int:
    """Re-tunes that noise alone sets off in an hour."""
    rng, watch, found = np.random.default_rng(seed), DriftWatch(), 0
    spans_s = np.exp(0.1 * rng.standard_normal(HOUR)) * np.where(rng.random(HOUR) < 0.05, 5.0, 1.0)
    for span_s in spans_s.tolist():
        watch.note(span_s)
        if watch.pace is not Pace.USUAL:
            found += 1
            watch.retuned()
    return found


def main() -> int:
    """Runs every case."""
    flags = parser(__doc__.split("\n")[0])
    flags.add_argument("--cases", nargs="+", choices=list(CHANGED), default=list(CHANGED))
    flags.add_argument("--scale", type=float, help="of gradients and compute; default 0.1, quick 0.04")
    flags.add_argument("--steps", type=int, default=85, help="in each condition after the first")
    args = flags.parse_args()
    if (reason := why_unavailable()) is not None:
        print(f"the emulated cluster cannot run here: {reason}", file=sys.stderr)
        return 2
    args.scale = args.scale or (0.04 if args.quick else 0.1)
    report = Report(name="drift")
    hours = [quiet_hour(args.seed + number) for number in range(10)]
    report.bars.append(Bar(claim="re-tunes in ten quiet hours of noise, detector alone", value=sum(hours), limit=0.0))
    options = {"scale": args.scale, "compute_s": COMPUTE_S * args.scale, "steps": args.steps, "quiet": 45}
    for case in args.cases:
        measure(report, case, options)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main_or_rank(main, on_rank))
